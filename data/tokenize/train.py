"""FIXME data.tokenize.train."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from common.errors import UserError
from data.tokenize.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, Tokenizer

# Whole tokens too, but words of the assistant: decoding keeps them.
RESERVED_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + len(RESERVED_TAGS) + 256  # the control tokens and one symbol a byte
MAX_WORD_LENGTH = 16  # bytes; Chinese is written without spaces, and a sentence seen often must not become one token
MODEL_MAX_LENGTH = 32768


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path, chat_template: str) -> Tokenizer:
    """Train on `texts` (read once, as a stream) and write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    if vocab_size < MIN_VOCAB_SIZE:
        what = f"{MIN_VOCAB_SIZE} words are taken by the control tokens and the 256 bytes"
        raise UserError(what, f"vocab_size={vocab_size}", f"choose at least {MIN_VOCAB_SIZE}, e.g. 6400")
    engine = Engine(models.BPE())
    # Digits stay apart: a number is read digit by digit, whatever numbers the training text held.
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=token in SPECIAL_TOKENS) for token in SPECIAL_TOKENS + RESERVED_TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_WORD_LENGTH,
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    _write_tokenizer(folder, engine, chat_template)
    return Tokenizer.load(folder)


def _write_tokenizer(folder: Path, engine: Engine, chat_template: str) -> None:
    stored = json.loads(engine.to_str())
    for token in stored["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS  # the trainer marks every reserved token special
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the one name that transformers 4 and 5 both know
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": PAD,
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(stored, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
