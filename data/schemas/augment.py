"""Random changes of conversations, as in MiniMind: add a system message, add an empty think block.

Both are off where their probability is 0. The draws depend on (seed, index) only, so that a row gives the same
conversation in every process and in every epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from data.schemas.registry import ChatExample, PreferencePair

EMPTY_THINK = "<think>\n\n</think>\n\n"


def augment_example(
    example: ChatExample | PreferencePair,
    system_prob: float,
    system_prompts: Sequence[str],
    empty_think_prob: float,
    seed: int,
    index: int,
) -> ChatExample | PreferencePair:
    """Return `example`, or a changed copy. Chosen and rejected of a preference get the same change.

    With probability `system_prob`, one of `system_prompts` becomes the system message of a conversation without system
    message and tools. With probability `empty_think_prob`, each answer without reasoning begins with an empty think
    block, the form that a model uses when its chat template disables thinking. `index` is the position of the row in
    its file.
    """
    if not system_prob and not empty_think_prob:
        return example
    import numpy as np

    rng = np.random.default_rng([seed, index])
    system_draw, think_draw = rng.random(2)  # both always, so that one probability does not change the other's draws
    system = system_prompts[int(rng.integers(len(system_prompts)))] if system_draw < system_prob else None
    empty_think = bool(think_draw < empty_think_prob)
    if isinstance(example, PreferencePair):
        return replace(
            example,
            chosen=_augmented(example.chosen, system, empty_think),
            rejected=_augmented(example.rejected, system, empty_think),
        )
    return _augmented(example, system, empty_think)


def _augmented(chat: ChatExample, system: str | None, empty_think: bool) -> ChatExample:
    messages = [_with_empty_think(message) for message in chat.messages] if empty_think else chat.messages
    if system is not None and not chat.tools and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return replace(chat, messages=messages)


def _with_empty_think(message: dict) -> dict:
    has_reasoning = message.get("reasoning_content") or "</think>" in (message.get("content") or "")
    if message["role"] != "assistant" or has_reasoning:
        return message
    return {**message, "content": EMPTY_THINK + (message.get("content") or "")}
