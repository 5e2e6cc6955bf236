"""Numbers for a trained model on a file of rows: loss and perplexity, exact answers, preferences."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from common.errors import UserError
from runner.inference.load import LoadedModel, is_run_dir, load_trained
from runner.tracking.console import strip_control

if TYPE_CHECKING:
    from data.batching.batch import Batch
    from data.batching.mixture import MixedRows
    from data.schemas.schemas import RowSchema
    from data.sources.files import Source

MetricResults = dict[str, float]


@dataclass
class EvaluationData:
    path: str  # a file, a glob or a folder
    max_length: int  # tokens of a row that are read at most
    cache: str  # where token stores are kept

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UserError("a row needs a token and one that follows it", f"data.max_length={self.max_length}", "choose at least 2, e.g. 1024")


@dataclass
class EvaluateConfig:
    run: str  # a run, a Hugging Face or PEFT folder, or last
    metric: str  # perplexity | exact_match | preference
    data: EvaluationData
    batch_size: int
    max_new_tokens: int  # exact_match: longest generated answer
    show: int  # exact_match: how many wrong answers are shown
    reference: Optional[str]  # preference: the model before DPO; null: what the run says it began from
    device: str

    def __post_init__(self) -> None:
        if self.metric not in EVALUATION_METRICS:
            raise UserError("unknown metric", f"metric={self.metric}", f"choose one of {', '.join(EVALUATION_METRICS)}")
        for word in ("batch_size", "max_new_tokens"):
            if getattr(self, word) < 1:
                raise UserError("a count must be at least 1", f"{word}={getattr(self, word)}", "give a positive whole number")
        if self.show < 0:
            raise UserError("a count cannot be negative", f"show={self.show}", "choose 0 (none) or more")


def evaluate(cfg: EvaluateConfig, folder: Path) -> MetricResults:
    """Score the model in `folder`; the result is printed as JSON and appended to `folder/evaluations.jsonl`."""
    import torch

    _sources(cfg)  # a file that is not there is refused before any weight is read
    trained = load_trained(folder, cfg.device)
    with torch.inference_mode():
        numbers = EVALUATION_METRICS[cfg.metric](trained, cfg)
    record = {"metric": cfg.metric, "data": cfg.data.path, **numbers}
    line = json.dumps(record, ensure_ascii=False)
    print(line)
    with open(folder / "evaluations.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    return numbers


def perplexity(trained: LoadedModel, cfg: EvaluateConfig) -> MetricResults:
    """Loss a token that carries loss, in nats; for plain text also bits a byte, which no choice of tokenizer flatters."""
    rows, shapes = _detect_formats(cfg)
    loss, tokens = 0.0, 0
    for batch in _batches(_encoded_rows(trained, cfg, rows, shapes), trained, cfg):
        loss += trained.model(**batch.inputs).nll.sum().item()
        tokens += batch.supervised
    numbers: MetricResults = {"loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700.0)), "tokens": tokens}
    if rows == "text":  # every token of every text is predicted once, so the text as a whole is what was paid for
        numbers["bits_per_byte"] = loss / math.log(2) / sum(len(text.encode()) for text in _texts(shapes))
    return numbers


def exact_match(trained: LoadedModel, cfg: EvaluateConfig) -> MetricResults:
    """Share of rows whose last answer, generated greedily, is the one in the file; white space at either end does not count."""
    right, wrong = 0, []
    for questions in _in_chunks(_prompts(trained, cfg), cfg.batch_size):
        for question, answer in zip(questions, _generate_answers(trained, [question["prompt"] for question in questions], cfg.max_new_tokens), strict=True):
            if answer.strip() == question["expected"].strip():
                right += 1
            else:
                wrong.append({**question, "answer": answer})
    for miss in wrong[: cfg.show]:
        print(strip_control(f"{miss['where']}: {miss['asked']!r}\n    expected {miss['expected']!r}\n    answered {miss['answer']!r}"))
    return {"exact_match": right / (right + len(wrong)), "right": right, "rows": right + len(wrong)}


def preference(trained: LoadedModel, cfg: EvaluateConfig) -> MetricResults:
    """Share of pairs whose implicit reward, against the reference, is larger for the chosen side (https://arxiv.org/abs/2305.18290).

    The margin is the log-ratio of the two sides in nats, before it is multiplied by beta.
    """
    from contextlib import nullcontext

    from runner.engine.objectives.dpo import Dpo

    reference = load_trained(Path(cfg.reference or _reference_dir(trained.folder)), cfg.device)
    objective = Dpo(1.0, reference.model, nullcontext)
    pairs, sums = 0, {"reward_accuracy": 0.0, "reward_margin": 0.0}
    for batch in _batches(_encoded_rows(trained, cfg, *_detect_formats(cfg)), trained, cfg):
        parts = objective.loss(trained.model, batch)
        pairs += objective.count(batch)
        sums = {name: total + parts[name].item() for name, total in sums.items()}
    return {name: total / pairs for name, total in sums.items()} | {"rows": pairs}


EVALUATION_METRICS = {"perplexity": perplexity, "exact_match": exact_match, "preference": preference}
METRIC_FORMATS = {"perplexity": ("text", "chat"), "exact_match": ("chat",), "preference": ("preference",)}


def _sources(cfg: EvaluateConfig) -> list[Source]:
    from data.sources.files import resolve_sources

    return resolve_sources([cfg.data.path])[0]


def _detect_formats(cfg: EvaluateConfig) -> tuple[str, list[tuple[Source, RowSchema]]]:
    """What the metric can read the files as (text, chat or preference), and the shape of each."""
    from data.schemas.schemas import SCHEMAS
    from data.tokenize.encoder import schema_of_source

    sources, refusals = _sources(cfg), []
    for rows in METRIC_FORMATS[cfg.metric]:
        try:
            return rows, [(source, SCHEMAS[schema_of_source(source, rows)]) for source in sources]
        except ValueError as error:
            refusals.append(error)
    what, where, fix = refusals[0].args
    others = [metric for metric, reads in METRIC_FORMATS.items() if metric != cfg.metric and any(_is_format(sources[0], rows) for rows in reads)]
    wanted = " or ".join(METRIC_FORMATS[cfg.metric])
    raise UserError(f"metric={cfg.metric} reads {wanted} rows: {what}", where, f"such rows are for metric={others[0]}" if others else fix) from refusals[0]


def _is_format(source: Source, rows: str) -> bool:
    from data.tokenize.encoder import schema_of_source

    try:
        return bool(schema_of_source(source, rows))
    except ValueError:
        return False


def _encoded_rows(trained: LoadedModel, cfg: EvaluateConfig, rows: str, shapes: list[tuple[Source, RowSchema]]) -> MixedRows:
    from data.batching.mixture import WeightedSource, mix_sources
    from data.store.cache import load_or_build
    from data.types import EncodingConfig

    recipe = EncodingConfig(
        rows=rows,
        shape="",
        tokenizer=trained.tokenizer.folder,
        max_length=min(cfg.data.max_length, trained.model.cfg.max_position_embeddings),
        too_long="split" if rows == "text" else "truncate",
        train_on="assistant",
        on_bad_row="error",
    )
    made = [(source, replace(recipe, shape=shape.name)) for source, shape in shapes]
    return mix_sources([[WeightedSource(source, load_or_build(source, of, trained.tokenizer, Path(cfg.data.cache))) for source, of in made]], None)


def _batches(rows: MixedRows, trained: LoadedModel, cfg: EvaluateConfig) -> Iterator[Batch]:
    from data.batching.batch import UnpackedWindows
    from data.batching.loader import StepLoader
    from data.batching.sampler import ShuffledSampler

    if not len(rows):
        raise UserError("no row is short enough to be read", cfg.data.path, f"raise data.max_length={cfg.data.max_length}")
    loader = StepLoader(
        UnpackedWindows(rows), ShuffledSampler(len(rows), cfg.batch_size, seed=0), batch_size=cfg.batch_size, pad_id=trained.tokenizer.pad_id, packed=False
    )
    for batches in loader.steps(epoch=0):
        for batch in batches:
            yield batch.to(trained.device)


def _texts(shapes: list[tuple[Source, RowSchema]]) -> Iterator[str]:
    from data.schemas.schemas import TextExample

    for source, shape in shapes:
        for place, row in source.rows():
            text = shape.read(row, source.where(place))
            assert isinstance(text, TextExample)
            yield text.text


def _prompts(trained: LoadedModel, cfg: EvaluateConfig) -> Iterator[dict[str, Any]]:
    """Each conversation up to its last assistant turn, and that turn."""
    from data.schemas.schemas import ChatExample
    from data.tokenize.chat_template import ChatTemplate

    template = ChatTemplate(trained.tokenizer)
    room = trained.model.cfg.max_position_embeddings - cfg.max_new_tokens
    for source, shape in _detect_formats(cfg)[1]:
        for place, row in source.rows():
            where = source.where(place)
            chat = shape.read(row, where)
            assert isinstance(chat, ChatExample)
            messages = chat.messages
            if messages[-1]["role"] != "assistant":
                raise UserError(f"the conversation ends with the {messages[-1]['role']}", where, "end it with the answer that is expected")
            prompt = template.prompt(messages[:-1], chat.tools)
            if len(prompt) > room:
                raise UserError(f"a question of {len(prompt)} tokens leaves no room for an answer", where, "choose a smaller max_new_tokens, or delete the row")
            yield {"where": where, "asked": messages[-2]["content"] if len(messages) > 1 else "", "expected": messages[-1]["content"], "prompt": prompt}


def _generate_answers(trained: LoadedModel, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
    from models.generate import generate

    stop = [trained.tokenizer.eos_id]
    answers = generate(trained.model, prompts, max_new_tokens=max_new_tokens, temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, stop_ids=stop)
    return [trained.tokenizer.decode(ids) for ids in answers]


def _reference_dir(folder: Path) -> str:
    source = json.loads((folder / "run.json").read_text(encoding="utf-8")).get("init_from") if is_run_dir(folder) else None
    if not source or source == "scratch":
        raise UserError("it is not known which model this one was before its preferences were trained", f"run={folder}", "name it: reference=DIR")
    return source


def _in_chunks(items: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    from itertools import islice

    while chunk := list(islice(items, size)):
        yield chunk
