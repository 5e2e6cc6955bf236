import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.tokenize.chat_template import CHATML
from data.tokenize.tokenizer import SPECIAL_TOKENS, Tokenizer
from data.tokenize.train import MIN_VOCAB_SIZE, RESERVED_TAGS, train_bpe

SHIPPED = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"
TEXTS = ["Hello world 123", "  indented\n\n\ttext  ", "你好，世界！今天天气很好。", "naïve café 🙂 \u2028 line", "def f(x):\n    return x < 3", ""]


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(SHIPPED, tmp_path / "copy")


def test_shipped_tokenizer_has_6400_tokens_and_control_tokens_first(tokenizer):
    assert tokenizer.vocab_size == 6400
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert list(tokenizer.control_ids) == [*SPECIAL_TOKENS, *RESERVED_TAGS] and list(tokenizer.control_ids.values()) == list(range(9))


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
    trained = train_bpe(["<|im_end|> abc <think> " * 50], 300, tmp_path / "new", CHATML.read_text())
    assert MIN_VOCAB_SIZE < trained.vocab_size <= 300 and (trained.bos_id, trained.eos_id, trained.pad_id) == (1, 2, 0)
    assert not set(trained.encode("<|im_end|> <think>")) & set(range(9))
    assert trained.decode(trained.encode("\x00 日本 🙂")) == "\x00 日本 🙂"


def test_tokenizer_fingerprint_depends_on_the_chat_template(folder, tokenizer):
    assert Tokenizer.load(folder).fingerprint == tokenizer.fingerprint
    (folder / "chat_template.jinja").write_text("other")
    assert Tokenizer.load(folder).fingerprint != tokenizer.fingerprint


def test_tokenizer_training_refuses_a_vocabulary_below_the_bytes(tmp_path):
    with pytest.raises(UserError, match="vocab_size must be at least 265"):
        train_bpe(["a"], MIN_VOCAB_SIZE - 1, tmp_path, "")


def test_tokenizer_folder_without_files_is_refused(tmp_path):
    with pytest.raises(UserError, match="a file of the tokenizer is missing"):
        Tokenizer.load(tmp_path)


def test_tokenizer_whose_merges_produce_a_control_token_is_refused(folder):
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"].append({**content["added_tokens"][0], "id": content["model"]["vocab"]["Ġthe"], "content": "Ġthe"})
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match="cannot be loaded"):
        Tokenizer.load(folder)


def test_tokenizer_without_an_end_token_is_refused(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match="no eos_token"):
        Tokenizer.load(folder)
