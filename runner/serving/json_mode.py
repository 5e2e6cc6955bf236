"""Answers that are JSON (`response_format`): the tokens that may follow, computed by the library llguidance."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.inference.load import LoadedModel
from runner.serving.protocol import ApiError


def json_constraint(trained: LoadedModel, schema: dict[str, Any]) -> Callable[[Tensor, list[int]], Tensor]:
    """Return what removes from logits (1, V) the tokens that may not follow those of an answer.

    Raises ApiError if the library is missing, or cannot enforce the schema with this tokenizer.
    """
    try:
        from llguidance import LLMatcher

        tokens = _read_tokens(trained.tokenizer.folder, trained.model.cfg.vocab_size, trained.stop_ids(True))
        # no space between tokens of JSON: a small model would go on with spaces
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        problem = "; ".join(LLMatcher.validate_grammar_with_warnings(grammar, tokens)[1])
    except ModuleNotFoundError:
        problem = "the server needs a package: pip install llguidance, and start it again"
    except ValueError as error:  # e.g. the library cannot read the tokenizer
        problem = str(error)
    if problem:
        message = f"response_format cannot be enforced: {problem}"
        raise ApiError(400, message, param="response_format", code="unsupported_parameter")
    matcher = LLMatcher(tokens, grammar, log_level=0)

    def constrain(logits: Tensor, ids: list[int]) -> Tensor:
        matcher.consume_tokens(ids[-1:])
        allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8).to(logits.device)
        return logits.masked_fill(allowed == 0, -torch.inf)

    return constrain


@lru_cache(maxsize=1)
def _read_tokens(folder: Path, vocab_size: int, stop_ids: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"), vocab_size, [*stop_ids])
