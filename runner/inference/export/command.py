"""export.py: write a trained model for other programs, read it again, and compare.

A failed comparison leaves nothing.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from common.errors import UserError, print_safely
from common.filesystem import sync_path, sync_tree
from runner.inference.export.formats import FORMATS, ExportSettings
from runner.inference.export.model_card import model_card, usage_lines
from runner.inference.load import load_trained
from runner.run_dir.metadata import RunMetadata
from runner.tracking.progress import PolledProgress


def export(cfg: ExportSettings, folder: Path) -> None:
    """Write the model in `folder` to cfg.to, print what was compared.

    Raises UserError if it cannot be written so, or if the comparison fails.
    """
    target = Path(cfg.to).expanduser().absolute()
    check_target(target, cfg.to, folder)
    with PolledProgress("reading the weights"):
        source = load_trained(folder, "cpu")
    run = folder.parent if folder.name == "model" and RunMetadata.read(folder.parent) else source.run_dir
    card = model_card(cfg, source, RunMetadata.read(run), run, target.name)
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    temporary.mkdir()
    try:
        with PolledProgress(f"writing {target.name}"):
            verify = FORMATS.get(cfg.format)(cfg, source, temporary)
        with PolledProgress("comparing"):
            results = verify() if cfg.verify else ["not compared (verify=false)"]
        if cfg.base_model:
            _name_base_model(temporary, cfg.base_model)
        (temporary / "README.md").write_text(card, encoding="utf-8")
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
    print_safely("\n".join(f"  use: {line}" for line in usage_lines(cfg.format, target)))


def check_target(target: Path, to: str, source: Path) -> None:
    """Raise UserError unless `target` can be created as a new folder outside of the run, sweep or model that is
    exported.
    """
    if os.path.lexists(target):  # a broken link, too
        raise UserError("the folder to write exists", f"to={to}", "give a folder that does not exist")
    if not target.parent.is_dir():
        raise UserError(
            f"{target.parent} is no folder", f"to={to}", f"mkdir -p {target.parent}, or choose another folder"
        )
    parents = (target.parent.resolve(), *target.parent.resolve().parents)
    if source.resolve() in parents or any(
        (parent / name).is_file() for parent in parents for name in ("run.json", "sweep.json")
    ):
        raise UserError(
            "the folder to write is inside of a run, a sweep or the model that is exported",
            f"to={to}",
            "choose a folder outside of it",
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UserError(
            f"{target.parent} cannot be written to", f"to={to}", "choose another folder, or change its permissions"
        )


def _name_base_model(folder: Path, name: str) -> None:
    from models.formats.json_files import read_json_file, write_json_file

    path = folder / "adapter_config.json"
    write_json_file(path, read_json_file(path) | {"base_model_name_or_path": name, "revision": None})
