"""MiniMind's two augmentations of conversations: a system message that is sometimes there, and an empty think block.

Both are off where their probability is 0. What is drawn is a function of (seed, identity) alone: in whichever process
and however often a row is read, it becomes the same conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data.schemas.schemas import ChatExample, PreferencePair

EMPTY_THINK = "<think>\n\n</think>\n\n"
RawRow = ChatExample | PreferencePair


def augment_row(row: RawRow, system_prob: float, system_prompts: Sequence[str], empty_think_prob: float, seed: int, identity: int) -> RawRow:
    """The row, or a changed copy of its conversation; both sides of a Pair are changed alike.

    With probability `system_prob`, one of `system_prompts` is put in front of a conversation that has neither a system
    message nor tools. With probability `empty_think_prob`, each answer without reasoning begins with an empty think
    block, as a model's does that has been asked not to think.
    """
    if not system_prob and not empty_think_prob:
        return row
    draw = np.random.default_rng([seed, identity])
    for_system, for_think = draw.random(2)  # both always: one probability does not move the other's draws
    system = system_prompts[int(draw.integers(len(system_prompts)))] if for_system < system_prob else None
    empty_think = bool(for_think < empty_think_prob)
    if isinstance(row, PreferencePair):
        return replace(row, chosen=_changed(row.chosen, system, empty_think), rejected=_changed(row.rejected, system, empty_think))
    return _changed(row, system, empty_think)


def _changed(chat: ChatExample, system: str | None, empty_think: bool) -> ChatExample:
    messages = [_with_empty_think(message) for message in chat.messages] if empty_think else chat.messages
    if system is not None and not chat.tools and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return replace(chat, messages=messages)


def _with_empty_think(message: dict) -> dict:
    thinks = message.get("reasoning_content") or "</think>" in (message.get("content") or "")
    if message["role"] != "assistant" or thinks:
        return message
    return {**message, "content": EMPTY_THINK + (message.get("content") or "")}
