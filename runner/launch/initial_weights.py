"""What a run starts from: weights (init_from=DIR, for init_from=auto the newest completed run of the previous stage, or
random) and their tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean_path, print_note, resume_command
from common.filesystem import sha256_of_json
from common.guarded_files import check_own_files
from common.hub import hub_name_of
from common.paths import CONF_DIR, outputs_dir
from data.tokenize.origin import (
    AUTO,
    MINIMIND,
    RUN_TOKENIZER,
    check_same_tokenizer,
    check_tokenizer_path,
    copy_tokenizer,
    resolve_tokenizer,
)
from models.formats.hub import fetch_model
from models.formats.json_files import read_adapter_settings, read_config_of_weights, why_transformers
from runner.checkpoint.atomic_dir import newest_valid
from runner.checkpoint.format import CHECKPOINTS_DIR
from runner.config.compose import compose_tree, has_file_that_chooses_model, section_object, to_config, without_hydra
from runner.config.hydra_errors import translating_hydra_errors
from runner.config.overrides import key_of
from runner.engine.config import UNNAMED_WEIGHTS, Config
from runner.launch.auto_choice import newest_completed_run
from runner.run_dir import saved_config
from runner.run_dir.best_job import find_best_job
from runner.run_dir.contents import RUN_FILE, enclosing_run, holds_run, is_sweep_dir
from runner.tracking.progress import watch_download

MAX_FULL_LR, MAX_ADAPTER_LR = 2e-4, 1e-3  # above them a fine-tuning of published weights gets a warning
# settings that change no shape
IRRELEVANT_TO_WEIGHTS = ("name", "path", "attention", "dropout", "router_aux_loss_coef", "rope_scaling")


def compatibility_fingerprints(config: Config, tokenizer: Path | None = None) -> dict[str, str]:
    """Return what two runs must share for one to start from the weights of the other: hashes of the model's shape and
    of the tokens of `tokenizer`.

    Without `tokenizer`: of a typed data.tokenizer. With data.tokenizer=auto it comes with the weights: any will do.
    """
    from data.tokenize.tokenizer import Tokenizer

    shape = {key: value for key, value in asdict(config.model).items() if key not in IRRELEVANT_TO_WEIGHTS}
    fingerprints = {"model": sha256_of_json(shape)}
    if tokenizer is None and config.data.tokenizer in (AUTO, MINIMIND):
        return fingerprints
    return fingerprints | {
        "tokenizer": Tokenizer.load(tokenizer or check_tokenizer_path(config.data.tokenizer)).tokens_fingerprint
    }


def compose_with_model(typed: list[str]) -> Config:
    """Return the config that `python runner/train.py <typed>` trains, with the model of its initial weights."""
    tree = without_hydra(compose_tree(typed))
    with translating_hydra_errors(typed):
        adopt_model(tree, typed)
        return to_config(tree)


def adopt_model(tree: MutableMapping[str, Any], typed: list[str], conf: Path = CONF_DIR) -> str | None:
    """Give the composed config `tree` the model of the weights that init_from names, with the typed values of model.*;
    return where it comes from.

    A model that is chosen, by model=... or by an experiment, stays as it is, and None is returned: `check_model`
    compares it.
    """
    keys = set(map(key_of, typed))
    if tree["init_from"] not in UNNAMED_WEIGHTS:
        tree["init_from"] = _local_path(tree["init_from"], "init_from")
    if tree["model"].get("path"):
        _adopt_path(tree, keys)
    init_from = tree["init_from"]
    if (lora := tree["stage"].get("lora")) and lora.get("continue_adapter"):
        tree["stage"]["lora"] = dict(lora) | _settings_of_adapter(init_from)
    if (
        init_from in UNNAMED_WEIGHTS
        or not Path(init_from).exists()
        or "model" in keys
        or has_file_that_chooses_model(typed, conf)
    ):
        return None
    family = tree["model"]["family"] if "model.family" in keys else None
    composed, settings = dict(tree["model"]), dict(_model_settings(Path(init_from), family))
    if family not in (None, settings["family"]):
        run = _model_source(Path(init_from))
        fix = f"leave it out; or export the weights: python runner/export.py run={run} to=NEW format=hf, then init_from=NEW model.family={family}"
        raise UserError(
            f"model.family={family} does not compute the weights of this run, which are those of {settings['family']}",
            f"model.family={family}",
            fix,
        )
    # not those of the default model, where model.family is typed
    if composed["family"] == settings["family"] and settings.keys() <= composed.keys():
        settings = composed | settings  # a setting that is newer than the run keeps its default
    for name in {key.split(".")[1] for key in keys if key.startswith("model.")}:
        settings[name] = composed.get(name)
    tree["model"] = settings
    return f"{_model_source(Path(init_from))}{_describe_family(Path(init_from), settings, family)}"


def _describe_family(source: Path, settings: Mapping[str, Any], typed: str | None) -> str:
    """Return which of the two families that read folders of transformers computes the weights, and why; "" for weights
    of this program.
    """
    family = settings["family"]
    if not _is_published(source) or family not in ("decoder", "transformers"):
        return ""
    balance = _describe_balance(settings) if family == "decoder" else ""
    if typed is not None:
        return f", computed by model.family={typed}{balance}"
    if family == "decoder":
        return f", computed by the decoder of this program{balance}; model.family=transformers chooses the class of transformers"
    return f", computed by the class of transformers: {why_transformers(source)}"


def _describe_balance(settings: Mapping[str, Any]) -> str:
    """Return whether the decoder trains experts with their load-balancing loss; "" for a dense model."""
    if not settings["num_experts"]:
        return ""
    if coefficient := settings["router_aux_loss_coef"]:
        return f" with the load-balancing loss times {coefficient:g}"
    return " without load-balancing loss, as config.json has output_router_logits=false or no coefficient (model.router_aux_loss_coef=0.001 adds it)"


def _adopt_path(tree: MutableMapping[str, Any], keys: Collection[str]) -> None:
    """Give the section `model` of model=transformers the settings of the folder model.path, which is also where weights
    come from unless init_from is typed.
    """
    path = Path(_local_path(str(tree["model"]["path"]), "model.path"))
    settings = asdict(read_config_of_weights(path, "transformers")) | {"path": str(path)}
    settings |= {name: tree["model"][name] for name in settings if f"model.{name}" in keys}
    tree["model"] = settings
    if "init_from" not in keys and tree["init_from"] == "auto":
        tree["init_from"] = str(path)


@cache
def _local_path(name: str, key: str) -> str:
    """Return the folder of a model of the hub that a YAML file names, any other value as it is.

    Typed names are resolved before.
    """
    return str(fetch_model(name, f"{key}={name}", watch_download) or name)


def restore_initial_weights(config: Config) -> Config:
    """Return the config of a resumed run with a folder for its initial weights: those of the hub may have left the
    cache.

    They are fetched again if the run reads them, of the same commit. Raises UserError if that is impossible, or if
    others are gone.
    """
    source = Path(config.init_from)
    if config.init_from == "scratch" or source.exists() or not (config.stage.lora or config.stage.needs_reference):
        return config
    if (name := hub_name_of(source)) is None:
        message = "the initial weights of this run do not exist, and its checkpoints do not hold all of them"
        raise UserError(
            message, f"init_from={source}", "restore them, or name the folder they are in now: init_from=DIR"
        )
    return replace(
        config,
        init_from=str(fetch_model(f"{name.repo}@{name.revision}", f"init_from={config.init_from}", watch_download)),
    )


def _settings_of_adapter(source: str) -> dict[str, Any]:
    """Return stage.lora of the adapter that stage.lora.continue_adapter=true trains on."""
    if source in UNNAMED_WEIGHTS or not Path(source).is_dir():
        message = "stage.lora.continue_adapter=true needs the folder of an adapter"
        raise UserError(message, f"init_from={source}", "init_from=DIR, a run that trained an adapter or a PEFT folder")
    return read_adapter_settings(Path(source))


def warn_of_lr(config: Config) -> None:
    """Print a warning if the learning rate is far above what the weights that init_from names, if they are published,
    are fine-tuned with: the defaults are those of small models.
    """
    if not _is_published(Path(config.init_from)):
        return
    limit, usual = (MAX_ADAPTER_LR, "2e-4") if config.stage.lora else (MAX_FULL_LR, "2e-5")
    if config.optimizer.lr > limit:
        kind = "an adapter" if config.stage.lora else "all weights"
        print_note(
            f"warning: optimizer.lr={config.optimizer.lr:g} is high for {kind} of a published model; try optimizer.lr={usual}"
        )


def check_model(config: Config) -> None:
    """Raise UserError if the model differs, in a setting that its logits depend on, from that of the weights that
    init_from names.
    """
    family = {"family": config.model.family}
    recorded = _model_settings(
        Path(config.init_from), config.model.family if config.model.family == "transformers" else None
    )
    known = asdict(config.model) if recorded.items() >= family.items() else {}
    own, expected = config.model.mathematics(), section_object("model", known | recorded).mathematics()
    differences = {
        name: (own.get(name), expected.get(name)) for name in own | expected if own.get(name) != expected.get(name)
    }
    if differences:
        table = "\n".join(
            f"  model.{name}={mine}, in the weights {other}" for name, (mine, other) in differences.items()
        )
        values = " ".join(
            f"model.{name}={'null' if other is None else other}"
            for name, (_, other) in differences.items()
            if not isinstance(other, dict)
        )
        raise UserError(
            f"these weights belong to another model:\n{table}",
            f"init_from={config.init_from}",
            f"leave out what sets the model (model=..., model.*, an experiment): the settings of the weights are taken then{f'; or type {values}' if values else ''}",
        )


@cache
def _model_settings(source: Path, family: str | None = None) -> dict[str, Any]:
    """Return the settings of the model that weights belong to, of a run those that it recorded, of a folder those of
    `family`.
    """
    run = _model_source(source)
    if (run / saved_config.CONFIG_FILE).is_file():
        recorded = saved_config.load_literal_config(run).get("model")
        if isinstance(recorded, dict) and "family" in recorded:
            return recorded
        source = run  # of an older version: its model/ has the settings under the names of today
    return asdict(read_config_of_weights(source, family))


def _model_source(source: Path) -> Path:
    """Return the run directory if `source` is a run, its model or one of its checkpoints; else `source`."""
    run = enclosing_run(source)
    is_of_run = (
        run is not None
        and source.relative_to(run).parts[:1] in ((), ("model",), ("checkpoints",))
        and "base" not in source.relative_to(run).parts
    )
    return run if run is not None and is_of_run and (run / saved_config.CONFIG_FILE).is_file() else source


def _is_published(source: Path) -> bool:
    """Return whether weights are in a folder of transformers that is no run, nor a part of one."""
    return source.is_dir() and _model_source(source) == source and not (source / RUN_FILE).exists()


@cache
def _folder_of_weights(init_from: str) -> str:
    """Return the best job of a sweep, the newest whole checkpoint of a run that has no model/; any other `init_from`
    as it is.
    """
    source = Path(init_from)
    if is_sweep_dir(source):
        return str(find_best_job(source))
    if not holds_run(source) or (source / "model").is_dir():
        return init_from
    check_own_files(source, (CHECKPOINTS_DIR,))
    checkpoint, _ = newest_valid(source / CHECKPOINTS_DIR)
    if checkpoint is None:
        raise UserError(
            "this run has no model and no whole checkpoint",
            f"init_from={init_from}",
            f"finish it: {resume_command(source)}",
        )
    print_note(f"init_from={init_from}: the run has no model/, the weights are those of {checkpoint.name}")
    return str(checkpoint)


def resolve_init_from(config: Config, folder: Path, warn: bool = True) -> str:
    """Return `config.init_from` as a path or "scratch"; `auto` searches outputs/ and the directories beside `folder`. A
    sweep means its best job, a run that is not completed its newest checkpoint.
    """
    if config.keep != "none":  # `entrypoint` handles the typed one
        text = "keep=optimizer is read by train.py and plan.py only, and typed with init_from=RUN@step-N"
        raise UserError(text, "keep=optimizer", "leave it out")
    if config.init_from == "auto":
        return newest_completed_run(config, folder, compatibility_fingerprints(config), warn)
    if config.init_from == "scratch":
        return "scratch"
    check_init_from(config)
    found = _folder_of_weights(config.init_from)
    if Path(found).parent.name == CHECKPOINTS_DIR != Path(config.init_from).parent.name and (
        config.stage.lora or config.stage.needs_reference
    ):
        raise UserError(
            f"stage={config.stage.name} reads the weights again at a resume, and this run has only checkpoints, which it deletes",
            f"init_from={config.init_from}",
            f"finish it: {resume_command(Path(config.init_from))}",
        )
    return found


def check_init_from(config: Config) -> None:
    """Raise UserError if init_from names a path that does not exist."""
    if not Path(config.init_from).exists():
        raise UserError(
            f"init_from must be auto, scratch, an existing path or a model of the hub (owner/name), got {config.init_from}",
            f"init_from={config.init_from}",
            did_you_mean_path(config.init_from),
        )


def check_tokenizer(config: Config) -> None:
    """Raise UserError if data.tokenizer, init_from and the model do not fit.

    The weights of init_from=auto are found later: only a typed folder is checked then.
    """
    from data.tokenize.tokenizer import Tokenizer

    if config.init_from != "auto" or config.stage.init_from_stage is None:
        is_named = config.init_from not in UNNAMED_WEIGHTS
        folder = resolve_tokenizer(config.data, _folder_of_weights(config.init_from) if is_named else "scratch")
    elif config.data.tokenizer not in (AUTO, MINIMIND):
        folder = check_tokenizer_path(config.data.tokenizer)
    else:
        return
    config.check_vocabulary(Tokenizer.load(folder).vocab_size)


def with_tokenizer(config: Config, folder: Path, source: str | None) -> Config:
    """Return the config with the path of the tokenizer, and copy it to the run directory `folder`: a resume and the
    export do not depend on that path.

    `config.init_from` is a path or "scratch"; `source` is the recorded path, None for a new run. Raises UserError if a
    new run would get a tokenizer that is not that of its weights, or a resumed run another one than before.
    """
    copy, typed = folder / RUN_TOKENIZER, config.data.tokenizer
    if source is None or not copy.is_dir():
        is_resolved = source is not None and typed not in (AUTO, MINIMIND)
        found = check_tokenizer_path(typed) if is_resolved else resolve_tokenizer(config.data, config.init_from)
        copy_tokenizer(found, copy, config.init_from)
        source = str(found.absolute())
    elif typed not in (AUTO, MINIMIND, source) and Path(typed).exists():
        check_same_tokenizer(Path(typed), copy)
    return replace(config, data=replace(config.data, tokenizer=source))


def resolve_start(config: Config) -> Config:
    """Return the config with the weights and the tokenizer that a run would start from now, for commands without a run
    directory.
    """
    init_from = resolve_init_from(config, outputs_dir() / "run", warn=False)
    tokenizer = str(resolve_tokenizer(config.data, init_from))
    return replace(config, init_from=init_from, data=replace(config.data, tokenizer=tokenizer))
