"""GGUF file for llama.cpp."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import UserError
from runner.inference.export.command import FORMATS, ExportSettings
from runner.inference.load import LoadedModel


@FORMATS.register("gguf")
def write_gguf_format(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Callable[[], str]:
    """model.gguf for llama.cpp and Ollama; an adapter is merged."""
    from models.lora import merge_adapters
    from runner.inference.export import gguf_file

    merge_adapters(source.model)
    path = folder / "model.gguf"
    if cfg.converter:
        return _convert(cfg, source, path)
    try:
        tensors = gguf_file.write_gguf(path, source.model, source.tokenizer, cfg.dtype, source.folder.name)
    except ModuleNotFoundError as error:
        raise UserError("format=gguf needs the package gguf", "format=gguf", 'pip install "lm-runner[gguf]", or pip install gguf') from error

    def verify() -> str:
        difference = gguf_file.largest_tensor_error(path, tensors)
        limit = gguf_file.ROUNDING[cfg.dtype]
        if not difference <= limit:
            raise UserError(
                f"a tensor of model.gguf differs by {difference:.2g} of its largest value, rounding to {cfg.dtype} by {limit:.0e}",
                f"to={cfg.to}",
                "report this",
            )
        return f"read again: {len(tensors)} tensors, largest difference {difference:.1g} of a tensor's largest value"

    return verify


def _convert(cfg: ExportSettings, source: LoadedModel, path: Path) -> Callable[[], str]:
    """Write a Hugging Face folder beside `path` and let llama.cpp's converter read it; the user names that program, so it is trusted."""
    from models.formats.save import save_model

    with TemporaryDirectory(dir=path.parent) as folder:
        save_model(Path(folder), source.model, source.model.cfg, source.tokenizer.folder, source.tokenizer.stop_ids)
        kind = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(cfg.dtype, cfg.dtype)
        command = [sys.executable, str(cfg.converter), folder, "--outfile", str(path), "--outtype", kind]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise UserError(f"the converter failed: {last}", f"converter={cfg.converter}", "format=hf, then convert the folder yourself")
    return lambda: "written by the converter, not compared"
