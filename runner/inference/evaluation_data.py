"""Data of an evaluation: files of one data format, as examples and as batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from common.errors import UserError, print_note
from common.settings import CheckedSettings, at_least, check_choice, one_of, settings_class
from data.config import LOSS_TOKENS, TEXT_UNITS, TURNS, resolved_too_long
from data.schemas.registry import SCHEMAS, check_columns
from data.sources.files import ReadOptions
from data.types import BadRowError
from runner.tracking.progress import EvaluationProgress

if TYPE_CHECKING:
    from data.batching.batch import Batch
    from data.schemas.registry import Example, RowSchema
    from data.sources.files import Source
    from runner.inference.load import LoadedModel

DEFAULT_MAX_LENGTH = 1024  # tokens, of a model without a run
# settings that are those of the run where they are null -> without a run
OF_RUN = {
    "columns": None,
    "encoding": None,
    "schema": None,
    "on_bad_row": "error",
    "text_unit": "file",
    "turns": "strict",
    "max_length": DEFAULT_MAX_LENGTH,
    "loss_on": "assistant",
}


@settings_class
class EvaluationData(CheckedSettings):
    SECTION = "data"

    path: Optional[str]  # file, glob or folder
    # columns of your files, e.g. {prompt: question}: the field prompt is the column question; null: as in the run
    columns: Any
    encoding: Optional[str]  # of text files that are not UTF-8, e.g. gb18030; null: as in the run, else detected
    schema: Optional[str]  # row schema, e.g. "openai messages"; null: as in the run, else detected per file
    # a row that cannot be used: error, or skip (left out); null: as in the run, error without one
    on_bad_row: Optional[str] = one_of("error", "skip")
    # a row of a .txt or .md file: file (long ones in parts), or line; null: as in the run, file without one
    text_unit: Optional[str] = one_of(*TEXT_UNITS)
    # turns of one role in a row, a first turn of the assistant: strict (refused) or merge (joined, kept); null: as in
    # the run, strict without one
    turns: Optional[str] = one_of(*TURNS)
    # length limit of an example (tokens): a text is split, a conversation truncated; null: that of the run, 1024
    # without one
    max_length: Optional[int] = at_least(2, DEFAULT_MAX_LENGTH)
    # tokens with loss in a conversation: assistant, last_assistant or all; null: as in the run, assistant without one
    loss_on: Optional[str] = one_of(*LOSS_TOKENS)
    cache: str  # folder of the token stores

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns:
            check_columns(self.columns)
        if self.schema is not None:
            check_choice("data.schema", self.schema, SCHEMAS)
        ReadOptions.of(self)

    def of_run(self, data: Mapping[str, Any]) -> EvaluationData:
        """Return these settings with those of a run in place of null; `data`: its section, empty without a run."""
        missing = {name: data.get(name, default) for name, default in OF_RUN.items() if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass(frozen=True)
class EvaluationSet:
    """Rows that a metric reads, by `examples` or `batches`; they end early where the user stops."""

    cfg: EvaluationData  # with the settings of the run: `of_run`
    data_format: str  # text, chat or preference
    files: list[tuple[Source, RowSchema]]
    progress: EvaluationProgress

    def examples(self, batch_size: int = 1) -> Iterator[tuple[str, Example]]:
        """Yield (file:line, example). `batch_size`: how many the caller takes before it computes."""
        done, bad = 0, list[BadRowError]()
        self.progress.begin("rows", sum(1 for source, _ in self.files for _ in source.items()))
        for source, schema in self.files:
            for position, raw in source.items():
                if done % batch_size == 0:
                    self.progress.advance(done)
                    if self._is_stopped():
                        return
                where = source.where(position)
                try:
                    example = schema.read(source.parse(position, raw), where, source.turns)
                except BadRowError as error:
                    if self.cfg.on_bad_row != "skip":
                        raise
                    bad.append(error)
                    continue
                yield where, example
                done += 1
        self.progress.advance(done)
        if bad:
            print_note(f"left out: {len(bad)} bad rows (first: {bad[0].setting}: {bad[0].message})")

    def _is_stopped(self) -> bool:
        """Whether the user has asked to stop.

        Raises KeyboardInterrupt before the first row is done, when there is no result yet.
        """
        if self.progress.should_stop() and not self.progress.done:
            raise KeyboardInterrupt
        return self.progress.is_stopped

    def batches(self, trained: LoadedModel, batch_size: int) -> Iterator[Batch]:
        from data.batching.loader import StepLoader
        from data.batching.mixture import MixedRows, WeightedSource
        from data.batching.packing import UnpackedSequences
        from data.batching.sampler import ShuffledSampler
        from data.store.cache import load_or_build
        from data.types import EncodingConfig

        tokenizer, section = trained.tokenizer, trained.settings.get("data", {})
        cfg, of_run = self.cfg, section if trained.data_format == self.data_format else {}
        encoding = EncodingConfig(
            data_format=self.data_format,
            schema="",
            tokenizer=tokenizer.folder,
            max_length=min(cfg.max_length or DEFAULT_MAX_LENGTH, trained.model.cfg.max_position_embeddings),
            too_long=resolved_too_long(str(of_run.get("too_long", "auto")), self.data_format),
            loss_on=cfg.loss_on or "assistant",
            on_bad_row=cfg.on_bad_row or "error",
        )
        parts = []
        for source, schema in self.files:
            store = load_or_build(source, replace(encoding, schema=schema.name), tokenizer, Path(self.cfg.cache))
            if left_out := store.stats.left_out:
                print_note(f"{source.name}: left out: {left_out}")
            parts.append(WeightedSource(source, store))
        rows = MixedRows(tuple(parts))  # each once, as in an evaluation of the run
        if not len(rows):
            raise UserError(
                f"no row fits data.max_length={cfg.max_length}", f"data.path={cfg.path}", "raise data.max_length"
            )
        sampler = ShuffledSampler(len(rows), batch_size, seed=0)
        loader = StepLoader(UnpackedSequences(rows), sampler, batch_size=batch_size, pad_id=tokenizer.pad_id)
        self.progress.begin("rows", len(rows))
        with closing(loader.iter_epoch(epoch=0)) as steps:
            for number, [batch] in enumerate(steps, 1):
                if self._is_stopped():
                    return
                yield batch.to(trained.device)
                self.progress.advance(min(number * batch_size, len(rows)))
