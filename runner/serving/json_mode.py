"""Answers that are JSON (`response_format`): the tokens that may follow, computed by the library llguidance."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.limits import MAX_SCHEMA_STEPS
from runner.inference.load import LoadedModel
from runner.serving.protocol import ApiError

Constraint = Callable[[Tensor, list[int]], Tensor]
MAX_ITEMS = 10_000  # of the parser; the default refuses objects with 500 optional properties
REFUSED = "response_format cannot be enforced: "


def json_constraints(trained: LoadedModel, schema: dict[str, Any], count: int) -> list[Constraint]:
    """Return, for each of `count` answers, what removes from logits (1, V) the tokens that may not follow its own.

    Raises ApiError if the library is missing, or cannot enforce the schema with this tokenizer. What is returned raises
    UserError where the library gives up later.
    """
    try:
        from llguidance import LLMatcher, LLParserLimits

        tokens = _read_tokens(trained.tokenizer.folder, trained.model.cfg.vocab_size, trained.stop_ids(True))
        _check_multiples(json.dumps(schema))
        # no space between tokens of JSON: a small model would go on with spaces
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        limits = LLParserLimits(max_items_in_row=MAX_ITEMS, initial_lexer_fuel=MAX_SCHEMA_STEPS, verbose_errors=False)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
        matcher.compute_logit_bias()  # some errors appear here; the copies share its time
        problem = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
    except ModuleNotFoundError:
        problem = "the server needs a package: pip install llguidance, and start it again"
    except ValueError as error:  # e.g. the library cannot read the tokenizer
        problem = str(error)
    if problem:
        raise ApiError(400, REFUSED + problem, param="response_format", code="unsupported_parameter")
    return [_constraint(matcher) for _ in range(count)]


def _constraint(compiled: Any) -> Constraint:
    matcher = None

    def constrain(logits: Tensor, ids: list[int]) -> Tensor:
        nonlocal matcher
        matcher = matcher or compiled.deep_copy()  # takes memory: of the answers that are generated only
        matcher.consume_tokens(ids[-1:])
        allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8).to(logits.device)
        if matcher.is_error():  # it allows stop tokens only: the answer would look complete
            problem = matcher.get_error().partition("\n")[0]
            raise UserError(REFUSED + problem, "response_format", "simplify the schema")
        return logits.masked_fill(allowed == 0, -torch.inf)

    return constrain


def _check_multiples(schema: str) -> None:
    """Raises ValueError: the library takes time and memory in proportion to multiples, and limits neither."""
    multiples = [Decimal(number) for number in re.findall(r'"multipleOf": ([\d.e+-]+)', schema)]
    scale = 10 ** max((len(f"{number:f}".rstrip("0").partition(".")[2]) for number in multiples), default=0)
    common = 1  # of those of `allOf`
    for number in multiples:
        common = math.lcm(common, int(number * scale) or 1)  # or 1: with a zero, it would stay 0
        if common * len(multiples) > MAX_SCHEMA_STEPS:
            raise ValueError("multipleOf is too large")


@lru_cache(maxsize=1)
def _read_tokens(folder: Path, vocab_size: int, stop_ids: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"), vocab_size, [*stop_ids])
