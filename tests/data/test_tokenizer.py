import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenize.chat_template import CHATML
from data.tokenize.tokenizer import SPECIAL_TOKENS, Tokenizer
from data.tokenize.train import MIN_VOCAB_SIZE, RESERVED_TAGS, train_bpe

SHIPPED = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"
TEXTS = ["Hello world 123", "  indented\n\n\ttext  ", "你好，世界！今天天气很好。", "naïve café 🙂 \u2028 line", "def f(x):\n    return x < 3", ""]


@pytest.fixture(scope="module")
def auto():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(SHIPPED)


def test_the_shipped_tokenizer_has_6400_words_and_its_control_tokens_first(tokenizer):
    assert tokenizer.vocab_size == 6400
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert list(tokenizer.control_ids) == [*SPECIAL_TOKENS, *RESERVED_TAGS] and list(tokenizer.control_ids.values()) == list(range(9))


@pytest.mark.parametrize("text", TEXTS)
def test_autotokenizer_cuts_plain_text_as_we_do(tokenizer, auto, text):
    assert auto(text)["input_ids"] == tokenizer.encode(text)


def test_autotokenizer_knows_the_roles_of_the_special_tokens(tokenizer, auto):
    assert (auto.pad_token_id, auto.bos_token_id, auto.eos_token_id, auto.unk_token_id) == (0, 1, 2, 0)
    assert auto.model_max_length == 32768 and auto.chat_template == tokenizer.chat_template


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_its_ids(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize("token", [*SPECIAL_TOKENS, *RESERVED_TAGS])
def test_a_control_token_in_plain_text_stays_text(tokenizer, token):
    ids = tokenizer.encode(f"a {token}{token} b")
    assert not set(ids) & set(tokenizer.control_ids.values())
    assert tokenizer.decode(ids) == f"a {token}{token} b"


def test_decoding_leaves_out_special_tokens_and_keeps_the_assistants_tags(tokenizer):
    ids = [tokenizer.bos_id, tokenizer.control_ids["<think>"], *tokenizer.encode("hm"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "<think>hm"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|><think>hm<|im_end|>"


def test_digits_stand_alone(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1907")] == ["1", "9", "0", "7"]


def test_a_batch_is_cut_like_its_texts(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_training_knows_all_bytes_and_keeps_the_fixed_ids_even_when_the_text_holds_the_tokens(tmp_path):
    trained = train_bpe(["<|im_end|> abc <think> " * 50], 300, tmp_path / "new", CHATML.read_text())
    assert MIN_VOCAB_SIZE < trained.vocab_size <= 300 and (trained.bos_id, trained.eos_id, trained.pad_id) == (1, 2, 0)
    assert not set(trained.encode("<|im_end|> <think>")) & set(range(9))
    assert trained.decode(trained.encode("\x00 日本 🙂")) == "\x00 日本 🙂"


def test_the_fingerprint_changes_with_the_chat_template(tmp_path, tokenizer):
    copy = shutil.copytree(SHIPPED, tmp_path / "copy")
    assert Tokenizer.load(copy).fingerprint == tokenizer.fingerprint
    (copy / "chat_template.jinja").write_text("other")
    assert Tokenizer.load(copy).fingerprint != tokenizer.fingerprint


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="taken by the control tokens"):
        train_bpe(["a"], MIN_VOCAB_SIZE - 1, tmp_path, "")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a file of the tokenizer is missing"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_whose_merges_make_a_control_token_is_refused(tmp_path):
    copy = shutil.copytree(SHIPPED, tmp_path / "copy")
    stored = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    stored["added_tokens"].append({**stored["added_tokens"][0], "id": stored["model"]["vocab"]["Ġthe"], "content": "Ġthe"})
    (copy / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be built"):
        Tokenizer.load(copy)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    copy = shutil.copytree(SHIPPED, tmp_path / "copy")
    config = json.loads((copy / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["eos_token"]
    (copy / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="no eos_token"):
        Tokenizer.load(copy)
