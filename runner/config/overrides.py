"""The command line: split by Hydra's parser, checked against the schema, and normalised.

Overrides (`key=value`, `group=option`) are checked before anything is composed. A config does not say which of its
settings are defaults: where that counts, the list of what the user typed is passed on, and `key_of` names the settings.
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser

from common.errors import UserError, did_you_mean
from common.paths import CONF_DIR
from common.registry import import_plugins, locate_plugin
from runner.config.literals import (
    COLUMNS_KEY,
    QUOTED_ITEM,
    hydra_quote,
    literal_output,
    literal_path,
    parse_value,
    quote_columns,
    quote_path,
)
from runner.config.schema import config_groups, config_schema, unknown_option

# Hydra's ways to compose from the inside of a run directory
RERUN_FLAGS = ("--config-path", "--config-name", "--experimental-rerun")
Flags = dict[str, Any]  # name -> its value, True for a flag without one


def parse_argv(argv: list[str], settings: Iterable[str] | None = None) -> tuple[list[str], Flags]:
    """Return (overrides, flags).

    Names of flags are spelled out: `-cjob` becomes {"--cfg": "job"}.

    Raises UserError for a flag that Hydra does not have; the message for a known name of `settings` (None: of
    train.py), as in `--epochs 3`, gives the override.
    """
    parser = get_args_parser()

    def fail(message: str) -> NoReturn:
        raise UserError(
            f"invalid flag: {message}", " ".join(argv), "--hydra-help lists the flags and their values, e.g. --cfg=job"
        )

    parser.error = fail  # type: ignore[method-assign]  # the parser would print a usage text
    for index, (arg, following) in enumerate(itertools.pairwise(argv)):
        if arg in ("--info", "-i") and "=" in following:  # the parser would take the override for the topic of --info
            argv = [*argv[:index], "--info=all", *argv[index + 1 :]]
    args, unknown = parser.parse_known_intermixed_args(argv)
    for flag in unknown:
        name, _, value = flag.lstrip("-").partition("=")
        # --epochs 3
        value = value or next(
            (arg for arg in argv[argv.index(flag) + 1 :][:1] if "=" not in arg and not arg.startswith("-")), ""
        )
        name = name.replace("-", "_")
        settings, named = list(settings or (*config_schema(), *config_groups())), f"={value or '<value>'}"
        key = next((f"{key}{named}" for key in settings if name in (key, key.rsplit(".", 1)[-1])), None)
        if key is None and "optimizer.lr" in settings:
            key = next((known for known, names in EQUIVALENT_SETTINGS.items() if name in names.split()), None)
            # the names of options are other ones there
            key = key if key is None or "=" in key else f"{key}{named}" if "." in key else f"{key}=<value>"
        if key and flag.startswith("--"):
            raise UserError(f"{flag} is not a flag; settings are given without dashes", flag, key)
        raise UserError("unknown flag", flag, "--help lists the settings, --hydra-help the flags")
    given = {name: value for name, value in vars(args).items() if name != "overrides" and value not in (None, False)}
    return args.overrides, {f"--{name.replace('_', '-')}": value for name, value in given.items()}


def spell_flags(flags: Flags) -> list[str]:
    """Return the flags as arguments: `--cfg=job`."""
    return [name if value is True else f"{name}={value}" for name, value in flags.items()]


HYDRA_PREFIXES = ("hydra.", "hydra/")
HYDRA_KEYS_REFUSED = {
    "hydra.output_subdir": "a run is resumed from its .hydra/",
    "hydra.mode": "--multirun starts a sweep",
}
# Paths are taken literally, as a shell passes them, and made absolute: a run may be resumed from another directory.
PATH_KEYS = ("data.path", "data.val_path", "data.tokenizer", "init_from", "model.path")
OUTPUT_KEYS = ("data.cache", "hydra.run.dir", "hydra.sweep.dir")  # folders that may not exist yet
TAGS_KEY = "run.tags"
TEXT_KEYS = ("run.name", "run.note", TAGS_KEY)  # text of the user, taken literally, too
SEARCHPATH_KEY, PLUGINS_KEY = "hydra.searchpath", "plugins"
RESUME_KEY = "resume="  # not a setting: names the run or sweep to continue
INTEGER_WITH_EXPONENT = re.compile(r"\d+(\.\d+)?e\+?\d+")  # 1e3
# key=value: no flag, no group@package, no interpolated key
STORED_OVERRIDE = re.compile(r"[+~]{0,2}(?!hydra=)[^\W\d][\w./+-]*=.*", re.DOTALL)
OWN_RESOLVER = re.compile(r"\$\{(repo|workspace):\}")  # folders of this program
RESOLVER = re.compile(r"\$\{[^}]*[:$]")  # ${oc.env:HOME}, ${oc.${x}:HOME}; ${train.max_steps} refers to a setting
ENV_RESOLVER = re.compile(r"\$\{oc\.env:(\w+)(?:, *([^{}]*))?\}")  # with a default: ${oc.env:SEED,42}
# groups whose options hold more than their name
NAMED_OPTIONS = ("optimizer", "schedule", "stage", "tracker")
RENAMED_SETTINGS = {  # former key, or key=value, and what replaces it
    "stage.rows": "stage.data_format",
    "stage.after": "stage.init_from_stage",
    "stage.prompts": "train.sample_prompts",
    "sweep.fix": "sweep.match_budget",
    "data.train_on": "data.loss_on",
    "data.shape": "data.schema",
    "data.packing=pack": "data.packing=best_fit",
    "train.activation_checkpointing=whole": "train.activation_checkpointing=full",
    "train.activation_checkpointing=true": "train.activation_checkpointing=full",
    "train.activation_checkpointing=false": "train.activation_checkpointing=none",
    "hydra/launcher=submitit_slurm": "hydra/launcher=submitit",
    "hydra/launcher=submitit_local": "hydra/launcher=submitit hydra.launcher.cluster=local",
    "hydra/launcher=joblib": "hydra/launcher=local hydra.launcher.workers=N",
    "hydra/launcher=basic": "hydra/launcher=local",
    "hydra/sweeper=basic": "hydra/sweeper=grid",
    "hydra.launcher.array_parallelism": "hydra.launcher.workers",
    "hydra.launcher.n_jobs": "hydra.launcher.workers",
    "hydra.sweeper.n_jobs": "hydra.launcher.workers",
    "hydra.launcher.ray.init.address": "hydra.launcher.address",
    "hydra.launcher.ray.remote.num_cpus": "hydra.launcher.num_cpus",
    "hydra.launcher.ray.remote.num_gpus": "hydra.launcher.num_gpus",
}
EQUIVALENT_SETTINGS = {  # setting or override, and its names in Hugging Face, LLaMA-Factory, axolotl and Lightning
    "optimizer.lr": "learning_rate",
    "optimizer.grad_clip": "max_grad_norm gradient_clip_val gradient_clipping",
    "optimizer": "optim",
    "schedule.warmup_steps=STEPS": "warmup_ratio",
    "schedule": "lr_scheduler lr_scheduler_type",
    "precision=bf16": "bf16",
    "precision=fp16": "fp16",
    "precision": "mixed_precision torch_dtype dtype",
    "init_from": "model_name_or_path pretrained_model_name_or_path base_model model_name model_id",
    "data.path": "dataset datasets dataset_name train_file train_data train_path",
    "data.val_path": "eval_dataset validation_file",
    "data.max_length": "cutoff_len sequence_len max_seq_len max_seq_length block_size context_length",
    "hydra.run.dir": "output_dir default_root_dir save_dir",
    "resume": "resume_from_checkpoint ckpt_path",
    "tracker": "logger report_to",
    "train.epochs": "max_epochs",
    "train.max_steps": "num_steps max_iters",
    "train.accumulation_steps": "accumulate_grad_batches grad_accum",
    "train.save_every": "save_steps",
    "train.eval_every": "eval_steps val_check_interval",
    "train.log_every": "logging_steps log_every_n_steps",
    "train.keep_checkpoints": "save_total_limit save_top_k",
    "train.patience": "early_stopping early_stopping_patience",
    "train.activation_checkpointing=full": "gradient_checkpointing",
    "distributed=ddp distributed.nproc=RANKS": "devices num_processes",
    "stage=lora": "adapter finetuning_type use_lora use_peft",
    "stage=lora stage.lora.rank=RANK": "lora_r lora_rank",
    "stage=lora stage.lora.quantize=nf4 init_from=DIR": "load_in_4bit",
}
# read with --multirun only
SWEEP_PREFIXES = ("hydra/launcher", "hydra/sweeper", "hydra.launcher.", "hydra.sweeper.", "hydra.sweep.", "sweep.")


def key_of(override: str) -> str:
    """Return the key of an override, without the `+` or `~` before it."""
    return override.lstrip("+~").partition("=")[0]


def overrides_of(key: str, typed: Iterable[str]) -> list[str]:
    """Return the overrides of one setting."""
    return [override for override in typed if key_of(override) == key]


def take_resume(typed: list[str]) -> tuple[list[str], str | None]:
    """Return the overrides without `resume=`, and the run or sweep that the last one names; None for none, and for
    null.
    """
    given = [override for override in typed if override.startswith(RESUME_KEY)]
    name = QUOTED_ITEM.sub(r"\2", given[-1].removeprefix(RESUME_KEY)) if given else "null"
    return [override for override in typed if override not in given], None if name == "null" else name


def to_overrides(values: Mapping[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def is_hydra_override(override: str) -> bool:
    """Return whether an override configures Hydra and not the run."""
    return override.lstrip("+~").startswith(HYDRA_PREFIXES)


def is_storable(override: str) -> bool:
    """Return whether a file of a run or sweep may hold the override.

    A flag may execute a file, a resolver may read the environment.
    """
    is_override = STORED_OVERRIDE.fullmatch(override) is not None
    return is_override and (is_hydra_override(override) or RESOLVER.search(OWN_RESOLVER.sub("", override)) is None)


def is_override_list(value: object) -> bool:
    """Return whether what a file holds is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def check_stored(stored: Iterable[str], path: Path, is_allowed: Callable[[str], bool] = is_storable) -> None:
    """Raise UserError unless `path` may hold all overrides read from it: called by whatever reads them, before anything
    uses them.
    """
    refused = next((override for override in stored if not is_allowed(override)), None)
    if refused is not None:  # it may be empty
        fix = "remove the override from the file, and type it with resume= if you need it"
        raise UserError(f"{path.name} holds an override that it may not hold", f"{path}: {refused}", fix)


def normalize_values(typed: Iterable[str]) -> list[str]:
    """Return the overrides as Hydra takes them: `train.max_steps=1e3` as `train.max_steps=1000`, because it parses 1e3
    as a float; without `experiment=null`, the default, because it takes no null for a group.
    """
    schema, normalized = config_schema(), list[str]()
    for override in typed:
        if override == "experiment=null":
            normalized = [each for each in normalized if not each.startswith("experiment=")]
            continue
        key, equals, value = override.partition("=")
        if schema.get(key) is int:
            values = [
                str(int(float(part))) if INTEGER_WITH_EXPONENT.fullmatch(part) and float(part).is_integer() else part
                for part in value.split(",")
            ]
            override = key + equals + ",".join(values)
        normalized.append(override)
    return normalized


def canonical_value(key: str, value: str) -> object:
    """Return an object that is equal for two spellings of one value: 0 and 0.0 of a number, 1 and 01 of an integer."""
    kind = config_schema().get(key)
    try:
        return kind(value) if kind in (int, float) else value
    except ValueError:  # refused by the composition
        return value


def check_overrides(typed: list[str], conf: Path = CONF_DIR) -> None:
    """Raise UserError for an override that no setting reads. Hydra accepts `+train.typo=1` silently."""
    groups, settings = config_groups(*config_dirs(typed, conf)), config_schema()
    for override in typed:
        key, value = key_of(override), override.partition("=")[2]
        if override.startswith("~"):
            fix = f"leave it out, or set another value: {key}={' or '.join(groups.get(key, ['<value>']))}"
            raise UserError("a setting cannot be deleted", override, fix)
        if "=" not in override:
            raise UserError(
                "an override is written key=value", override, f"{override}=<value>; --help lists the settings"
            )
        if key in HYDRA_KEYS_REFUSED:
            raise UserError(f"{key} cannot be set: {HYDRA_KEYS_REFUSED[key]}", override, "leave the override out")
        if key in ("hydra.run.dir", "hydra.sweep.dir") and not value:
            raise UserError(f"{key} must be a directory", override, f"{key}=DIR, or leave the override out")
        check_not_renamed(key, value)
        if is_hydra_override(override):
            continue
        if key not in groups and key not in settings:
            raise UserError(
                f"unknown setting {key}" if key else "an override begins with the name of a setting",
                key or override,
                nearest_key(key),
            )
        # a group of the user's own is added with +
        if override.startswith("+") and (key not in groups or key in config_groups()):
            raise UserError(f"{key} exists, an override of it has no +", override, override.lstrip("+"))
        if not is_storable(override):
            raise UserError(
                "a run stores its overrides, without a resolver other than ${oc.env:NAME} of a variable that is set",
                override,
                f"{key}=<value>, or set the variable: export NAME=<value>",
            )
        if key in groups:
            _check_options(key, value, groups[key])
        group, _, last = key.rpartition(".")
        if last == "name" and group in NAMED_OPTIONS and value.split(",")[0] in groups[group]:
            raise UserError(f"{key} is one of several settings of an option", override, f"{group}={value}")


def is_branch(typed: list[str]) -> bool:
    """Return whether a run continues the state of another one: `runner/launch/branch.py`. Raises UserError."""
    given = overrides_of("keep", typed)
    if several := next((override for override in given if "," in override), None):
        raise UserError("keep takes one value", several, "keep=optimizer, or leave it out")
    is_branch = given[-1:] == ["keep=optimizer"]
    budget = (overrides_of("sweep.budget", typed) or ["sweep.budget=null"])[-1]
    if is_branch and budget != "sweep.budget=null":  # planning a budget starts before any config is checked
        fix = "leave it out; hydra/sweeper=halving alone stops the worse branches"
        raise UserError("sweep.budget adds seeds, and a branch has the seed of its trunk", budget, fix)
    return is_branch


def check_single_run(typed: list[str]) -> None:
    """Raise UserError for an override that only a sweep reads."""
    if override := next((override for override in typed if key_of(override).startswith(SWEEP_PREFIXES)), None):
        raise UserError(
            f"{key_of(override)} is read in a sweep only", override, "add --multirun, or leave the override out"
        )


def check_not_renamed(key: str, value: str) -> None:
    """Raise UserError with the new name for a setting, or a value, that had another name in an earlier version."""
    for part in (key, *(f"{key}={part}" for part in value.split(","))):
        if new := RENAMED_SETTINGS.get(part):
            raise UserError(f"{part} is now called {new}", f"{key}={value}", new if "=" in new else f"{new}={value}")


def _check_options(group: str, value: str, options: list[str]) -> None:
    if value.startswith("["):
        first, *others = value.strip("[]").split(",")
        fix = (
            f"tracker={first} 'tracker.also=[{','.join(others)}]'"
            if group == "tracker" and others
            else f"{group}={first}"
        )
        raise UserError(f"{group} takes the name of one option, got a list", f"{group}={value}", fix)
    for option in value.split(","):
        if option.strip() not in options and not (group == "experiment" and option == "null") and "(" not in value:
            raise unknown_option(group, option, f"{group}={option}", options)


def nearest_key(key: str) -> str:
    """Return a hint with the known key that has the same last part (lr: optimizer.lr), otherwise the one spelled most
    similarly.
    """
    section, _, last = key.rpartition(".")
    same = [known for known in config_schema() if known.rpartition(".")[2] == last]
    same += [known for known, names in EQUIVALENT_SETTINGS.items() if last in names.split()]
    siblings = [
        known.rpartition(".")[2] for known in config_schema() if section and known.rpartition(".")[0] == section
    ]
    beginning = [f"{section}.{name}" for name in siblings if name.startswith(last)]
    if nearest := same[:1] or (beginning if len(beginning) <= 2 else []):  # stage.lora.r: stage.lora.rank
        return f"did you mean {' or '.join(nearest)}?"
    if siblings and not difflib.get_close_matches(last, siblings, 1):
        return (
            f"{section} has {', '.join(siblings)}"
            if len(siblings) < 10
            else f"--cfg=job --package={section} prints the settings of {section}"
        )
    return did_you_mean(
        key, [*config_schema(), *config_groups()], "--help lists the settings, --cfg=job all of them with their values"
    )


def add_config_dir(typed: list[str], folder: str | None) -> list[str]:
    """Return the overrides with the folder of `--config-dir` in hydra.searchpath, whose folders become absolute
    `file://` URLs.
    """
    urls = [_config_dir_url(url) for url in [*([folder] if folder else []), *_values_of(SEARCHPATH_KEY, typed)]]
    return [
        *(override for override in typed if key_of(override) != SEARCHPATH_KEY),
        f"{SEARCHPATH_KEY}=[{','.join(map(hydra_quote, urls))}]",
    ]


def config_dirs(typed: list[str], conf: Path = CONF_DIR) -> list[Path]:
    """Return the folders that hold config groups, in Hydra's order: `conf` and those of hydra.searchpath."""
    dirs = [conf]
    for url in _values_of(SEARCHPATH_KEY, typed):
        scheme, _, location = url.rpartition("://")
        if scheme == "pkg":
            package, *parts = location.split("/")
            try:
                spec = importlib.util.find_spec(package)
            except (ImportError, ValueError):  # the package before the dot is not installed, or the name is empty
                continue
            dirs += [Path(root, *parts) for root in spec.submodule_search_locations or ()] if spec else []
        else:
            dirs.append(Path(location))
    return [folder for folder in dirs if folder.is_dir()]


def _values_of(key: str, typed: list[str]) -> list[str]:
    """Return the values of the last override of a setting that is a list of strings."""
    given = overrides_of(key, typed)
    value = parse_value(given[-1]) if given else []
    if not isinstance(value, list) and key == SEARCHPATH_KEY and not hasattr(value, "list"):
        value = [value]  # Hydra, too, takes one folder
    if not isinstance(value, list):
        text = given[-1].partition("=")[2] if value else ""
        raise UserError(f"{key} must be a list", given[-1], f"{key}=[{text}]")
    return [str(getattr(item, "text", item)) for item in value]


def _config_dir_url(name: str) -> str:
    is_package = name.startswith("pkg://")
    folder = Path(name.removeprefix("file://")).expanduser().absolute()
    if not (config_dirs([f"{SEARCHPATH_KEY}=[{quote_path(name)}]"])[1:] if is_package else folder.is_dir()):
        raise UserError(
            f"the folder of config groups {name} does not exist",
            f"{SEARCHPATH_KEY}=[{name}]",
            "--config-dir=DIR, where DIR holds e.g. model/mine.yaml",
        )
    return name if is_package else f"file://{folder}"


def plugins_of(typed: list[str]) -> list[str]:
    """Return the plugins that the overrides name, as `locate_plugin` does."""
    return [locate_plugin(name) for name in _values_of(PLUGINS_KEY, typed)]


def literal_text(override: str) -> str:
    """Return `run.note=what's new (part 2), and why` quoted for Hydra.

    Of a name, commas separate the values of a sweep; one tag is a list of one.
    """
    key, _, value = override.partition("=")
    if "${" in value:
        raise UserError(f"{key} is text and takes no interpolation", override, "write it without ${")
    if value in ("", "null") or value.startswith(("[", "choice(")) or QUOTED_ITEM.match(value):
        return override
    if "," in value and key != "run.note":
        return override
    return f"{key}=[{hydra_quote(value)}]" if key == TAGS_KEY else f"{key}={hydra_quote(value)}"


def absolutize_path(override: str) -> str:
    """Return the override with absolute paths, and with names and text of the user quoted for Hydra."""
    key = override.partition("=")[0]
    if key == PLUGINS_KEY:
        return f"{PLUGINS_KEY}=[{','.join(map(quote_path, plugins_of([override])))}]"
    if key == COLUMNS_KEY:
        return quote_columns(override)
    if key in OUTPUT_KEYS:
        return literal_output(override)
    if key in TEXT_KEYS:
        return literal_text(override)
    return literal_path(override) if key in PATH_KEYS else override


def prepare_overrides(typed: list[str], config_dir: str | None = None) -> list[str]:
    """Return the overrides of a command line as Hydra takes them, and import the plugins that they name.

    Paths are absolute then, and environment variables are replaced by their values. Hydra resolves those of its own
    settings, which files of a run hold as they are typed: a value may be secret. `config_dir`: --config-dir.
    """
    if config_dir is not None or overrides_of(SEARCHPATH_KEY, typed):
        typed = add_config_dir(typed, config_dir)
    for number, override in enumerate(typed):
        values = list(itertools.takewhile(lambda value: "=" not in value, typed[number + 1 :]))
        if override.endswith(",") and values:
            where = shlex.join([override, *values])
            raise UserError(
                "a space after a comma ends the values of a sweep", where, shlex.quote(override + "".join(values))
            )
    typed = [
        absolutize_path(
            override
            if is_hydra_override(override) and key_of(override) not in OUTPUT_KEYS
            else ENV_RESOLVER.sub(lambda name: os.environ.get(name[1], name[2] or name[0]), override)
        )
        for override in typed
    ]
    import_plugins(plugins_of(typed))
    return normalize_values(typed)
