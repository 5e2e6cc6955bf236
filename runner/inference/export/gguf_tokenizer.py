"""Tokenizer of a GGUF file, and the Modelfile of Ollama: what llama.cpp splits and merges in the same way, anything
else is refused.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from gguf import TokenType

from common.errors import UserError
from data.tokenize.chat_template import ChatTemplate, default_template

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from data.tokenize.tokenizer import Tokenizer
    from runner.inference.load import LoadedModel

# of transformers: llama.cpp's templates have no such block
GENERATION_TAG = re.compile(r"({%[-+]?\s*)(end)?generation(?=\s*[-+]?%})")
CONVERTER_FIX = "format=hf, then llama.cpp's convert_hf_to_gguf.py; or converter=PATH_OF_IT"
DIGIT_SPLIT = {"type": "Digits", "individual_digits": True}
PLAIN_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
# Regular expressions of byte-level BPE tokenizers, by the name that llama.cpp knows them under
PATTERN_NAMES = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
}
IGNORES_MERGES = ("llama-bpe",)  # names under which llama.cpp does not merge what is a token already
STOP_TOKEN = re.compile(r"[\x21\x23-\x7e]+")  # what a line of a Modelfile can hold
CHATML_PROBE = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
CHATML_TEXT = (
    "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in CHATML_PROBE)
    + "<|im_start|>assistant\n"
)
CHATML_OF_OLLAMA = """{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""


def check_tokenizer_is_supported(tokenizer: Tokenizer) -> None:
    """Raise UserError if llama.cpp would read other token ids from a text than `tokenizer`."""
    stored = _stored(tokenizer)
    name, model = pre_tokenizer_name(tokenizer), stored["model"]
    settings = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "dropout")  # language: allow word
    if unsupported := [key for key in settings if model.get(key)]:
        raise UserError(
            f"llama.cpp has no byte-level BPE with {', '.join(unsupported)}",
            tokenizer.folder / "tokenizer.json",
            CONVERTER_FIX,
        )
    if bool(model.get("ignore_merges")) != (name in IGNORES_MERGES) and (
        token := tokenizer.token_kept_by_ignore_merges()
    ):
        message = f"llama.cpp merges the token {token!r} differently: it knows this tokenizer as {name}, whose ignore_merges is {name in IGNORES_MERGES}"
        raise UserError(message, tokenizer.folder / "tokenizer.json", CONVERTER_FIX)


def pre_tokenizer_name(tokenizer: Tokenizer) -> str:
    """Return the name under which llama.cpp knows how the tokenizer splits texts.

    Raises UserError if it does not know it.
    """
    stored = _stored(tokenizer)
    steps = stored["pre_tokenizer"] or {"pretokenizers": []}
    *before, last = steps.get("pretokenizers", [steps]) or [{"type": "none"}]
    uses_regex = last.get("use_regex", True)
    is_byte_level = last["type"] == "ByteLevel" and not last.get("add_prefix_space")
    if is_byte_level and stored["normalizer"] in (None, {"type": "NFC"}):
        if uses_regex and before in ([], [DIGIT_SPLIT]):
            return "smollm" if before else "gpt-2"
        if len(before) == 1 and before[0].items() >= PLAIN_SPLIT.items() and not uses_regex:
            if (pattern := before[0]["pattern"].get("Regex")) in PATTERN_NAMES:
                return PATTERN_NAMES[pattern]
    raise UserError(
        "llama.cpp has no name for how this tokenizer splits texts",
        tokenizer.folder / "tokenizer.json",
        CONVERTER_FIX,
    )


def add_tokenizer(writer: GGUFWriter, source: LoadedModel, vocab_size: int) -> None:
    """Add the byte-level BPE; ids of the model's vocabulary without a token become unused ones."""
    tokenizer = source.tokenizer
    stored = _stored(tokenizer)
    tokens = {token_id: token for token, token_id in tokenizer.token_ids().items()}
    is_special = {token["id"]: token["special"] for token in stored["added_tokens"]}
    kind_of = {None: TokenType.NORMAL, True: TokenType.CONTROL, False: TokenType.USER_DEFINED}
    kinds = [kind_of[is_special.get(i)] if i in tokens else TokenType.UNUSED for i in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
    writer.add_token_list([tokens.get(i, f"[unused{i}]") for i in range(vocab_size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in stored["model"]["merges"]])
    if tokenizer.bos_id is not None:
        writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.pad_id)
    others = [token_id for token_id in tokenizer.stop_ids if token_id != tokenizer.eos_id]
    for add, token_id in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(token_id)
    writer.add_add_bos_token(begins_with_bos(source))
    writer.add_add_eos_token(False)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(template_of_llama_cpp(tokenizer))


def template_of_llama_cpp(tokenizer: Tokenizer) -> str:
    """Return the chat template with `if true` in place of the generation marks: a tag strips white space around it."""
    template = default_template(tokenizer.chat_template, str(tokenizer.folder))
    return GENERATION_TAG.sub(lambda tag: tag[1] + ("endif" if tag[2] else "if true"), template)


def begins_with_bos(source: LoadedModel) -> bool:
    """Return whether a prompt begins with bos_token: that of a model trained on texts, or where the post-processor of
    tokenizer.json adds it.
    """
    tokenizer = source.tokenizer
    if tokenizer.bos_id is None:
        return False
    return not source.is_chat_model or tokenizer.encode_rendered("a", add_special=True)[:1] == [tokenizer.bos_id]


def limits(tokenizer: Tokenizer) -> list[str]:
    """Return what llama.cpp does otherwise than this tokenizer, one line each."""
    stored = _stored(tokenizer)
    flags = ("lstrip", "rstrip", "single_word")  # language: allow word
    stripping = [token["content"] for token in stored["added_tokens"] if any(token.get(flag) for flag in flags)]
    notes = []
    if stored["normalizer"]:
        notes.append("texts are not normalized by llama.cpp: those that are not in NFC get other tokens")
    if stripping:
        notes.append(f"llama.cpp keeps spaces beside {', '.join(stripping[:4])}, this tokenizer drops them")
    return notes


def modelfile(source: LoadedModel) -> str:
    """Return a Modelfile for `ollama create`: the chat template of a GGUF file is not always read, so that of ChatML is
    in it.
    """
    tokenizer = source.tokenizer
    texts = {token_id: token for token, token_id in tokenizer.token_ids().items()}
    stops = [texts[token_id] for token_id in tokenizer.stop_ids if token_id in texts]
    stops = [stop for stop in stops if STOP_TOKEN.fullmatch(stop)]
    lines = ["FROM ./model.gguf"]
    if not source.is_chat_model:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif _is_chatml(tokenizer):
        lines.append(f'TEMPLATE """{CHATML_OF_OLLAMA}"""')
    else:
        lines.append(
            "# TEMPLATE: the chat template is not ChatML; write it here in the language of Ollama, which does not read that of transformers"
        )
    return "\n".join([*lines, *(f'PARAMETER stop "{stop}"' for stop in stops)]) + "\n"


def _is_chatml(tokenizer: Tokenizer) -> bool:
    try:
        return tokenizer.decode(ChatTemplate(tokenizer).encode_prompt(CHATML_PROBE), skip_special=False) == CHATML_TEXT
    except UserError:  # the template has no system messages, or does not render
        return False


def _stored(tokenizer: Tokenizer) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((tokenizer.folder / "tokenizer.json").read_text(encoding="utf-8"))
    return stored
