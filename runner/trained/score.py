"""Numbers for a trained model on a file of rows: loss and perplexity, exact answers, preferences."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from runner.engine.console import clean
from runner.trained.open import Trained, is_run, open_trained

if TYPE_CHECKING:
    from data.formats import Source
    from data.loader import Batch
    from data.mixture import Rows
    from data.shapes import Shape

Numbers = dict[str, float]


@dataclass
class ScoredData:
    path: str  # a file, a glob or a folder
    max_length: int  # tokens of a row that are read at most
    cache: str  # where token stores are kept

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError("a row needs a token and one that follows it", f"data.max_length={self.max_length}", "choose at least 2, e.g. 1024")


@dataclass
class EvaluateConfig:
    run: str  # a run, a Hugging Face or PEFT folder, or last
    metric: str  # perplexity | exact_match | preference
    data: ScoredData
    batch_size: int
    max_new_tokens: int  # exact_match: longest generated answer
    show: int  # exact_match: how many wrong answers are shown
    reference: Optional[str]  # preference: the model before DPO; null: what the run says it began from
    device: str

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError("unknown metric", f"metric={self.metric}", f"choose one of {', '.join(METRICS)}")
        for word in ("batch_size", "max_new_tokens"):
            if getattr(self, word) < 1:
                raise ValueError("a count must be at least 1", f"{word}={getattr(self, word)}", "give a positive whole number")
        if self.show < 0:
            raise ValueError("a count cannot be negative", f"show={self.show}", "choose 0 (none) or more")


def evaluate(cfg: EvaluateConfig, folder: Path) -> Numbers:
    """Score the model in `folder`; the result is printed as JSON and appended to `folder/evaluations.jsonl`."""
    import torch

    _sources(cfg)  # a file that is not there is refused before any weight is read
    trained = open_trained(folder, cfg.device)
    with torch.inference_mode():
        numbers = METRICS[cfg.metric](trained, cfg)
    record = {"metric": cfg.metric, "data": cfg.data.path, **numbers}
    line = json.dumps(record, ensure_ascii=False)
    print(line)
    with open(folder / "evaluations.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    return numbers


def perplexity(trained: Trained, cfg: EvaluateConfig) -> Numbers:
    """Loss a token that carries loss, in nats; for plain text also bits a byte, which no choice of tokenizer flatters."""
    rows, shapes = _shapes(cfg)
    loss, tokens = 0.0, 0
    for batch in _batches(_rows(trained, cfg, rows, shapes), trained, cfg):
        loss += trained.model(**batch.inputs).nll.sum().item()
        tokens += batch.supervised
    numbers: Numbers = {"loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700.0)), "tokens": tokens}
    if rows == "text":  # every token of every text is predicted once, so the text as a whole is what was paid for
        numbers["bits_per_byte"] = loss / math.log(2) / sum(len(text.encode()) for text in _texts(shapes))
    return numbers


def exact_match(trained: Trained, cfg: EvaluateConfig) -> Numbers:
    """Share of rows whose last answer, generated greedily, is the one in the file; white space at either end does not count."""
    right, wrong = 0, []
    for questions in _chunks(_questions(trained, cfg), cfg.batch_size):
        for question, answer in zip(questions, _answers(trained, [question["prompt"] for question in questions], cfg.max_new_tokens), strict=True):
            if answer.strip() == question["expected"].strip():
                right += 1
            else:
                wrong.append({**question, "answer": answer})
    for miss in wrong[: cfg.show]:
        print(clean(f"{miss['where']}: {miss['asked']!r}\n    expected {miss['expected']!r}\n    answered {miss['answer']!r}"))
    return {"exact_match": right / (right + len(wrong)), "right": right, "rows": right + len(wrong)}


def preference(trained: Trained, cfg: EvaluateConfig) -> Numbers:
    """Share of pairs whose implicit reward, against the reference, is larger for the chosen side (https://arxiv.org/abs/2305.18290).

    The margin is the log-ratio of the two sides in nats, before it is multiplied by beta.
    """
    from contextlib import nullcontext

    from runner.engine.objective import Dpo

    reference = open_trained(Path(cfg.reference or _began_from(trained.folder)), cfg.device)
    objective = Dpo(1.0, reference.model, nullcontext)
    pairs, sums = 0, {"reward_accuracy": 0.0, "reward_margin": 0.0}
    for batch in _batches(_rows(trained, cfg, *_shapes(cfg)), trained, cfg):
        parts = objective.loss(trained.model, batch)
        pairs += objective.count(batch)
        sums = {name: total + parts[name].item() for name, total in sums.items()}
    return {name: total / pairs for name, total in sums.items()} | {"rows": pairs}


METRICS = {"perplexity": perplexity, "exact_match": exact_match, "preference": preference}
READS = {"perplexity": ("text", "chat"), "exact_match": ("chat",), "preference": ("preference",)}


def _sources(cfg: EvaluateConfig) -> list[Source]:
    from data.formats import find_sources

    return find_sources([cfg.data.path])[0]


def _shapes(cfg: EvaluateConfig) -> tuple[str, list[tuple[Source, Shape]]]:
    """What the metric can read the files as (text, chat or preference), and the shape of each."""
    from data.rows import shape_of
    from data.shapes import SHAPES

    sources, refusals = _sources(cfg), []
    for rows in READS[cfg.metric]:
        try:
            return rows, [(source, SHAPES[shape_of(source, rows)]) for source in sources]
        except ValueError as error:
            refusals.append(error)
    what, where, fix = refusals[0].args
    others = [metric for metric, reads in READS.items() if metric != cfg.metric and any(_is_of(sources[0], rows) for rows in reads)]
    wanted = " or ".join(READS[cfg.metric])
    raise ValueError(f"metric={cfg.metric} reads {wanted} rows: {what}", where, f"such rows are for metric={others[0]}" if others else fix) from refusals[0]


def _is_of(source: Source, rows: str) -> bool:
    from data.rows import shape_of

    try:
        return bool(shape_of(source, rows))
    except ValueError:
        return False


def _rows(trained: Trained, cfg: EvaluateConfig, rows: str, shapes: list[tuple[Source, Shape]]) -> Rows:
    from data.build import prepare
    from data.mixture import Part, mixture
    from data.rows import Recipe

    recipe = Recipe(
        rows=rows,
        shape="",
        tokenizer=trained.tokenizer.folder,
        max_length=min(cfg.data.max_length, trained.model.cfg.max_position_embeddings),
        too_long="split" if rows == "text" else "truncate",
        train_on="assistant",
        on_bad_row="error",
    )
    made = [(source, replace(recipe, shape=shape.name)) for source, shape in shapes]
    return mixture([[Part(source, prepare(source, of, trained.tokenizer, Path(cfg.data.cache))) for source, of in made]], None)


def _batches(rows: Rows, trained: Trained, cfg: EvaluateConfig) -> Iterator[Batch]:
    from data.loader import Single, StepLoader
    from data.order import Order

    if not len(rows):
        raise ValueError("no row is short enough to be read", cfg.data.path, f"raise data.max_length={cfg.data.max_length}")
    loader = StepLoader(Single(rows), Order(len(rows), cfg.batch_size, seed=0), batch_size=cfg.batch_size, pad_id=trained.tokenizer.pad_id, packed=False)
    for batches in loader.steps(epoch=0):
        for batch in batches:
            yield batch.to(trained.device)


def _texts(shapes: list[tuple[Source, Shape]]) -> Iterator[str]:
    from data.shapes import Text

    for source, shape in shapes:
        for place, row in source.rows():
            text = shape.read(row, source.where(place))
            assert isinstance(text, Text)
            yield text.text


def _questions(trained: Trained, cfg: EvaluateConfig) -> Iterator[dict[str, Any]]:
    """Each conversation up to its last assistant turn, and that turn."""
    from data.chat import ChatTemplate
    from data.shapes import Chat

    template = ChatTemplate(trained.tokenizer)
    room = trained.model.cfg.max_position_embeddings - cfg.max_new_tokens
    for source, shape in _shapes(cfg)[1]:
        for place, row in source.rows():
            where = source.where(place)
            chat = shape.read(row, where)
            assert isinstance(chat, Chat)
            messages = chat.messages
            if messages[-1]["role"] != "assistant":
                raise ValueError(f"the conversation ends with the {messages[-1]['role']}", where, "end it with the answer that is expected")
            prompt = template.prompt(messages[:-1], chat.tools)
            if len(prompt) > room:
                raise ValueError(
                    f"a question of {len(prompt)} tokens leaves no room for an answer", where, "choose a smaller max_new_tokens, or delete the row"
                )
            yield {"where": where, "asked": messages[-2]["content"] if len(messages) > 1 else "", "expected": messages[-1]["content"], "prompt": prompt}


def _answers(trained: Trained, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
    from models.generate import generate

    stop = [trained.tokenizer.eos_id]
    answers = generate(trained.model, prompts, max_new_tokens=max_new_tokens, temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, stop_ids=stop)
    return [trained.tokenizer.decode(ids) for ids in answers]


def _began_from(folder: Path) -> str:
    source = json.loads((folder / "run.json").read_text(encoding="utf-8")).get("init_from") if is_run(folder) else None
    if not source or source == "scratch":
        raise ValueError("it is not known which model this one was before its preferences were trained", f"run={folder}", "name it: reference=DIR")
    return source


def _chunks(items: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    from itertools import islice

    while chunk := list(islice(items, size)):
        yield chunk
