"""The config of a run: one field per section, each section declared beside the code that reads it."""

from __future__ import annotations

import math
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
    CheckedSettings,
    Limit,
    at_least,
    limited,
    one_of,
    settings_class,
    within,
)
from data.config import DataConfig, check_max_length
from data.schemas.registry import SCHEMAS, STAGE_OF_FORMAT
from models.config import ACTIVATION_CHECKPOINTING_MODES, MODELS, ModelConfig
from runner.engine.device.compile import COMPILE_MODES, check_mps_compile
from runner.engine.device.distributed import DistributedConfig, check_device_name
from runner.engine.device.precision import UNVERSIONED_DEVICES, PrecisionConfig
from runner.engine.objectives.config import OBJECTIVES, StageConfig
from runner.engine.optim.config import OPTIMIZERS, OptimizerConfig, check_mup
from runner.engine.optim.schedules import SCHEDULES, ScheduleConfig, check_warmup
from runner.tracking.config import TRACKERS, TrackerConfig

PROMPTS = Limit(
    "auto or a list of texts",
    lambda value: (
        value == "auto"
        or isinstance(value, list)
        and all(isinstance(prompt, (str, int, float)) and str(prompt).strip() for prompt in value)
    ),
    '["Once upon a time"]',
)
EVAL_METRICS = Limit("a list of: exact_match", {"exact_match"}.issuperset, "[exact_match]")
BUDGET = re.compile(r"(?=[0.]*[1-9])(\d+(?:\.\d+)?(?:e\+?\d\d?)?)(s|m|h|tokens|flops)")
BUDGET_LIMIT = Limit(
    "a time, tokens or FLOPs below 1e27: 30m, 2e9tokens, 1e17flops",
    lambda text: (match := BUDGET.fullmatch(text)) is not None and float(match[1]) < 1e27,
    "30m",
)
UNNAMED_WEIGHTS = ("auto", "scratch")  # values of init_from that name no weights
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


def first_step_of(share: float, total_steps: int, begun: int = 0) -> int:
    """Return the first step after which at least `share` of the steps are done, of those after step `begun`."""
    return begun + math.ceil(share * (total_steps - begun) - 1e-9)  # 0.07 * 100 is above 7


@settings_class
class TrainConfig(CheckedSettings):
    """Steps are optimizer steps. An interval of 0 switches it off."""

    SECTION = "train"
    ON_RESUME = "ignored"

    # batch rows of a micro-batch on each rank: examples, or packed sequences; auto: as many as fit by the estimate of
    # plan.py, with equal rows per step
    batch_size: int = at_least(1, resume=CHANGES_ROUNDING)
    accumulation_steps: int = at_least(1, resume=CHANGES_ROUNDING)  # micro-batches per step
    epochs: int = at_least(1, resume=CHANGES_TRAINING)  # passes over the data
    # steps of the run, whatever train.epochs is; 0: as many as the epochs take
    max_steps: int = at_least(0, resume=CHANGES_TRAINING)
    # steps between two lines of metrics.jsonl; losses are fetched from the device then
    log_every: int = at_least(1)
    eval_every: int = at_least(0)  # steps between two evaluations
    # computed at each evaluation, too: exact_match, of answers generated for at most 64 rows of each validation set
    eval_metrics: list[str] = limited(EVAL_METRICS)
    # evaluate after the last step whatever eval_every is, without validation data on this many training rows; 0: no;
    # jobs of a sweep that do not evaluate get 256
    final_eval_rows: int = at_least(0)
    save_every: int = at_least(0)  # steps between two checkpoints
    sample_every: int = at_least(0)  # steps between two sets of generated samples
    # prompts of the generated samples, e.g. ["Once upon a time"]; auto: beginnings of held-out rows (without any, of
    # training rows), which trackers get, too
    sample_prompts: Any = limited(PROMPTS)
    sample_tokens: int = at_least(1)  # length limit of a sample (tokens)
    # two, so that a damaged one leaves one to resume from
    keep_checkpoints: int = at_least(2, 3)  # newest checkpoints that are kept; the best one is kept, too
    keep_every: int = at_least(0)  # steps; checkpoints of multiples of it are kept, too
    # evaluations without a better loss after which the run ends early; 0: never
    patience: int = at_least(0)
    # consecutive skipped steps (loss or gradient not finite) after which the run fails
    max_nonfinite_steps: int = at_least(1, resume=CHANGES_TRAINING)
    # consecutive failed saves (e.g. a full disk) after which the run fails
    max_failed_saves: int = at_least(1)
    # auto (if the run is long enough to gain from it), off, default, reduce-overhead or max-autotune
    compile: str = one_of(*COMPILE_MODES, resume=CHANGES_ROUNDING)
    # hours after which a process saves and ends with exit code 75, checked after each step, counted from its start;
    # 0: never
    max_hours: float = at_least(0)
    # share of its own steps: save and end with exit code 75 at the first evaluation from there on; 0: never
    stop_at: float = within("[0, 1]", 0.5)
    # decay of the exponential moving average of the trained weights, less in the first steps, e.g. 0.999; 0: none
    ema_decay: float = within("[0, 1)", 0.999, resume=CHANGES_TRAINING)
    # write a trace of this many steps, after the first two of a launch, and of what is between them, to profile.json;
    # 0: none
    profile: int = within("[0, 100]", 5)
    # parameters that keep their initial values, e.g. [embed_tokens, layers.0-3]
    freeze: list[str] = field(metadata=INCOMPATIBLE)
    # recompute in the backward pass: none, selective (all but matmuls and attention) or full
    activation_checkpointing: str = one_of(*ACTIVATION_CHECKPOINTING_MODES, resume=CHANGES_ROUNDING)
    # a GPU computes the same bits each time; false: kernels that sum in a varying order, which may be faster
    deterministic: bool = field(metadata=CHANGES_ROUNDING)
    verify_resume: bool  # instead of training: check that a run that is stopped and resumed gives the same bits
    # train in a child process that is restarted from the newest checkpoint after a crash, a lack of memory or a hang
    supervise: bool

    def total_steps(self, steps_per_epoch: int) -> int:
        return self.max_steps or self.epochs * steps_per_epoch

    def pause_step(self, total_steps: int, begun: int) -> int | None:
        """Return the step of the evaluation at which train.stop_at ends a run of `total_steps`, a branch from step
        `begun` on; None for none before the last step.
        """
        step = -(-first_step_of(self.stop_at, total_steps, begun) // max(1, self.eval_every)) * self.eval_every
        return step if self.stop_at and begun < step < total_steps else None


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


@settings_class
class ExportConfig(CheckedSettings):
    """What a completed run writes to `model/`."""

    SECTION = "export"
    ON_RESUME = "ignored"

    # of model/: best (those of the lowest validation loss), last, ema (average of train.ema_decay, which is evaluated
    # then), or auto: ema if there is one, else best if the run evaluates on validation data, otherwise last
    weights: str = one_of("auto", "best", "last", "ema")


@settings_class
class SuperviseConfig(CheckedSettings):
    """Restarts of train.supervise=true."""

    SECTION = "supervise"
    ON_RESUME = "ignored"

    # restarts in a row without a newer checkpoint; after that the fault counts as permanent
    max_restarts: int = at_least(1, 3)
    # seconds before the first restart of a row; doubled with every further one, up to 300
    delay: float = at_least(0, 5)
    # minutes without a sign of life (a micro-batch, an evaluation batch) after which a process is ended; 0: never
    hang_timeout: float = at_least(0, 5)
    # after a lack of memory: at most half of train.batch_size and as many train.accumulation_steps as keep the rows per
    # step
    halve_batch: bool


STOP_KEY = "train.stop_at"
# Swept, they change how many tokens a step holds.
STEP_SIZE_KEYS = {
    "train.batch_size",
    "train.accumulation_steps",
    "distributed.nproc",
    "distributed.nnodes",
    "data.max_length",
    "data.packing",
}


@settings_class
class SweepConfig(CheckedSettings):
    """Rules of the sweep that a run is a job of.

    Training does not read them: they become overrides of each job.
    """

    SECTION = "sweep"
    ON_RESUME = "ignored"

    # what all jobs have in common: auto, tokens, steps or epochs
    match_budget: str = one_of("auto", "tokens", "steps", "epochs")
    # how optimizer.lr follows the batch size: none, linear or sqrt
    lr_scale: str = one_of("none", "linear", "sqrt")
    zip: list[str]  # swept keys whose values are paired instead of combined
    # seeds that each of the best points gets at the end, one by one until they differ by more than chance; 0: no more
    # than are swept
    seeds: int = limited(Limit("0, or at least 2", lambda seeds: seeds == 0 or seeds >= 2, 5))
    top: int = at_least(2, 3)  # points that sweep.seeds and sweep.budget add seeds to
    # what a sweep may spend: sets the length of its jobs; null: they have that of the settings
    budget: Optional[str] = limited(BUDGET_LIMIT)
    # mup: train narrow versions of the model, of optimizer.mup_base_width
    transfer: str = one_of("none", "mup")


@settings_class
class Config(CheckedSettings):
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
    seed: int = within("[0, 4294967295]", 42)  # of weights, data order and dropout
    # auto (a GPU if there is one), cpu, cuda, cuda:<number> or mps (GPU of a Mac)
    device: str = field(metadata=IGNORED)
    # initial weights: auto, scratch, last, a run, a sweep, a Hugging Face folder, owner/name of the hub, a .pth
    init_from: str = field(metadata=IGNORED)
    # what a run continues of init_from=RUN@step-N: none (but the weights), optimizer (the complete state)
    keep: str = one_of("none", "optimizer", resume=IGNORED)
    resume: Optional[str] = field(metadata=IGNORED)  # run or sweep directory to continue, or last
    # modules or .py files of the user that extend the registries; typed for each command, never read from a file
    plugins: list[str] = field(metadata=IGNORED)

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates on validation data while it trains. data.val_path=auto may find no file,
        data.val_fraction then holds out rows.
        """
        return bool(self.train.eval_every and (self.data.val_paths or self.data.val_fraction))

    def __post_init__(self) -> None:
        super().__post_init__()
        data, stage, train = self.data, self.stage, self.train
        if self.optimizer.mup_base_width:
            check_mup(self.optimizer, self.model, stage.lora is not None)
        check_max_length(data.max_length, self.model.max_position_embeddings)
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
        if data.loss_on == "all" and stage.data_format == "preference":
            raise UserError(
                f"stage={stage.name} compares answers: what chosen and rejected share has no loss, got data.loss_on=all",
                "data.loss_on=all",
                "data.loss_on=assistant",
            )
        check_device_name(self.device)
        if self.device in UNVERSIONED_DEVICES:
            self.distributed.check_device(self.device)
            self.precision.check_device(UNVERSIONED_DEVICES[self.device])
        if self.device == "mps":
            check_mps_compile(train.compile)
        if self.export.weights == "best" and not self.evaluates:
            raise UserError(
                "export.weights=best needs evaluations on validation data, and this run has none",
                "export.weights=best",
                "set train.eval_every, and data.val_path or data.val_fraction; or export.weights=last",
            )
        if self.export.weights == "ema" and not train.ema_decay:
            raise UserError(
                "export.weights=ema needs the average of the weights, and this run has none",
                "export.weights=ema",
                "train.ema_decay=0.999",
            )
        for key, value in (("train.patience", train.patience), ("train.stop_at", train.stop_at)):
            if value and not self.evaluates:
                raise UserError(
                    f"{key}={value} needs evaluations on validation data, and this run has none",
                    f"{key}={value}",
                    "set train.eval_every, and data.val_path or data.val_fraction",
                )
        if train.eval_metrics and not (self.evaluates and stage.data_format == "chat" and data.loss_on != "all"):
            raise UserError(
                f"train.eval_metrics={train.eval_metrics} needs evaluations, conversations and loss on their answers alone: train.eval_every={train.eval_every}, stage.data_format={stage.data_format}, data.loss_on={data.loss_on}",
                f"train.eval_metrics={train.eval_metrics}",
                "train.eval_metrics=[]; the metrics that follow from the loss are in every evaluation",
            )
        if self.keep != "none" and (self.sweep.seeds or self.sweep.budget):
            raise UserError(
                "a branch has the seed of its trunk: no others can be added",
                f"keep={self.keep} sweep.seeds={self.sweep.seeds} sweep.budget={self.sweep.budget}",
                "sweep.seeds=0 sweep.budget=null",
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
            if self.init_from not in UNNAMED_WEIGHTS:  # the size is that of the weights
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


def rows_per_step(config: Config) -> int:
    """Return the rows of an optimizer step. distributed.nproc=auto counts as one rank: it is the same number for every
    job.
    """
    ranks = config.distributed.nnodes * (1 if config.distributed.nproc == "auto" else int(config.distributed.nproc))
    return config.train.batch_size * config.train.accumulation_steps * ranks
