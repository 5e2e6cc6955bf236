"""Counts of the first conversations of a file, from which wrong columns and rendered templates are recognized."""

from __future__ import annotations

from collections import Counter

from data.schemas.registry import ChatExample, PreferencePair

SAMPLED_ROWS = 64  # from the beginning of a file
SHOWN_CHARACTERS = 40  # of an answer
# What begins a turn in the chat templates in use: text that has it was rendered already
MARKERS = {
    "<|im_start|>": "ChatML",
    "<|start_header_id|>": "Llama 3",
    "<|header_start|>": "Llama 4",
    "[INST]": "Llama 2 and Mistral",
    "<start_of_turn>": "Gemma",
    "<|start_of_role|>": "Granite",
    "<|assistant|>": "Phi, Zephyr and GLM",
    "<\uff5cAssistant\uff5c>": "DeepSeek",
    "### Response:": "Alpaca",
    "ASSISTANT:": "Vicuna",
}


def count_sample(examples: list[ChatExample | PreferencePair]) -> tuple[Counter[str], Counter[str]]:
    """Return counts of the examples, and the most common answer with its count.

    Counted are `rows`, `answers` (to a question), `echoes` (answers that are their question), different `questions`,
    and by marker the rows with it.
    """
    counts = Counter({"rows": len(examples)})
    for example in examples:
        chats = (example.chosen, example.rejected) if isinstance(example, PreferencePair) else (example,)
        text = "\0".join(str(message.get("content", "")) for chat in chats for message in chat.messages)
        counts.update(marker for marker in MARKERS if marker in text)
    pairs = [pair for example in examples if (pair := _question_and_answer(example)) is not None]
    counts["answers"] = len(pairs)
    counts["echoes"] = sum(question == answer for question, answer in pairs)
    counts["questions"] = len({question for question, _ in pairs})
    common = Counter(answer for _, answer in pairs).most_common(1)
    return counts, Counter({answer[:SHOWN_CHARACTERS]: count for answer, count in common})


def _question_and_answer(example: ChatExample | PreferencePair) -> tuple[str, str] | None:
    """Return the last question of a conversation and the answer to it."""
    if isinstance(example, PreferencePair):
        return None
    turns = [(message["role"], str(message.get("content", "")).strip()) for message in example.messages]
    answers = [
        i for i, (role, text) in enumerate(turns) if role == "assistant" and text and i and turns[i - 1][0] == "user"
    ]
    return (turns[answers[-1] - 1][1], turns[answers[-1]][1]) if answers else None
