"""Evaluation metrics, and their registry.

A metric is a function here, or in a module that the user names in `plugins=[...]`; runner/evaluate.py calls it with `metric=NAME`:

    @register_metric("top5_accuracy", reads=("text", "chat"))
    def top5_accuracy(trained, examples, cfg):
        for batch in examples.batches(trained, cfg.batch_size):
            ...
        return {"top5_accuracy": correct / tokens, "loss_tokens": tokens}
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.filesystem import read_json_object
from common.registry import Registry
from runner.inference.load import LoadedModel, load_trained
from runner.tracking.console import strip_control

if TYPE_CHECKING:
    from runner.inference.evaluate import EvaluateConfig
    from runner.inference.evaluation_data import EvaluationSet

MetricResults = dict[str, float]


@dataclass(frozen=True)
class Metric:
    compute: Callable[[LoadedModel, EvaluationSet, EvaluateConfig], MetricResults]
    data_formats: tuple[str, ...]  # formats that it reads (text, chat, preference), tried in this order


METRICS: Registry[Metric] = Registry("metric", None)


def register_metric(name: str, reads: tuple[str, ...]) -> Callable[[Callable[..., MetricResults]], Callable[..., MetricResults]]:
    def register(compute: Callable[..., MetricResults]) -> Callable[..., MetricResults]:
        METRICS.register(name)(Metric(compute, reads))
        return compute

    return register


@register_metric("perplexity", reads=("text", "chat"))
def perplexity(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Mean loss per token with a label, in nats; for text also bits per byte, which does not depend on the tokenizer."""
    loss, tokens = 0.0, 0
    for batch in examples.batches(trained, cfg.batch_size):
        loss += trained.model(**batch.inputs).nll.sum().item()
        tokens += batch.num_supervised_tokens
    results: MetricResults = {"loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700.0)), "loss_tokens": tokens}
    if examples.data_format == "text":  # every token of a text is predicted exactly once
        results["bits_per_byte"] = loss / math.log(2) / _num_bytes(examples)
    return results


def _num_bytes(examples: EvaluationSet) -> int:
    from data.schemas.registry import TextExample

    return sum(len(example.text.encode()) for _, example in examples.examples() if isinstance(example, TextExample))


@register_metric("exact_match", reads=("chat",))
def exact_match(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of conversations whose last answer the model generates greedily, without leading and trailing white space."""
    correct, wrong = 0, []
    questions = _questions(trained, examples, cfg.max_new_tokens)
    while batch := list(itertools.islice(questions, cfg.batch_size)):
        for question, answer in zip(batch, _generate_answers(trained, [question["prompt"] for question in batch], cfg.max_new_tokens), strict=True):
            if answer.strip() == question["expected"].strip():
                correct += 1
            else:
                wrong.append({**question, "answer": answer})
    for miss in wrong[: cfg.show]:
        print(strip_control(f"{miss['where']}: {miss['question']!r}\n    expected {miss['expected']!r}\n    answered {miss['answer']!r}"))
    return {"exact_match": correct / (correct + len(wrong)), "right": correct, "rows": correct + len(wrong)}


def _questions(trained: LoadedModel, examples: EvaluationSet, max_new_tokens: int) -> Iterator[dict[str, Any]]:
    """Split each conversation into the prompt and its last answer."""
    from data.schemas.registry import ChatExample
    from data.tokenize.chat_template import ChatTemplate

    template = ChatTemplate(trained.tokenizer)
    limit = trained.model.cfg.max_position_embeddings - max_new_tokens
    for where, chat in examples.examples():
        assert isinstance(chat, ChatExample)
        messages = chat.messages
        if messages[-1]["role"] != "assistant":
            raise UserError(f"the conversation ends with a message of the {messages[-1]['role']}", where, "end it with the expected answer")
        prompt = template.encode_prompt(messages[:-1], chat.tools)
        if len(prompt) > limit:
            raise UserError(
                f"the question has {len(prompt)} tokens, the model takes {max(limit, 0)} with max_new_tokens={max_new_tokens}",
                where,
                "lower max_new_tokens, or delete the row",
            )
        question = messages[-2]["content"] if len(messages) > 1 else ""
        yield {"where": where, "question": question, "expected": messages[-1]["content"], "prompt": prompt}


def _generate_answers(trained: LoadedModel, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
    from models.generate import generate

    stop = [trained.tokenizer.eos_id]
    answers = generate(trained.model, prompts, max_new_tokens=max_new_tokens, temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, stop_ids=stop)
    return [trained.tokenizer.decode(ids) for ids in answers]


@register_metric("preference", reads=("preference",))
def preference(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of pairs whose implicit reward (https://arxiv.org/abs/2305.18290) is larger for chosen than for rejected, and the mean margin.

    The reward is the log-ratio of model and reference in nats: beta is 1.
    """
    from runner.engine.objectives.dpo import Dpo
    from runner.engine.objectives.objective import Reference

    reference = load_trained(Path(cfg.reference or _reference_dir(trained.folder)), cfg.device)
    objective = Dpo(1.0, Reference(reference.model))
    pairs, totals = 0, {"reward_accuracy": 0.0, "reward_margin": 0.0}
    for batch in examples.batches(trained, cfg.batch_size):
        sums = objective.loss(trained.model, batch)
        pairs += objective.count(batch)
        totals = {name: total + sums[name].item() for name, total in totals.items()}
    return {name: total / pairs for name, total in totals.items()} | {"rows": pairs}


def _reference_dir(folder: Path) -> str:
    source = read_json_object(folder / "run.json").get("init_from")
    if not source or source == "scratch":
        raise UserError("no reference model is recorded for this model", f"run={folder}", "give the model before DPO: reference=DIR")
    return str(source)
