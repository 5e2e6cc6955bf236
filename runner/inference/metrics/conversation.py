"""Exact match of the answers of whole conversations, as a user has them: the model's own earlier answers are part of
each prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from common.errors import UserError, strip_control
from data.schemas.registry import ChatExample
from data.tokenize.chat_template import ChatTemplate
from runner.inference.evaluate import EvaluateConfig, MetricResults, register_metric
from runner.inference.evaluation_data import EvaluationSet
from runner.inference.load import LoadedModel
from runner.inference.metrics.exact_match import check_prompt_length, generate_answers


@dataclass
class Dialogue:
    """A conversation with the model."""

    where: str  # file:line
    rest: list[dict[str, Any]]  # messages of the data that are left
    tools: list[dict] | None
    # the earlier ones, with the model's answers in place of the assistant's
    messages: list[dict[str, Any]] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)  # of each answer

    def take_until_answer(self) -> str | None:
        """Move the messages before the next answer to `messages`; return the answer that the data expects, None after
        the last one.
        """
        while self.rest:
            message = self.rest.pop(0)
            if message["role"] == "assistant":
                return str(message["content"])
            self.messages.append(message)
        return None


@register_metric("conversation", reads=("chat",))
def conversation(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of answers that the model generates exactly (greedily, without leading and trailing white space):
    exact_match of all, first_turn and last_turn of each conversation.
    """
    template = ChatTemplate(trained.tokenizer)
    waiting, done = _dialogues(examples, cfg.batch_size), list[Dialogue]()
    shown = 0
    while batch := list(itertools.islice(waiting, cfg.batch_size)):
        done += batch
        while turns := [
            (dialogue, expected) for dialogue in batch if (expected := dialogue.take_until_answer()) is not None
        ]:
            prompts = [template.encode_prompt(dialogue.messages, dialogue.tools) for dialogue, _ in turns]
            for (dialogue, _), prompt in zip(turns, prompts, strict=True):
                check_prompt_length(trained, prompt, cfg.max_new_tokens, dialogue.where)
            for (dialogue, expected), answer in zip(
                turns, generate_answers(trained, prompts, cfg.max_new_tokens), strict=True
            ):
                dialogue.right.append(answer.strip() == expected.strip())
                if not dialogue.right[-1] and shown < cfg.show:
                    shown += 1
                    _show_wrong_answer(dialogue, expected, answer)
                dialogue.messages.append({"role": "assistant", "content": answer})
    answers = [right for dialogue in done for right in dialogue.right]
    return {
        "exact_match": sum(answers) / len(answers),
        "first_turn": sum(dialogue.right[0] for dialogue in done) / len(done),
        "last_turn": sum(dialogue.right[-1] for dialogue in done) / len(done),
        "right": sum(answers),
        "answers": len(answers),
        "rows": len(done),
    }


def _dialogues(examples: EvaluationSet, batch_size: int) -> Iterator[Dialogue]:
    for where, chat in examples.examples(batch_size):
        assert isinstance(chat, ChatExample)
        if not any(message["role"] == "assistant" for message in chat.messages):
            raise UserError(
                "the conversation has no answer of the assistant", where, "add the expected answers, or delete the row"
            )
        if any(message.get("tool_calls") for message in chat.messages):
            raise UserError(
                "a tool call of the model's own would have no result to continue with",
                where,
                "metric=exact_match measures the last answer",
            )
        yield Dialogue(where, list(chat.messages), chat.tools)


def _show_wrong_answer(dialogue: Dialogue, expected: str, answer: str) -> None:
    question = dialogue.messages[-1]["content"] if dialogue.messages else ""
    print(
        strip_control(
            f"{dialogue.where}: turn {len(dialogue.right)}: {question!r}\n    expected {expected!r}\n    answered {answer!r}"
        )
    )
