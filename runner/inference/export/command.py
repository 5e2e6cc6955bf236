"""export.py: write a trained model for other programs, read it again, and compare.

A failed comparison leaves nothing.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from common.errors import UserError, print_safely
from common.filesystem import read_json_object, sync_path, sync_tree
from common.registry import Registry
from common.settings import check_choice
from runner.inference.export.model_card import ModelFacts, usage_lines, write_model_card
from runner.inference.load import checkpoint_dir, load_trained, run_of_checkpoint
from runner.tracking.progress import PolledProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.inference.load import LoadedModel

DTYPES = ("float32", "bfloat16", "float16", "q8_0")
SHORT_DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
SHARD_SIZE = re.compile(r"\d+(\.\d+)?(KB|MB|GB|TB)")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")  # as the hub writes them
HUB_REPO = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)

FORMATS: Registry[Callable[[ExportSettings, LoadedModel, Path], Callable[[], list[str]]]] = Registry(
    "format", "runner.inference.export.formats"
)


@dataclass
class ExportSettings:
    # run directory (the weights in its model/), RUN/checkpoints/step-N, best or latest, Hugging Face or PEFT folder,
    # sweep (its best job), or last
    run: str
    to: str  # folder to write; it must not exist
    # hf, merged (an adapter added to its base model), peft (an adapter), gguf (llama.cpp, Ollama) or minimind (.pth)
    format: str
    dtype: str  # of the weights: float32 (fp32), bfloat16 (bf16) or float16 (fp16); gguf: q8_0 too
    max_shard_size: str  # largest file of weights, e.g. 5GB; hf and merged
    license: Optional[str]  # licence identifier for the model card, e.g. apache-2.0; null: the card names none
    # peft: name on the hub that the adapter gives its base model, e.g. me/my-model; null: the path here
    base_model: Optional[str]
    # gguf: path of llama.cpp's convert_hf_to_gguf.py, for models that this program does not write itself
    converter: Optional[str]
    verify: bool  # read the files again and compare them with the model

    REGISTRIES = {"format": FORMATS}

    def __post_init__(self) -> None:
        FORMATS.get(self.format)
        self.dtype = SHORT_DTYPES.get(self.dtype, self.dtype)
        check_choice("dtype", self.dtype, DTYPES if self.format == "gguf" else DTYPES[:3])
        if not SHARD_SIZE.fullmatch(self.max_shard_size) or float(self.max_shard_size[:-2]) == 0:
            message = f"max_shard_size must be a number above 0 with KB, MB, GB or TB, got {self.max_shard_size}"
            raise UserError(message, f"max_shard_size={self.max_shard_size}", "e.g. max_shard_size=5GB")
        if self.license and not LICENSE.fullmatch(self.license):
            raise UserError(
                f"license must be an identifier of small letters, digits and .+-, got {self.license}",
                f"license={self.license}",
                "license=apache-2.0",
            )
        if self.base_model and (self.format != "peft" or not HUB_REPO.fullmatch(self.base_model)):
            problem = "is no name of a model on the hub" if self.format == "peft" else "is read by format=peft only"
            raise UserError(
                f"base_model {problem}", f"base_model={self.base_model}", "format=peft base_model=OWNER/NAME"
            )
        if self.converter and (self.format != "gguf" or not Path(self.converter).is_file()):
            problem = "is no file" if self.format == "gguf" else "is read by format=gguf only"
            raise UserError(
                f"converter {problem}",
                f"converter={self.converter}",
                "format=gguf converter=PATH/convert_hf_to_gguf.py",
            )


def export(cfg: ExportSettings, folder: Path) -> None:
    """Write the model in `folder` to cfg.to, print what was compared.

    Raises UserError if it cannot be written so, or if the comparison fails.
    """
    target = Path(cfg.to).expanduser().absolute()
    check_target(target, cfg.to, folder)
    with PolledProgress("reading the weights"):
        source = load_trained(folder, "cpu")
    run = run_of_checkpoint(checkpoint_dir(folder)) or (
        folder.parent if folder.name == "model" and (folder.parent / "run.json").is_file() else folder
    )
    facts = ModelFacts.collect(
        source, read_json_object(run / "run.json"), run, cfg.format, cfg.dtype, cfg.license, cfg.base_model
    )
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    temporary.mkdir()
    try:
        with PolledProgress(f"writing {target.name}"):
            verify = FORMATS.get(cfg.format)(cfg, source, temporary)
        with PolledProgress("comparing"):
            results = verify() if cfg.verify else ["not compared (verify=false)"]
        if cfg.base_model:
            _name_base_model(temporary, cfg.base_model)
        write_model_card(temporary, facts, target.name)
        with PolledProgress("saving to the disk"):
            sync_tree(temporary)
        temporary.rename(target)
        sync_path(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    files = sorted(path for path in target.rglob("*") if path.is_file())
    print_safely(
        f"{target}: {cfg.format}, {cfg.dtype}, {len(files)} files, {sum(path.stat().st_size for path in files):,} bytes"
    )
    print_safely("\n".join(f"  {result}" for result in results))
    print_safely("\n".join(f"  use: {line}" for line in usage_lines(facts, target)))


def check_target(target: Path, typed: str, source: Path) -> None:
    """Raise UserError unless `target` can be created as a new folder outside of the run, sweep or model that is
    exported.
    """
    if os.path.lexists(target):  # a broken link, too
        raise UserError("the folder to write exists", f"to={typed}", "give a folder that does not exist")
    if not target.parent.is_dir():
        raise UserError(
            f"{target.parent} is no folder", f"to={typed}", f"mkdir -p {target.parent}, or choose another folder"
        )
    parents = (target.parent.resolve(), *target.parent.resolve().parents)
    if source.resolve() in parents or any(
        (parent / name).is_file() for parent in parents for name in ("run.json", "sweep.json")
    ):
        raise UserError(
            "the folder to write is inside of a run, a sweep or the model that is exported",
            f"to={typed}",
            "choose a folder outside of it",
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UserError(
            f"{target.parent} cannot be written to", f"to={typed}", "choose another folder, or change its permissions"
        )


def _name_base_model(folder: Path, name: str) -> None:
    from models.formats.json_files import read_json_file, write_json_file

    path = folder / "adapter_config.json"
    write_json_file(path, read_json_file(path) | {"base_model_name_or_path": name, "revision": None})
