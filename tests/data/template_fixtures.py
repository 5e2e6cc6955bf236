"""What the tests of chat templates compare."""

from __future__ import annotations

from collections.abc import Iterable

from data.tokenize.tokenizer import Tokenizer


def decode_loss_spans(tokenizer: Tokenizer, ids: Iterable[int], loss_mask: Iterable[bool]) -> list[str]:
    """Return the spans of tokens with loss, decoded."""
    spans: list[list[int]] = []
    previous = False
    for token, has_loss in zip(ids, loss_mask, strict=True):
        if has_loss:
            spans = spans if previous else [*spans, []]
            spans[-1].append(token)
        previous = has_loss
    return [tokenizer.decode(ids, skip_special=False) for ids in spans]
