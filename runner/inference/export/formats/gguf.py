"""GGUF file for llama.cpp."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import UserError
from runner.inference.export.command import FORMATS, ExportSettings
from runner.inference.export.verify import model_class_of
from runner.inference.load import LoadedModel

CONVERTER_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # --outtype of convert_hf_to_gguf.py

MAX_SUM_ERROR = 1e-6  # relative; of sums over all weights in another order


@FORMATS.register("gguf")
def write_gguf_format(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Callable[[], list[str]]:
    """model.gguf for llama.cpp, and a Modelfile for Ollama; an adapter is merged."""
    try:
        from runner.inference.export import gguf_file, gguf_tokenizer
    except ModuleNotFoundError as error:
        raise UserError(
            "format=gguf needs the package gguf", "format=gguf", 'pip install "lm-runner[gguf]", or pip install gguf'
        ) from error
    from models.lora import merge_adapters

    merge_adapters(source.model)
    path = folder / "model.gguf"
    (folder / "Modelfile").write_text(gguf_tokenizer.modelfile(source), encoding="utf-8")
    if cfg.converter:
        _convert(cfg, source, path)
        return lambda: [check_converted(cfg, source, path)]
    tensors = gguf_file.write_gguf(path, source, cfg.dtype, Path(cfg.to).name)

    def verify() -> list[str]:
        difference = gguf_file.largest_tensor_error(path, tensors)
        limit = gguf_file.ROUNDING[cfg.dtype]
        if not difference <= limit:
            raise UserError(
                f"a tensor of model.gguf differs by {difference:.2g} of its largest value, rounding to {cfg.dtype} by {limit:.0e}",
                f"to={cfg.to}",
                "report this",
            )
        return [
            f"read again: {len(tensors)} tensors, largest difference {difference:.1g} of a tensor's largest value",
            *gguf_tokenizer.limits(source.tokenizer),
        ]

    return verify


def _convert(cfg: ExportSettings, source: LoadedModel, path: Path) -> None:
    """Write a Hugging Face folder beside `path` and let llama.cpp's converter read it; the user names that program, so
    it is trusted.
    """
    from models.formats.save import save_model
    from runner.inference.export.gguf_tokenizer import GENERATION_TAGS
    from runner.inference.export.hf_compatibility import make_readable_by_transformers_4

    with TemporaryDirectory(dir=path.parent) as temporary:
        folder = Path(temporary)
        save_model(folder, source.model, source.model.cfg, source.tokenizer.folder, source.tokenizer.stop_ids)
        if (template := folder / "chat_template.jinja").exists():
            template.write_text(GENERATION_TAGS.sub("", source.tokenizer.chat_template or ""), encoding="utf-8")
        make_readable_by_transformers_4(folder, model_class_of(source))
        command = [
            sys.executable,
            str(cfg.converter),
            temporary,
            "--outfile",
            str(path),
            "--outtype",
            CONVERTER_DTYPES.get(cfg.dtype, cfg.dtype),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode or not path.is_file():
        last = next(
            (line for line in reversed(done.stderr.splitlines()) if line.strip()), "it wrote no file and no message"
        )
        raise UserError(
            f"the converter failed: {last}",
            f"converter={cfg.converter}",
            "format=hf, then convert the folder yourself to see all of its output",
        )


def check_converted(cfg: ExportSettings, source: LoadedModel, path: Path) -> str:
    """Compare what does not depend on how a converter names, splits and orders the weights.

    Raises UserError.
    """
    from runner.inference.export import gguf_file

    difference, tokens = gguf_file.norm_difference_and_tokens(path, source.model)
    if not difference <= max(gguf_file.ROUNDING[cfg.dtype], MAX_SUM_ERROR):
        message = f"the norm of all matrices that the converter wrote differs by {difference:.2g} of that of the model"
        raise UserError(
            message, f"converter={cfg.converter}", "use the converter of a newer llama.cpp; verify=false keeps the file"
        )
    own = {
        token: number
        for token, number in source.tokenizer.token_ids().items()
        if token not in source.tokenizer.control_ids
    }
    if wrong := [token for token, number in own.items() if number >= len(tokens) or tokens[number] != token]:
        message = f"{len(wrong)} tokens of model.gguf differ from those of the tokenizer, e.g. {min(wrong)!r}"
        raise UserError(
            message, f"converter={cfg.converter}", "use the converter of a newer llama.cpp; verify=false keeps the file"
        )
    return f"read again: {len(own)} tokens are those of the tokenizer; the norm of all matrices differs by {difference:.1g} of that of the model"
