import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import ChatTemplate, decode_loss_spans

from common.errors import UserError
from data.tokenize.origin import SAMPLE_TOKENIZER
from data.tokenize.tokenizer import SPECIAL_TOKENS, Tokenizer
from data.tokenize.train import MIN_VOCAB_SIZE, RESERVED_TAGS, train_bpe

SHIPPED = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"
TEXTS = [
    "Hello world 123",
    "  indented\n\n\ttext  ",
    "你好，世界！今天天气很好。",
    "naïve café 🙂 \u2028 line",
    "def f(x):\n    return x < 3",
    "",
]


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(SHIPPED, tmp_path / "copy")


def test_shipped_tokenizer_has_6400_tokens_and_control_tokens_first(tokenizer):
    assert tokenizer.vocab_size == 6400
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert list(tokenizer.control_ids) == [*SPECIAL_TOKENS, *RESERVED_TAGS] and list(
        tokenizer.control_ids.values()
    ) == list(range(9))


def test_tokenizer_agrees_with_autotokenizer(tokenizer):
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(SHIPPED)
    assert [auto(text)["input_ids"] for text in TEXTS] == tokenizer.encode_batch(TEXTS)
    assert (auto.pad_token_id, auto.bos_token_id, auto.eos_token_id, auto.unk_token_id) == (0, 1, 2, 0)
    assert auto.model_max_length == 32768 and auto.chat_template == tokenizer.chat_template


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_restores_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize("token", [*SPECIAL_TOKENS, *RESERVED_TAGS])
def test_tokenizer_encodes_the_name_of_a_control_token_as_text(tokenizer, token):
    ids = tokenizer.encode(f"a {token}{token} b")
    assert not set(ids) & set(tokenizer.control_ids.values())
    assert tokenizer.decode(ids) == f"a {token}{token} b"


def test_tokenizer_decodes_without_special_tokens_but_with_tags(tokenizer):
    ids = [tokenizer.bos_id, tokenizer.control_ids["<think>"], *tokenizer.encode("hm"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "<think>hm"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|><think>hm<|im_end|>"


def test_tokenizer_splits_numbers_into_digits(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1907")] == ["1", "9", "0", "7"]


def test_tokenizer_encodes_a_batch_as_its_texts(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_trained_tokenizer_has_all_bytes_and_fixed_control_ids(tmp_path):
    trained = train_bpe(["<|im_end|> abc <think> " * 50], 300, tmp_path / "new")
    assert MIN_VOCAB_SIZE < trained.vocab_size <= 300 and (trained.bos_id, trained.eos_id, trained.pad_id) == (1, 2, 0)
    assert not set(trained.encode("<|im_end|> <think>")) & set(range(9))
    assert trained.decode(trained.encode("\x00 日本 🙂")) == "\x00 日本 🙂"


def test_tokenizer_fingerprint_depends_on_the_chat_template(folder, tokenizer):
    assert Tokenizer.load(folder).fingerprint == tokenizer.fingerprint
    (folder / "chat_template.jinja").write_text("other")
    assert Tokenizer.load(folder).fingerprint != tokenizer.fingerprint


def test_tokenizer_training_refuses_a_vocabulary_below_the_bytes(tmp_path):
    with pytest.raises(UserError, match="vocab_size must be at least 265"):
        train_bpe(["a"], MIN_VOCAB_SIZE - 1, tmp_path)


def test_tokenizer_folder_without_files_is_refused(tmp_path):
    with pytest.raises(UserError, match="a file of the tokenizer is missing") as error:
        Tokenizer.load(tmp_path)
    assert "copy it there" in error.value.fix  # chat.py has no setting for another folder


def test_control_token_that_merges_produce_is_in_no_text(folder):
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"].append(
        {**content["added_tokens"][0], "id": content["model"]["vocab"]["Ġthe"], "content": "Ġthe"}
    )
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("in the rain")
    assert not set(ids) & set(tokenizer.control_ids.values()) and tokenizer.decode(ids) == "in the rain"


def test_tokenizer_without_an_end_token_is_refused(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match="no eos_token"):
        Tokenizer.load(folder)


def with_config(folder: Path, **changes: object) -> Tokenizer:
    """Return the tokenizer with changed fields of tokenizer_config.json; ... removes a field."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) | changes
    (folder / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not ...}), encoding="utf-8"
    )
    return Tokenizer.load(folder)


def test_tokenizer_without_a_pad_token_pads_with_its_end_token_with_a_note(folder):
    loaded = with_config(folder, pad_token=...)  # as Llama
    assert (loaded.pad_id, loaded.bos_id) == (loaded.eos_id, 1)
    assert [note for note in loaded.notes(of_texts=True) if "no pad_token" in note and "<|im_end|>" in note]


def test_tokenizer_whose_bos_token_is_null_begins_texts_without_one(folder):
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<|im_start|>"}')
    loaded = with_config(folder, bos_token=None)  # as Qwen3
    assert (loaded.bos_id, loaded.bos_ids) == (None, [])
    assert ["no bos_token" in note for note in loaded.notes(of_texts=True)] == [True] and loaded.notes(
        of_texts=False
    ) == []


def test_tokenizer_takes_special_tokens_from_the_map_of_older_folders(folder):
    (folder / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|endoftext|>"}'
    )
    loaded = with_config(folder, bos_token=..., eos_token=..., pad_token=..., unk_token=...)
    assert loaded.named_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}


def test_tokenizer_whose_files_name_no_special_token_is_read_as_gpt2(folder):
    loaded = with_config(
        folder, bos_token=..., eos_token=..., pad_token=..., unk_token=..., tokenizer_class="GPT2Tokenizer"
    )
    assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (0, 0, 0)
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    assert (auto.bos_token, auto.eos_token, auto.pad_token) == ("<|endoftext|>", "<|endoftext|>", None)


def test_tokenizer_whose_named_token_does_not_exist_is_refused(folder):
    with pytest.raises(UserError, match="bos_token <s> is none of its tokens"):
        with_config(folder, bos_token="<s>")


def test_tokenizer_stops_at_the_end_tokens_of_generation_config(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')  # as Llama 3, Gemma, GLM
    assert Tokenizer.load(folder).stop_ids == (0, 2)


def test_tokenizer_does_not_stop_at_ids_that_no_token_has(folder):
    """No model generates them, and a GGUF file cannot hold them."""
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, -5, 9999999999]}')
    assert Tokenizer.load(folder).stop_ids == (0, 2)


def write_changed(folder: Path, change) -> Path:
    stored = json.loads((folder / "tokenizer.json").read_text())
    change(stored)
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return folder


def added_token(content: str, token_id: int, **fields: bool) -> dict:
    # language: allow word
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token_id, "content": content, **flags, **fields}


@pytest.mark.parametrize("dropout", [0.5, 1.0, 1])
def test_tokenizer_with_dropout_splits_a_text_always_in_the_same_way(folder, tokenizer, dropout):
    """Before: each call gave other ids, so that no loss could be measured twice and no run be resumed."""
    dropping = Tokenizer.load(write_changed(folder, lambda stored: stored["model"].update(dropout=dropout)))
    for text in TEXTS:
        assert all(dropping.encode(text) == dropping.encode_rendered(text) == tokenizer.encode(text) for _ in range(5))
    assert (dropping.fingerprint, dropping.tokens_fingerprint) == (tokenizer.fingerprint, tokenizer.tokens_fingerprint)
    assert dropping.notes(of_texts=True) == [
        f"{folder}/tokenizer.json has dropout {dropout}, which splits a text in another way each time: it is switched off"
    ]


@pytest.mark.parametrize("dropout", [None, 0.0, 0])
def test_tokenizer_without_dropout_has_no_note(folder, dropout):
    assert (
        Tokenizer.load(write_changed(folder, lambda stored: stored["model"].update(dropout=dropout))).notes(
            of_texts=True
        )
        == []
    )


@pytest.mark.parametrize("normalized", [False, True])
def test_added_tokens_of_spaces_are_text_with_their_ids_as_in_transformers(folder, normalized):
    """GPT-NeoX and Gemma have added tokens for runs of spaces and newlines: code is encoded with them."""
    spaces = [
        added_token(content, 6400 + i, normalized=normalized) for i, content in enumerate(("        ", "    ", "\n\n"))
    ]
    write_changed(folder, lambda stored: stored["added_tokens"].extend(spaces))
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    texts = ["def f(x):\n    if x:\n        return x\n\nprint(f(1))", *TEXTS]
    assert tokenizer.encode_batch(texts) == [auto(text)["input_ids"] for text in texts]
    assert 6401 in tokenizer.encode(texts[0]) and not set(range(6400, 6403)) & set(tokenizer.control_ids.values())
    assert tokenizer.encode("<|im_end|>    ")[-1] == 6401 and tokenizer.eos_id not in tokenizer.encode("<|im_end|>    ")


def test_added_letters_are_text_with_their_ids_as_in_transformers(folder):
    """Terms of a field that `add_tokens` has added were spelled, although other programs use their embeddings."""
    terms = [added_token(content, 6400 + i, normalized=True) for i, content in enumerate(("Tolo", "COVID-19", "<t>"))]
    write_changed(folder, lambda stored: stored["added_tokens"].extend(terms))
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    text = "Where does Tolo live? COVID-19"
    assert tokenizer.encode(text) == auto(text)["input_ids"] and {6400, 6401} < {*tokenizer.encode(text)}
    assert 6402 not in tokenizer.encode("<t>") and tokenizer.control_ids["<t>"] == 6402


def test_added_letters_that_end_texts_are_a_control_token(folder):
    """Before: a text with these letters had the eos_token in it, where the file does not call it special."""
    write_changed(folder, lambda stored: stored["added_tokens"].append(added_token("ENDE", 6400)))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "ENDE"}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_id == tokenizer.control_ids["ENDE"] == 6400
    assert 6400 not in tokenizer.encode("Das ENDE") and tokenizer.decode(tokenizer.encode("Das ENDE")) == "Das ENDE"


def test_merge_that_makes_a_control_token_is_not_applied_to_texts(folder):
    """Tokenizers converted from SentencePiece have merges of all tokens, also of control tokens."""

    def change(stored: dict) -> None:
        stored["model"]["vocab"]["<ab>"] = 6400
        known = stored["model"]["vocab"]
        known |= {piece: 6401 + i for i, piece in enumerate(("<a", "b>")) if piece not in known}
        stored["model"]["merges"] += [["<", "a"], ["b", ">"], ["<a", "b>"]]
        stored["added_tokens"].append(added_token("<ab>", 6400, special=True))

    tokenizer = Tokenizer.load(write_changed(folder, change))
    assert (
        tokenizer.control_ids["<ab>"] == 6400
        and 6400 not in tokenizer.encode("x<ab>y")
        and tokenizer.decode(tokenizer.encode("x<ab>y")) == "x<ab>y"
    )


def test_tokenizer_that_was_copied_is_built_once(folder, tmp_path):
    first, copy = Tokenizer.load(folder), Tokenizer.load(shutil.copytree(folder, tmp_path / "another"))
    assert copy._full is first._full and copy.folder == tmp_path / "another" and first.folder == folder


TEXTS = ["Where does Tolo live? In Oru.", "8 + 7 = 15, and  two spaces", "a b c", "Tolo\nOru"]
MODELS = ("Unigram", "WordPiece", "WordLevel", "BPE")


def model_of(kind: str) -> dict:
    """Return the model of a small tokenizer, trained on TEXTS, with the control tokens <unk>, <s> and </s>."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, pre_tokenizers, trainers

    unknown = {"unk_token": "<unk>"}
    engine = Engine(getattr(models, kind)(**({} if kind == "Unigram" else unknown)))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    settings = {"special_tokens": ["<unk>", "<s>", "</s>"], "show_progress": False, "vocab_size": 90}
    trainer = getattr(trainers, f"{kind.replace('BPE', 'Bpe')}Trainer")
    engine.train_from_iterator(TEXTS, trainer(**settings, **(unknown if kind == "Unigram" else {})))
    return json.loads(engine.to_str())["model"]


def write_model(folder: Path, model: dict, pre_tokenizer: dict | None = None, **more: object) -> Path:
    special = [added_token(token, i, special=True) for i, token in enumerate(["<unk>", "<s>", "</s>"])]
    stored = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None}
    stored |= {"decoder": None, "pre_tokenizer": pre_tokenizer, "added_tokens": special, "model": model} | more
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.mark.parametrize("kind", MODELS)
def test_tokenizer_of_every_model_encodes_as_the_library_does(kind, tmp_path):
    tokenizer = Tokenizer.load(write_model(tmp_path / kind, model_of(kind), {"type": "Whitespace"}))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == tokenizer.encode_rendered(text) and set(ids).isdisjoint({0, 1, 2})
    assert tokenizer.encode("\u4e2d") == [0]
    assert {1, 2}.isdisjoint(tokenizer.encode("<s> Tolo </s> <s>Oru"))
    assert tokenizer.encode_rendered("<s>Tolo</s>") == [1, *tokenizer.encode("Tolo"), 2]
    assert "texts that the tokenizer has no tokens for become <unk>" in tokenizer.notes(True)
    assert Tokenizer.load(SAMPLE_TOKENIZER).notes(True) == []


def test_unigram_tokens_keep_their_ids_beside_control_tokens(tmp_path):
    """The id of a piece is its position; nothing that a text can have is encoded to a control token."""
    pieces = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], *([c, -3.0] for c in "<s>/ab \u2581"), ["ab", -1.0]]
    stored = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    special = (("<unk>", 0), ("<s>", 1), ("</s>", 2), ("<x>", 12))
    added = [added_token(token, i, special=True) for token, i in special] + [added_token("\u2581\u2581", 13)]
    tokenizer = Tokenizer.load(write_model(tmp_path / "first", stored, added_tokens=added))
    assert tokenizer.encode("<s>ab</s>") == [3, 4, 5, 11, 3, 6, 4, 5]
    assert tokenizer.encode("a\u2581\u2581b") == [7, 13, 8] == tokenizer.encode_rendered("a\u2581\u2581b")
    pieces[-1][1] = -9.0
    other = Tokenizer.load(write_model(tmp_path / "second", stored, added_tokens=added))
    assert other.encode("ab") == [7, 8] and other.tokens_fingerprint != tokenizer.tokens_fingerprint
    assert other.token_ids() == tokenizer.token_ids()


@pytest.mark.parametrize("kind", MODELS)
def test_text_without_tokens_is_refused_where_there_is_no_unknown_token(kind, tmp_path):
    """BPE ended with a traceback."""
    model = model_of(kind) | ({"unk_id": None} if kind == "Unigram" else {"unk_token": "<nothing>"})
    tokenizer = Tokenizer.load(write_model(tmp_path / kind, model, {"type": "Whitespace"}))
    with pytest.raises(UserError, match="the tokenizer fails: "):
        tokenizer.encode("\u4e2d")
    assert not any("become" in note for note in tokenizer.notes(True))


@pytest.mark.parametrize("scheme", ["prepend", "always", "first", "never"])
def test_space_before_texts_is_where_transformers_has_it(scheme, tmp_path):
    """An answer behind text began with one more space: TinyLlama, Zephyr, Llama 2; with `first` every text did."""
    tokens = ["<unk>", "<s>", "</s>", *"\u2581\nabu:", "\u2581a", "\u2581b"]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": ["\u2581 a", "\u2581 b"]}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    parts = {"normalizer": {"type": "Prepend", "prepend": "\u2581"}} if scheme == "prepend" else {}
    folder = write_model(tmp_path / "tokenizer", model, None if parts else metaspace, **parts)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] + ':\n' + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:\n' }}{% endif %}"
    )
    template = ChatTemplate(Tokenizer.load(folder))
    chat = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abba", strict=True)]
    rows = template.encode(chat), (template.encode_prompt(chat[:-1]), None)
    texts = "u:\na</s>a:\nb</s>u:\nb</s>a:\na</s>", "u:\na</s>a:\nb</s>u:\nb</s>a:\n"
    assert [ids for ids, _ in rows] == [template.tokenizer.encode_rendered(text) for text in texts]
    assert decode_loss_spans(template.tokenizer, *rows[0]) == ["b </s>", "a </s>"]


def test_token_takes_the_white_space_behind_it_as_in_transformers(tmp_path):
    """Phi-3: a line break that no prompt of transformers has was trained and generated after."""
    tokens = ["<unk>", "<s>", "</s>", *"\nab "]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []}
    added = [added_token(token, i, special=True) | {"rstrip": i == 1} for i, token in enumerate(tokens[:3])]
    folder = write_model(tmp_path / "tokenizer", model, added_tokens=added)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<s>\n' + m.content + '</s>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>\n' }}{% endif %}"
    )
    template = ChatTemplate(Tokenizer.load(folder))
    chat = [{"role": "user", "content": "  a "}, {"role": "assistant", "content": "b"}]
    row = template.encode(chat)
    assert row[0] == template.tokenizer.encode_rendered("<s>\n  a </s>\n<s>\nb</s>\n")
    assert template.encode_prompt(chat[:1]) == template.tokenizer.encode_rendered("<s>\n  a </s>\n<s>\n")
    assert decode_loss_spans(template.tokenizer, *row) == ["b </s>"]
