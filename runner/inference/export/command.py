"""export.py: write a trained model for other programs, read it again, and compare. A failed comparison leaves nothing."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from common.errors import UserError
from common.filesystem import read_json_object, sync_path, sync_tree
from common.registry import Registry
from common.settings import check_choice
from runner.inference.export.model_card import write_model_card
from runner.inference.load import load_trained

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.inference.load import LoadedModel

DTYPES = ("float32", "bfloat16", "float16", "q8_0")
SHARD_SIZE = re.compile(r"\d+(\.\d+)?(KB|MB|GB|TB)")

FORMATS: Registry[Callable[[ExportSettings, LoadedModel, Path], Callable[[], str]]] = Registry("format", "runner.inference.export.formats")


@dataclass
class ExportSettings:
    run: str  # run directory (the weights in its model/), Hugging Face or PEFT folder, sweep (its best job), or last: the newest run
    to: str  # folder to write; it must not exist
    format: str  # hf, merged (an adapter added to its base model), peft (an adapter), gguf (llama.cpp, Ollama) or minimind (.pth)
    dtype: str  # of the weights: float32, bfloat16 or float16; gguf: q8_0 too
    shard_size: str  # largest file of weights, e.g. 5GB; hf and merged
    license: Optional[str]  # licence identifier for the model card, e.g. apache-2.0; null: the card names none
    converter: Optional[str]  # gguf: path of llama.cpp's convert_hf_to_gguf.py, for models that this program does not write itself
    verify: bool  # read the files again and compare them with the model

    REGISTRIES = {"format": FORMATS}

    def __post_init__(self) -> None:
        FORMATS.get(self.format)
        check_choice("dtype", self.dtype, DTYPES if self.format == "gguf" else DTYPES[:3])
        if not SHARD_SIZE.fullmatch(self.shard_size):
            raise UserError(f"shard_size must be a number with KB, MB, GB or TB, got {self.shard_size}", f"shard_size={self.shard_size}", "e.g. shard_size=5GB")
        if self.converter and (self.format != "gguf" or not Path(self.converter).is_file()):
            problem = "is no file" if self.format == "gguf" else "is read by format=gguf only"
            raise UserError(f"converter {problem}", f"converter={self.converter}", "format=gguf converter=PATH/convert_hf_to_gguf.py")


def export(cfg: ExportSettings, folder: Path) -> None:
    """Write the model in `folder` to cfg.to, print what was compared. Raises UserError if it cannot be written so, or if the comparison fails."""
    target = Path(cfg.to).absolute()
    if target.exists():
        raise UserError("the folder to write exists", f"to={cfg.to}", "give a folder that does not exist")
    if not target.parent.is_dir():
        raise UserError(f"{target.parent} is no folder", f"to={cfg.to}", "create it first, or choose another folder")
    source = load_trained(folder, "cpu")
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    temporary.mkdir()
    try:
        verify = FORMATS.get(cfg.format)(cfg, source, temporary)
        write_model_card(temporary, source.model.cfg, read_json_object(folder / "run.json"), folder.name, cfg.format, cfg.dtype, cfg.license)
        result = verify() if cfg.verify else "not compared (verify=false)"
        sync_tree(temporary)
        temporary.rename(target)
        sync_path(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    files = sorted(path for path in target.rglob("*") if path.is_file())
    print(f"{target}: {cfg.format}, {cfg.dtype}, {len(files)} files, {sum(path.stat().st_size for path in files):,} bytes; {result}")
