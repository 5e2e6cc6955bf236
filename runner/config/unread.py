"""Typed settings that this run does not read: refused, because a value without effect is a mistake.

YAML files may hold them.

Settings of a class that another choice of the section has (schedule.decay_fraction under cosine) are refused by
`compose.check_all_read`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from common.errors import UserError
from data.config import DataConfig
from data.sources.files import ReadOptions
from data.sources.splits import resolve_data_files
from runner.config.overrides import key_of
from runner.engine.config import Config


class Rule(NamedTuple):
    """Settings that are not read where `applies`."""

    keys: tuple[str, ...]
    applies: Callable[[Config], object]
    reason: str  # follows "is not read: "
    fix: str


def _has_no_validation(config: Config) -> bool:
    return not config.data.val_fraction and not _has_validation_files(config.data)


def _has_validation_files(data: DataConfig) -> bool:
    if data.val_path != "auto":
        return bool(data.val_paths)
    files = [path for path in data.paths if not path.startswith("hub:")]
    return bool(resolve_data_files(files, data.val_paths, ReadOptions.of(data)).validation)


NO_VALIDATION = "there is no validation data", "data.val_path=FILE, or data.val_fraction=0.01"
RULES = (
    Rule(
        ("distributed.backend", "distributed.timeout", "distributed.max_restarts"),
        lambda config: config.distributed.name == "single",
        "distributed=single is one process",
        "add distributed=ddp or distributed=fsdp, or leave it out",
    ),
    Rule(
        ("distributed.max_restarts",),
        lambda config: config.train.supervise,
        "train.supervise=true restarts by its own settings",
        "e.g. supervise.max_restarts=3, or leave it out",
    ),
    Rule(
        ("supervise.max_restarts", "supervise.delay", "supervise.hang_timeout", "supervise.halve_batch"),
        lambda config: not config.train.supervise,
        "train.supervise=false restarts nothing",
        "add train.supervise=true, or leave it out",
    ),
    Rule(
        ("distributed.shard", "distributed.replicate", "distributed.reshard_after_forward", "distributed.cpu_offload"),
        lambda config: config.distributed.name != "fsdp",
        "only distributed=fsdp shares the weights between ranks",
        "distributed=fsdp, or leave it out",
    ),
    Rule(
        ("train.epochs",),
        lambda config: config.train.max_steps,
        "train.max_steps sets the length of the run",
        "train.max_steps=0, or leave it out",
    ),
    Rule(
        ("train.sample_tokens", "train.sample_prompts"),
        lambda config: config.train.sample_prompts and not config.train.sample_every,
        "train.sample_every=0 generates no samples",
        "e.g. train.sample_every=100, or leave it out",
    ),
    Rule(
        ("train.sample_tokens",),
        lambda config: not config.train.sample_prompts,
        "train.sample_prompts is empty, no sample is generated",
        'e.g. train.sample_prompts=["Once upon a time"], or leave it out',
    ),
    Rule(
        ("train.freeze",),
        lambda config: config.train.freeze and config.stage.lora,
        "adapters are trained, and nothing else",
        "stage.lora.targets=[...] chooses their layers, or leave it out",
    ),
    Rule(
        ("train.eval_every",),
        lambda config: config.train.eval_every and _has_no_validation(config),
        *NO_VALIDATION,
    ),
    Rule(
        ("data.val_duplicates",),
        _has_no_validation,
        *NO_VALIDATION,
    ),
    Rule(
        ("train.keep_every",),
        lambda config: config.train.keep_every and not config.train.save_every,
        "train.save_every=0 saves at the end only",
        "e.g. train.save_every=100, or leave it out",
    ),
    Rule(
        ("tracker.project", "tracker.mode"),
        lambda config: not any(tracker.HAS_PROJECTS for tracker in config.tracker.selected()),
        "the selected trackers write files only and have no projects",
        "e.g. tracker.also=[wandb], or leave it out",
    ),
    Rule(
        ("data.max_bad_fraction",),
        lambda config: config.data.on_bad_row == "error",
        "data.on_bad_row=error stops at the first bad row",
        "data.on_bad_row=skip, or leave it out",
    ),
    Rule(
        ("data.val_fraction",),
        lambda config: _has_validation_files(config.data),
        "data.val_path has the validation data; auto takes files of this name beside the training data",
        "data.val_path=null holds out a fraction of the training rows, or none; or leave it out",
    ),
    Rule(
        ("data.system_prompts",),
        lambda config: config.data.system_prompts and not config.data.system_prob,
        "data.system_prob=0 adds no system message",
        "e.g. data.system_prob=0.2, or leave it out",
    ),
    Rule(
        ("data.loss_on", "data.turns", "data.system_prompts", "data.system_prob", "data.empty_think_prob"),
        lambda config: config.stage.data_format == "text",
        "texts have no messages",
        "stage=sft trains on conversations; or leave it out",
    ),
    Rule(
        (
            "model.num_experts_per_tok",
            "model.moe_intermediate_size",
            "model.norm_topk_prob",
            "model.router_aux_loss_coef",
        ),
        lambda config: getattr(config.model, "num_experts", None) == 0,
        "model.num_experts=0 is a model without experts",
        "e.g. model.num_experts=4, or model=minimind_moe",
    ),
    Rule(
        ("stage.lora.rank", "stage.lora.alpha", "stage.lora.targets", "stage.lora.rslora", "stage.lora.dora"),
        lambda config: config.stage.lora and config.stage.lora.continue_adapter,
        "stage.lora.continue_adapter=true takes it from the adapter of init_from",
        "leave it out, or stage.lora.continue_adapter=false",
    ),
    Rule(
        ("stage.init_from_stage",),
        lambda config: config.init_from != "auto",
        "init_from names the weights",
        "leave out one of them",
    ),
)


def check_typed_are_read(typed: Iterable[str], configs: Iterable[Config]) -> None:
    """Raise UserError for an override that none of `configs` reads: the config of a run, or of the jobs of a sweep."""
    configs = list(configs)
    for override in typed:
        key = key_of(override)
        rules = [rule for rule in RULES if key in rule.keys]
        reasons = [next((rule for rule in rules if rule.applies(config)), None) for config in configs]
        if reasons and all(reasons):
            assert reasons[0] is not None
            raise UserError(f"{key} is not read: {reasons[0].reason}", override, reasons[0].fix)
