"""The pages of --help, from docstrings, YAML files and the comments of the settings' dataclasses."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common.paths import CONF_DIR, REPO_ROOT, with_typed_commands
from common.settings import as_typed, field_comments, flat_settings
from data.schemas.registry import STAGE_OF_FORMAT, schemas_of
from runner.config.schema import config_groups, strip_optional
from runner.engine.config import Config

COMMON_SETTINGS = {  # key: placeholder of its value
    "data.path": "FILE",
    "data.max_length": "N",
    "data.packing": "KIND",
    "train.batch_size": "N",
    "train.accumulation_steps": "N",
    "train.epochs": "N",
    "train.max_steps": "N",
    "train.eval_every": "N",
    "optimizer.lr": "X",
    "distributed.nproc": "N",
    "init_from": "DIR",
    "resume": "DIR",
    "plugins": "[MODULE]",
}
EXAMPLES = (
    "python runner/train.py",
    "python runner/train.py stage=sft precision=bf16",
    "python runner/train.py --multirun optimizer.lr=1e-4,5e-4 train.accumulation_steps=1,4",
    "torchrun --nproc-per-node=2 runner/train.py distributed=ddp",
    "python runner/train.py experiment=minimind_pretrain data.path=my.jsonl",
    "python runner/train.py --config-dir my_conf model=my_model",
    "python runner/train.py stage=dpo --cfg job",
)
TRAIN_FLAGS = (
    ("--multirun, -m", "train once with each combination of comma-separated values"),
    ("--config-dir DIR", "add the config groups in DIR, e.g. DIR/model/my_model.yaml"),
    ("--cfg job", "print the composed config and exit"),
    ("--hydra-help", "print Hydra's own flags"),
)
SUBCOMMAND_FLAGS = (
    ("--cfg job", "print the settings with their values and exit"),
    ("--hydra-help", "print Hydra's own flags"),
)


def command_docs() -> dict[str, str]:
    """Return the docstring of each command: every file in runner/ is one."""
    files = sorted(file for file in (REPO_ROOT / "runner").glob("*.py") if file.stem != "__init__")
    return {file.stem: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in files}


def train_help(config_dirs: Sequence[Path]) -> str:
    """Return the page of train.py; `config_dirs` hold the config groups."""
    comments = _comments(Config)
    settings = [(f"{key}={value}", comments.get(key, "")) for key, value in COMMON_SETTINGS.items()]
    pages = [
        "Train a small language model: python runner/train.py [group=option ...] [key=value ...]",
        _two_columns(
            "Commands (each has its own --help)",
            [(f"{name}.py", doc.partition(": `")[0].partition("\n")[0]) for name, doc in command_docs().items()],
        ),
        _two_columns(
            "Config groups", [(f"{name}=", " ".join(options)) for name, options in config_groups(*config_dirs).items()]
        ),
        _two_columns(
            "Row schemas of data files, detected unless data.schema is given",
            [(name, ", ".join(schema.name for schema in schemas_of(name))) for name in STAGE_OF_FORMAT],
        ),
        _two_columns(
            "Most-used settings (all of them, with their values: --cfg job)",
            [*settings, ("hydra.run.dir=DIR", "run directory")],
        ),
        "Examples\n" + "\n".join(f"  {line}" for line in EXAMPLES),
        _two_columns("Flags", TRAIN_FLAGS),
    ]
    return with_typed_commands("\n\n".join(pages))


def subcommand_help(name: str, schema: type, with_train_config: bool) -> str:
    """Return the page of a command beside train.py: its docstring, and its settings with their default values and
    comments.
    """
    comments = _comments(schema)
    comments |= {
        key: f"{comments[key]}: {', '.join(registry.names())}"
        for key, registry in getattr(schema, "REGISTRIES", {}).items()
    }
    settings = [
        (f"{key}={'...' if value == '???' else as_typed(value)}", comments.get(key, ""))
        for key, value in default_settings(name).items()
    ]
    flags = (
        "Every setting of train.py may be given, too: python runner/train.py --help"
        if with_train_config
        else _two_columns("Flags", SUBCOMMAND_FLAGS)
    )
    pages = [
        command_docs()[name].replace("`", ""),
        _two_columns("Settings and their defaults; one with ... must be given", settings),
        flags,
    ]
    return with_typed_commands("\n\n".join(pages))


def default_settings(name: str) -> dict[str, Any]:
    """Return the settings in conf/<name>.yaml by their dotted keys."""
    return dict(flat_settings(OmegaConf.to_container(OmegaConf.load(CONF_DIR / f"{name}.yaml"))))


def _comments(config_class: type, prefix: str = "") -> dict[str, str]:
    """Return the comments of all settings below `config_class` by their dotted keys."""
    comments = {prefix + name: comment for name, comment in field_comments(config_class).items()}
    for name, kind in typing.get_type_hints(config_class).items():
        if is_dataclass(inner := strip_optional(kind)):
            comments |= _comments(typing.cast(type, inner), f"{prefix}{name}.")
    return comments


def _two_columns(title: str, lines: Iterable[tuple[str, str]]) -> str:
    rows = list(lines)
    width = max(len(name) for name, _ in rows)
    return f"{title}\n" + "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in rows)
