"""Metrics of evaluate.py on data files, found by `metric=NAME`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError, print_safely
from data.schemas.registry import ChatExample
from runner.inference.evaluate import EvaluateConfig, MetricResults, register_metric
from runner.inference.evaluation_data import EvaluationSet
from runner.inference.load import LoadedModel, load_trained
from runner.run_dir.metadata import RunMetadata


@register_metric("perplexity", reads=("text", "chat"))
def perplexity(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Mean loss per token with a label, in nats, exp(loss), and the loss in bits per byte of these tokens, which does
    not depend on the tokenizer.

    A row or message with a weight counts as in training, in the loss and in the bytes. Special tokens with a label (the
    end of a text) have no bytes.
    """
    from runner.inference.token_bytes import TokenBytes

    loss, weight, tokens, num_bytes = 0.0, 0.0, 0, 0.0
    bytes_of = TokenBytes(trained.tokenizer)
    for batch in examples.batches(trained, cfg.batch_size):
        weights = (batch.labels >= 0 if batch.loss_weights is None else batch.loss_weights).double()
        loss += (trained.model(**batch.inputs).nll.double() * weights).sum().item()
        weight += weights.sum().item()
        tokens += int((batch.labels >= 0).sum())
        num_bytes += bytes_of.count(batch)
    if not tokens:
        raise UserError(
            "no token of the data has a label, so there is no loss",
            f"data.path={examples.cfg.path}",
            "choose a file with texts or answers",
        )
    results: MetricResults = {
        "loss": loss / weight,
        "perplexity": math.exp(min(loss / weight, 700.0)),
        "loss_tokens": tokens,
    }
    return results | ({"bits_per_byte": loss / math.log(2) / num_bytes} if num_bytes else {})


@register_metric("preference", reads=("preference",))
def preference(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of pairs whose implicit reward (https://arxiv.org/abs/2305.18290) is larger for chosen than for
    rejected, and the mean margin.

    The reward is the log-ratio of model and reference in nats: beta is 1.
    """
    from runner.engine.objectives.dpo import Dpo
    from runner.engine.objectives.objective import Reference

    reference = load_trained(Path(cfg.reference or _reference_of(trained.run_dir)), cfg.device)
    objective = Dpo(1.0, Reference(reference.model))
    pairs, totals = 0, {"reward_accuracy": 0.0, "reward_margin": 0.0}
    for batch in examples.batches(trained, cfg.batch_size):
        sums = objective.loss(trained.model, batch)
        pairs += objective.count(batch)
        totals = {name: total + sums[name].item() for name, total in totals.items()}
    return {name: total / pairs for name, total in totals.items()} | {"rows": pairs}


def _reference_of(run_dir: Path) -> str:
    source = RunMetadata.read(run_dir).get("init_from")
    if not source or source == "scratch":
        raise UserError(
            "no reference model is recorded for this model",
            f"run={run_dir}",
            "give the model before DPO: reference=DIR",
        )
    return str(source)


@dataclass
class Question:
    where: str  # file:line
    messages: list[dict[str, Any]]
    tools: list[dict] | None
    expected: str
    turn: str = ""  # of a conversation


class AnswerGrader:
    """Compares answers that the model generates greedily with the expected ones, without leading and trailing white
    space. Prints the first `cfg.show` wrong ones.
    """

    def __init__(self, trained: LoadedModel, cfg: EvaluateConfig) -> None:
        self._trained, self._max_new_tokens, self._left_to_show = trained, cfg.max_new_tokens, cfg.show

    def grade(self, questions: list[Question]) -> list[tuple[str, bool]]:
        """Return the answer to each question, and whether it is right."""
        from runner.inference.generation import Answer, Sampling, generate_answers

        sampling = Sampling(self._max_new_tokens, temperature=0, stop_ids=self._trained.stop_ids(is_chat=True))
        answers = [Answer(prompt=self._encode(question), sampling=sampling) for question in questions]
        generate_answers(self._trained, answers)
        return [
            (answer.text, self._is_right(question, answer.text))
            for question, answer in zip(questions, answers, strict=True)
        ]

    def _encode(self, question: Question) -> list[int]:
        prompt = self._trained.template.encode_prompt(question.messages, question.tools)
        limit = self._trained.model.cfg.max_position_embeddings - self._max_new_tokens
        if len(prompt) > limit:
            raise UserError(
                f"the question has {len(prompt)} tokens, the model takes {max(limit, 0)} with max_new_tokens={self._max_new_tokens}",
                question.where,
                "lower max_new_tokens, or delete the row",
            )
        return prompt

    def _is_right(self, question: Question, answer: str) -> bool:
        is_right = answer.strip() == question.expected.strip()
        if not is_right and self._left_to_show:
            self._left_to_show -= 1
            text = question.messages[-1]["content"] if question.messages else ""
            where = f"{question.where}: {question.turn}"
            print_safely(f"{where}{text!r}\n    expected {question.expected!r}\n    answered {answer!r}")
        return is_right


@register_metric("exact_match", reads=("chat",))
def exact_match(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of conversations whose last answer the model generates exactly."""
    grader, questions, right = AnswerGrader(trained, cfg), _last_answers(examples, cfg.batch_size), list[bool]()
    while batch := list(itertools.islice(questions, cfg.batch_size)):
        right += [is_right for _, is_right in grader.grade(batch)]
    return {"exact_match": sum(right) / len(right), "right": sum(right), "rows": len(right)}


def _last_answers(examples: EvaluationSet, batch_size: int) -> Iterator[Question]:
    for where, chat in examples.examples(batch_size):
        assert isinstance(chat, ChatExample)
        *messages, last = chat.messages
        if last["role"] != "assistant":
            raise UserError(
                f"the conversation ends with a message of the {last['role']}", where, "end it with the expected answer"
            )
        yield Question(where, messages, chat.tools, last["content"])


@dataclass
class Dialogue:
    """A conversation, in which the model's answers replace those of the data."""

    where: str  # file:line
    messages: list[dict[str, Any]]
    tools: list[dict] | None
    turns: list[int]  # positions of the answers in `messages`
    right: list[bool] = field(default_factory=list)  # of each answer

    def question(self, number: int) -> Question:
        position = self.turns[number]
        expected = str(self.messages[position]["content"])
        return Question(self.where, self.messages[:position], self.tools, expected, f"turn {number + 1}: ")


@register_metric("conversation", reads=("chat",))
def conversation(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of answers that the model generates exactly, with its own earlier answers in the prompts: exact_match of
    all, first_turn and last_turn of each conversation.
    """
    grader, waiting, done = AnswerGrader(trained, cfg), _dialogues(examples, cfg.batch_size), list[Dialogue]()
    while batch := list(itertools.islice(waiting, cfg.batch_size)):
        done += batch
        for number in range(max(len(dialogue.turns) for dialogue in batch)):
            unfinished = [dialogue for dialogue in batch if number < len(dialogue.turns)]
            graded = grader.grade([dialogue.question(number) for dialogue in unfinished])
            for dialogue, (answer, is_right) in zip(unfinished, graded, strict=True):
                dialogue.right.append(is_right)
                dialogue.messages[dialogue.turns[number]] = {"role": "assistant", "content": answer}
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
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError(
                "the conversation has no answer of the assistant", where, "add the expected answers, or delete the row"
            )
        if any(message.get("tool_calls") for message in chat.messages):
            raise UserError(
                "a tool call of the model's own would have no result to continue with",
                where,
                "metric=exact_match measures the last answer",
            )
        yield Dialogue(where, list(chat.messages), chat.tools, turns)
