"""What the tests of chat templates encode and compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from data.schemas.messages import check_chat, drop_empty_system
from data.tokenize import chat_template
from data.tokenize.tokenizer import Tokenizer


class ChatTemplate(chat_template.ChatTemplate):
    def encode(
        self, messages: Any, tools: Any = None, where: str = "messages", loss_on: str = "assistant"
    ) -> tuple[list[int], list[bool]]:
        """Check and encode one conversation: (ids, loss_mask)."""
        messages, tools = check_chat(messages, tools, where)
        [(ids, spans)] = self.encode_segments([self.segments(drop_empty_system(messages), tools, where, loss_on)])
        loss_mask = np.zeros(len(ids), bool)
        for start, stop, _ in spans:
            loss_mask[start:stop] = True
        return ids.tolist(), loss_mask.tolist()


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
