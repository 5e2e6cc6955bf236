"""Exact match of generated answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from common.errors import UserError, strip_control
from data.schemas.registry import ChatExample
from data.tokenize.chat_template import ChatTemplate
from runner.inference.evaluate import EvaluateConfig, MetricResults, register_metric
from runner.inference.evaluation_data import EvaluationSet
from runner.inference.load import LoadedModel


@register_metric("exact_match", reads=("chat",))
def exact_match(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of conversations whose last answer the model generates greedily, without leading and trailing white
    space.
    """
    correct, wrong = 0, []
    questions = _questions(trained, examples, cfg)
    while batch := list(itertools.islice(questions, cfg.batch_size)):
        for question, answer in zip(
            batch,
            generate_answers(trained, [question["prompt"] for question in batch], cfg.max_new_tokens),
            strict=True,
        ):
            if answer.strip() == question["expected"].strip():
                correct += 1
            else:
                wrong.append({**question, "answer": answer})
    for miss in wrong[: cfg.show]:
        print(
            strip_control(
                f"{miss['where']}: {miss['question']!r}\n    expected {miss['expected']!r}\n    answered {miss['answer']!r}"
            )
        )
    return {"exact_match": correct / (correct + len(wrong)), "right": correct, "rows": correct + len(wrong)}


def _questions(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> Iterator[dict[str, Any]]:
    """Split each conversation into the prompt and its last answer."""
    template = ChatTemplate(trained.tokenizer)
    for where, chat in examples.examples(cfg.batch_size):
        assert isinstance(chat, ChatExample)
        messages = chat.messages
        if messages[-1]["role"] != "assistant":
            raise UserError(
                f"the conversation ends with a message of the {messages[-1]['role']}",
                where,
                "end it with the expected answer",
            )
        prompt = template.encode_prompt(messages[:-1], chat.tools)
        check_prompt_length(trained, prompt, cfg.max_new_tokens, where)
        question = messages[-2]["content"] if len(messages) > 1 else ""
        yield {"where": where, "question": question, "expected": messages[-1]["content"], "prompt": prompt}


def check_prompt_length(trained: LoadedModel, prompt: list[int], max_new_tokens: int, where: str) -> None:
    limit = trained.model.cfg.max_position_embeddings - max_new_tokens
    if len(prompt) > limit:
        raise UserError(
            f"the question has {len(prompt)} tokens, the model takes {max(limit, 0)} with max_new_tokens={max_new_tokens}",
            where,
            "lower max_new_tokens, or delete the row",
        )


def generate_answers(trained: LoadedModel, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
    from data.tokenize.chat_template import ChatTemplate
    from models.generate import generate

    stop = ChatTemplate(trained.tokenizer).stop_ids
    answers = generate(
        trained.model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        stop_ids=stop,
    )
    return [trained.tokenizer.decode(ids) for ids in answers]
