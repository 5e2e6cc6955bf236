"""The queue of the server: what is batched, cancelled, refused and stopped."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from data.tokenize.tokenizer import Tokenizer
from models.generate import Sampler, generate
from runner.inference.generation import Answer, Score, Work
from runner.inference.load import LoadedModel

pytest.importorskip("uvicorn", reason="part of the extra serve")

from runner.serving.app import GenerationQueue
from runner.serving.protocol import ApiError, split_tool_calls

TOKENIZER = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"


def new_answer(prompt: list[int], limit: int = 8, **changes: Any) -> Answer:
    sampler, tokenizer = Sampler(temperature=0, top_k=0, top_p=1, penalty=1), Tokenizer.load(TOKENIZER)
    return Answer(prompt=prompt, limit=limit, sampler=sampler, stop_ids=(), tokenizer=tokenizer, **changes)


class BlockedQueue(GenerationQueue):
    """Computes nothing until `open` is set; notes the sizes of its batches."""

    def __init__(self, trained: LoadedModel, **settings: int) -> None:
        self.open, self.entered, self.sizes = threading.Event(), threading.Event(), list[int]()
        super().__init__(trained, **settings)

    def _compute(self, batch: list[Work]) -> None:
        self.entered.set()
        assert self.open.wait(60)
        try:
            super()._compute(batch)
        finally:
            self.sizes.append(len(batch))  # with those that have joined


def run(queue: BlockedQueue, blocker: Work, works: list[Any], before_open: Any = lambda: None) -> list[Work]:
    """Compute `works`, which all wait while `blocker` is computed; return them in the order of their ends."""
    ended: list[Work] = []
    done = threading.Semaphore(0)

    def note(work: Work) -> None:
        if not work.done.cancelled():
            ended.append(work)
        done.release()

    for work in (blocker, *works):
        work.done.add_done_callback(lambda _, work=work: note(work))
    queue.submit([blocker])
    assert queue.entered.wait(60)
    queue.submit(works)
    before_open()
    queue.open.set()
    for _ in range(1 + len(works)):
        assert done.acquire(timeout=60)
    queue.close()
    return ended[1:]


def test_queue_lets_answers_join_a_batch_without_changing_them(trained: LoadedModel) -> None:
    prompts = [trained.tokenizer.encode(text) for text in ("Tolo", "Where does Mina live?", "米娜", "def f(x):")]
    works = [new_answer(prompt) for prompt in prompts]
    other = new_answer(prompts[0], 3)
    shapes: list[tuple[int, ...]] = []
    hook = trained.model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    queue = BlockedQueue(trained, max_batch=3, max_waiting=10)
    run(queue, Score(ids=prompts[1]), [works[0], other, *works[1:]])
    hook.remove()
    alone = [
        generate(
            trained.model, [p], max_new_tokens=8, temperature=0, top_k=0, top_p=1, repetition_penalty=1, stop_ids=[]
        )[0]
        for p in prompts
    ]
    assert [work.ids for work in works] == alone and other.ids == alone[0][:3]
    assert queue.sizes == [1, 5], "the score, then all answers: two are taken in while others are generated"
    assert max(rows for rows, _ in shapes) == 3, "max_batch"
    assert shapes.index((1, len(prompts[2]))) < shapes.index((1, len(prompts[3]))) < len(shapes) - 1


def test_queue_lets_no_answer_go_past_a_score(trained: LoadedModel) -> None:
    prompt = trained.tokenizer.encode("Tolo")
    first, last, score = (*(new_answer(prompt) for _ in range(2)), Score(ids=prompt))
    queue = BlockedQueue(trained, max_batch=3, max_waiting=10)
    assert run(queue, Score(ids=prompt), [first, score, last]) == [first, score, last]
    assert queue.sizes == [1, 1, 1, 1]


def test_queue_fails_answers_that_have_joined(trained: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = trained.tokenizer.encode("Tolo")
    works = [new_answer(prompt) for _ in range(2)]
    works[1].on_text = lambda text: 1 // 0
    run(BlockedQueue(trained, max_batch=2, max_waiting=10), works[0], [works[1]])
    assert all(isinstance(work.done.exception(), ZeroDivisionError) for work in works)


def test_queue_skips_cancelled_answers_and_refuses_too_many(trained: LoadedModel) -> None:
    prompt = trained.tokenizer.encode("Tolo")
    works = [new_answer(prompt) for _ in range(3)]
    queue = BlockedQueue(trained, max_batch=1, max_waiting=3)

    def refuse_and_cancel() -> None:
        with pytest.raises(ApiError, match="too many answers wait") as refused:
            queue.submit([new_answer(prompt)])
        assert (refused.value.status, refused.value.code) == (503, "queue_full")
        works[1].done.cancel()

    assert run(queue, Score(ids=prompt), works, refuse_and_cancel) == [works[0], works[2]]
    assert works[1].ids == [] and queue.sizes == [1, 1, 1]


def test_queue_ends_a_cancelled_answer_at_the_next_token(
    trained: LoadedModel,
) -> None:
    prompt = trained.tokenizer.encode("Tolo")
    endless, other = (new_answer(prompt, 200) for _ in range(2))
    endless.on_text = lambda text: endless.done.cancel()
    first = generate(
        trained.model, [prompt], max_new_tokens=6, temperature=0, top_k=0, top_p=1, repetition_penalty=1, stop_ids=[]
    )[0]
    other.stops = (trained.tokenizer.decode(first)[-1],)
    passes: list[object] = []
    hook = trained.model.register_forward_hook(lambda *_: passes.append(None))
    next_score = Score(ids=prompt)  # computed after the batch of the answers
    ended = run(BlockedQueue(trained, max_batch=2, max_waiting=9), Score(ids=prompt), [endless, other, next_score])
    hook.remove()
    assert ended[0] is other and other.finish_reason == "stop" and len(other.ids) <= 6
    assert len(endless.ids) <= 20 and endless.finish_reason is None and len(passes) <= 23, (
        "the scores, the prompt, the tokens"
    )


def test_queue_gives_an_error_to_what_waits_when_it_stops(trained: LoadedModel) -> None:
    prompt = trained.tokenizer.encode("Tolo")
    works = [new_answer(prompt) for _ in range(2)]
    queue = BlockedQueue(trained, max_batch=1, max_waiting=9)
    run(queue, Score(ids=prompt), works, lambda: setattr(queue, "is_stopping", True))
    errors = [work.done.exception() for work in works]
    assert [error.code for error in errors if isinstance(error, ApiError)] == ["stopping"] * len(works)


def test_answer_streams_nothing_that_a_stop_text_may_begin() -> None:
    sent: list[str] = []
    answer = new_answer([], stops=("END.", "###"), on_text=sent.append)
    for piece in ("one E", "ND", " two #", "#", "# three"):
        answer.add_text(piece)
    answer.end()
    assert ("".join(sent), answer.text, answer.finish_reason) == ("one END two ", "one END two ", "stop")
    assert "".join(sent[:2]) == "one " + "END two "


def test_tool_calls_are_split_from_the_text_and_broken_ones_stay() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": 2}}}\n</tool_call><tool_call>{"name": 1}</tool_call>'
    content, calls = split_tool_calls(text)
    assert content == 'Let me see.\n<tool_call>{"name": 1}</tool_call>'
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1, "b": {"c": 2}}'}]
    assert split_tool_calls(" plain ") == (" plain ", [])
    assert split_tool_calls(text + "</tool_call>")[1][0]["function"] == calls[0]["function"]


def test_tool_calls_that_are_never_closed_take_linear_time() -> None:
    text = "<tool_call>{" * 200_000  # with a search of the whole rest for each: hours
    assert split_tool_calls(text) == (text, [])


def test_answer_ends_at_the_first_of_several_stop_texts() -> None:
    answer = new_answer([], stops=("###", "END"))
    answer.add_text("one END two ### three")
    assert (answer.text, answer.finish_reason) == ("one ", "stop")


def test_scores_of_a_long_text_are_those_of_each_position() -> None:
    logits = torch.randn(600, 11, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(600) * 7 % 11
    score = Score(ids=ids.tolist(), top=2)
    score.read(logits)
    log_probs = logits[:-1].log_softmax(-1)
    assert score.own == pytest.approx(log_probs.gather(-1, ids[1:, None]).squeeze(-1).tolist())
    assert [best[0][0] for best in score.best] == log_probs.argmax(-1).tolist()
