"""The config of a run: one field per section, each section declared beside the code that reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Optional

from common.errors import UserError, one_line
from common.registry import Registry
from common.settings import (
    CHANGES_ROUNDING,
    CHANGES_TRAINING,
    IGNORED,
    INCOMPATIBLE,
    as_typed,
    check_at_least,
    check_choice,
    check_choices,
    check_settings,
)
from data.config import DataConfig
from data.schemas.registry import SCHEMAS, STAGE_OF_FORMAT
from models.config import ACTIVATION_CHECKPOINTING_MODES, MODELS, ModelConfig
from runner.engine.device.compile import COMPILE_MODES, check_compile_mode
from runner.engine.device.distributed import DistributedConfig
from runner.engine.device.precision import PrecisionConfig
from runner.engine.objectives.config import OBJECTIVES, StageConfig
from runner.engine.optim.config import OPTIMIZERS, OptimizerConfig
from runner.engine.optim.schedules import SCHEDULES, ScheduleConfig, check_warmup
from runner.tracking.config import TRACKERS, TrackerConfig

DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
TAG = re.compile(r"[\w.+:=-]+")
MAX_NAME, MAX_NOTE, MAX_TAG, MAX_TAGS = 80, 500, 40, 20  # characters; number of tags
# Sections whose class depends on a value in them: section -> (key of that value, registry of the classes)
REGISTERED_SECTIONS: dict[str, tuple[str, Registry[Any]]] = {
    "model": ("family", MODELS),
    "optimizer": ("name", OPTIMIZERS),
    "schedule": ("name", SCHEDULES),
    "stage": ("objective", OBJECTIVES),
    "tracker": ("name", TRACKERS),
}


@dataclass
class TrainConfig:
    """Steps are optimizer steps. An interval of 0 switches it off."""

    ON_RESUME = "ignored"

    # batch rows of a micro-batch on each rank: examples, or packed sequences
    batch_size: int = field(metadata=CHANGES_ROUNDING)
    accumulation_steps: int = field(metadata=CHANGES_ROUNDING)  # micro-batches per step
    epochs: int = field(metadata=CHANGES_TRAINING)  # passes over the data
    # steps of the run, whatever train.epochs is; 0: as many as the epochs take
    max_steps: int = field(metadata=CHANGES_TRAINING)
    log_every: int  # steps between two lines of metrics.jsonl, at least 1; losses are fetched from the device then
    eval_every: int  # steps between two evaluations
    # evaluate after the last step whatever eval_every is, without validation data on this many training rows; 0: no;
    # jobs of a sweep that do not evaluate get 256
    final_eval_rows: int
    save_every: int  # steps between two checkpoints
    sample_every: int  # steps between two sets of generated samples
    # prompts of the generated samples, e.g. ["Once upon a time"]; auto: beginnings of held-out rows (without any, of
    # training rows), which trackers get, too
    sample_prompts: Any
    sample_tokens: int  # length limit of a sample (tokens)
    keep_checkpoints: int  # newest checkpoints that are kept, at least 2; the best one is kept, too
    keep_every: int  # steps; checkpoints of multiples of it are kept, too
    patience: int  # evaluations without a better loss after which the run ends early; 0: never
    # consecutive skipped steps (loss or gradient not finite) after which the run fails
    max_nonfinite_steps: int = field(metadata=CHANGES_TRAINING)
    max_failed_saves: int  # consecutive failed saves (e.g. a full disk) after which the run fails
    # auto (if the run is long enough to gain from it), off, default, reduce-overhead or max-autotune
    compile: str = field(metadata=CHANGES_ROUNDING)
    # parameters that keep their initial values, e.g. [embed_tokens, layers.0-3]
    freeze: list[str] = field(metadata=INCOMPATIBLE)
    # recompute in the backward pass: none, selective (all but matmuls and attention) or full
    activation_checkpointing: str = field(metadata=CHANGES_ROUNDING)
    # a GPU computes the same bits each time; false: kernels that sum in a varying order, which may be faster
    deterministic: bool = field(metadata=CHANGES_ROUNDING)
    verify_resume: bool  # instead of training: check that a run that is stopped and resumed gives the same bits
    # train in a child process that is restarted from the newest checkpoint after a crash, a lack of memory or a hang
    supervise: bool

    def __post_init__(self) -> None:
        at_least_1 = (
            "batch_size",
            "accumulation_steps",
            "epochs",
            "log_every",
            "sample_tokens",
            "max_nonfinite_steps",
            "max_failed_saves",
        )
        at_least_0 = (
            "max_steps",
            "eval_every",
            "final_eval_rows",
            "save_every",
            "sample_every",
            "keep_every",
            "patience",
        )
        check_settings("train", self, at_least_1, check_at_least, 1, 1)
        check_settings("train", self, at_least_0, check_at_least, 0, 0)
        if self.sample_prompts != "auto":
            prompts = self.sample_prompts if isinstance(self.sample_prompts, list) else [None]
            if not all(isinstance(prompt, (str, int, float)) and str(prompt).strip() for prompt in prompts):
                typed = as_typed(self.sample_prompts)
                raise UserError(
                    f"train.sample_prompts must be auto or a list of texts, got {typed}",
                    f"train.sample_prompts={typed}",
                    'train.sample_prompts=["Once upon a time"]',
                )
            self.sample_prompts = [as_typed(prompt) for prompt in prompts]
        check_at_least("train.keep_checkpoints", self.keep_checkpoints, 2, 3)  # a damaged one leaves one to resume from
        check_choices(
            "train", self, {"activation_checkpointing": ACTIVATION_CHECKPOINTING_MODES, "compile": COMPILE_MODES}
        )


@dataclass
class LabelConfig:
    """What a person calls the run.

    It is text for pages and lists: no path, no folder and no identity of the run is made of it.
    """

    ON_RESUME = "ignored"

    name: str  # name of the run in pages and lists, at most 80 characters, no slash; hydra.run.dir=DIR places the run
    tags: list[str]  # at most 20 tags of at most 40 characters: letters, digits, . _ - + : =
    note: str  # one line about the run, at most 500 characters

    def __post_init__(self) -> None:
        for key, limit in (("name", MAX_NAME), ("note", MAX_NOTE)):
            check_label(f"run.{key}", getattr(self, key), limit)
        if {"/", "\\"} & set(self.name) or self.name.startswith((".", "~")):
            fix = "a name without slashes; hydra.run.dir=DIR places the run in a folder"
            raise UserError(
                "run.name is a name and not a path: it has no slash and begins with no dot or ~",
                f"run.name={self.name}",
                fix,
            )
        if len(self.tags) > MAX_TAGS:
            raise UserError(
                f"run.tags must have at most {MAX_TAGS} tags, got {len(self.tags)}", "run.tags", "leave some out"
            )
        for tag in self.tags:
            check_label("run.tags", tag, MAX_TAG)
            if not TAG.fullmatch(tag):
                fix = "separate tags with commas in brackets: run.tags=[baseline,lr-search]"
                raise UserError(
                    f"a tag has letters, digits and . _ - + : = only, got {tag or 'an empty one'}",
                    f"run.tags=[{tag}]",
                    fix,
                )


def check_label(setting: str, text: str, limit: int) -> None:
    """Raise UserError for a text that is too long, is more than one line, or that a file of a run may not hold."""
    if len(text) > limit:
        raise UserError(f"{setting} must have at most {limit} characters, got {len(text)}", setting, "shorten it")
    if one_line(text) != text or "\t" in text:
        raise UserError(f"{setting} must be one line without control characters", f"{setting}={text}", "leave them out")
    if "${" in text:  # a stored override with an interpolation could read the environment when the run is resumed
        raise UserError(f"{setting} must not hold ${{", f"{setting}={text}", "write it without the brace")


@dataclass
class ExportConfig:
    """What a completed run writes to `model/`."""

    ON_RESUME = "ignored"

    # of model/: best (those of the lowest validation loss), last, or auto: best if the run evaluates on validation
    # data, otherwise last
    weights: str

    def __post_init__(self) -> None:
        check_choice("export.weights", self.weights, ("auto", "best", "last"))


@dataclass
class SuperviseConfig:
    """Restarts of train.supervise=true."""

    ON_RESUME = "ignored"

    # restarts in a row without a newer checkpoint, at least 1; after that the fault counts as permanent
    max_restarts: int
    delay: float  # seconds before the first restart of a row; doubled with every further one, up to 300
    # minutes without a sign of life (a micro-batch, an evaluation batch) after which a process is ended; 0: never
    hang_timeout: float
    # after a lack of memory: at most half of train.batch_size and as many train.accumulation_steps as keep the rows per
    # step
    halve_batch: bool

    def __post_init__(self) -> None:
        check_at_least("supervise.max_restarts", self.max_restarts, 1, 3)
        check_settings("supervise", self, ("delay", "hang_timeout"), check_at_least, 0, 5)


# Swept, they change how many tokens a step holds.
STEP_SIZE_KEYS = {
    "train.batch_size",
    "train.accumulation_steps",
    "distributed.nproc",
    "distributed.nnodes",
    "data.max_length",
    "data.packing",
}


@dataclass
class SweepConfig:
    """Rules of the sweep that a run is a job of.

    Training does not read them: they become overrides of each job.
    """

    ON_RESUME = "ignored"

    match_budget: str  # what all jobs have in common: auto, tokens, steps or epochs
    lr_scale: str  # how optimizer.lr follows the batch size: none, linear or sqrt
    zip: list[str]  # swept keys whose values are paired instead of combined

    def __post_init__(self) -> None:
        choices = {"match_budget": ("auto", "tokens", "steps", "epochs"), "lr_scale": ("none", "linear", "sqrt")}
        check_choices("sweep", self, choices)


@dataclass
class Config:
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    precision: PrecisionConfig
    stage: StageConfig
    distributed: DistributedConfig
    tracker: TrackerConfig
    train: TrainConfig
    run: LabelConfig
    export: ExportConfig
    supervise: SuperviseConfig
    sweep: SweepConfig
    seed: int  # of weights, data order and dropout, from 0 to 2**32 - 1
    # auto (a GPU if there is one), cpu, cuda, cuda:<number> or mps (GPU of a Mac)
    device: str = field(metadata=CHANGES_ROUNDING)
    # initial weights: auto, scratch, last, a run, a sweep, a Hugging Face folder, owner/name of the hub, a .pth
    init_from: str = field(metadata=IGNORED)
    resume: Optional[str] = field(metadata=IGNORED)  # run or sweep directory to continue, or last
    # modules or .py files of the user that extend the registries; typed for each command, never read from a file
    plugins: list[str] = field(metadata=IGNORED)

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates on validation data while it trains. data.val_path=auto may find no file,
        data.val_fraction then holds out rows.
        """
        return bool(self.train.eval_every and (self.data.val_path or self.data.val_fraction))

    def __post_init__(self) -> None:
        data, stage, train = self.data, self.stage, self.train
        if data.max_length > self.model.max_position_embeddings:
            raise UserError(
                f"data.max_length must be at most model.max_position_embeddings={self.model.max_position_embeddings}, got {data.max_length}",
                f"data.max_length={data.max_length}",
                f"data.max_length={self.model.max_position_embeddings}",
            )
        if data.schema and SCHEMAS[data.schema].data_format != stage.data_format:
            data_format = SCHEMAS[data.schema].data_format
            raise UserError(
                f"stage={stage.name} needs {stage.data_format} data, data.schema={data.schema} is {data_format} data",
                f"data.schema={data.schema}",
                f"a stage for such rows is {STAGE_OF_FORMAT[data_format]}",
            )
        if data.too_long == "split" and stage.data_format != "text":
            raise UserError(
                f"data.too_long=split needs text data, stage={stage.name} has {stage.data_format} data",
                "data.too_long=split",
                "data.too_long=truncate or drop",
            )
        if not DEVICE.fullmatch(self.device):
            raise UserError(
                f"device must be auto, cpu, cuda, cuda:<number> or mps, got {self.device}",
                f"device={self.device}",
                "e.g. device=auto",
            )
        if self.device == "cpu":
            self.distributed.check_device("cpu")
            self.precision.check_device("the CPU", None)
        if self.device == "mps":
            self.distributed.check_device("mps")
            self.precision.check_device("a GPU of Apple", None)
            check_compile_mode(train.compile, "mps")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be in [0, 4294967295], got {self.seed}", f"seed={self.seed}", "e.g. seed=42")
        if self.export.weights == "best" and not self.evaluates:
            raise UserError(
                "export.weights=best needs evaluations on validation data, and this run has none",
                "export.weights=best",
                "set train.eval_every, and data.val_path or data.val_fraction; or export.weights=last",
            )
        if train.patience and not self.evaluates:
            raise UserError(
                f"train.patience={train.patience} counts evaluations, and this run has none",
                f"train.patience={train.patience}",
                "set train.eval_every, and data.val_path or data.val_fraction",
            )
        if train.max_steps:
            check_warmup(train.max_steps, self.schedule)
        if stage.lora and stage.lora.quantize:
            setting, off = f"stage.lora.quantize={stage.lora.quantize}", "or stage.lora.quantize=null"
            if self.distributed.name == "fsdp":
                raise UserError(
                    "distributed=fsdp cannot share quantized weights between ranks",
                    setting,
                    f"distributed=ddp or single, {off}",
                )
            if self.init_from == "scratch":
                raise UserError(
                    "random weights need no quantization: adapters on them learn nothing of use",
                    setting,
                    f"init_from=DIR, {off}",
                )

    def check_vocabulary(self, tokens: int) -> None:
        """Raise UserError if the model has no embedding for some of the `tokens` of the tokenizer."""
        if tokens > self.model.vocab_size:
            if self.init_from not in ("auto", "scratch"):  # the size is that of the weights
                raise UserError(
                    f"tokenizer vocabulary ({tokens}) is larger than that of the weights ({self.model.vocab_size})",
                    f"init_from={self.init_from}",
                    f"data.tokenizer=DIR, the tokenizer of the weights; or with transformers: model.resize_token_embeddings({tokens}), save_pretrained(NEW)",
                )
            raise UserError(
                f"tokenizer vocabulary ({tokens}) is larger than model.vocab_size ({self.model.vocab_size})",
                f"model.vocab_size={self.model.vocab_size}",
                f"model.vocab_size={tokens}, or another data.tokenizer",
            )
