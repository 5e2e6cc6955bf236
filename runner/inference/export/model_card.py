"""README.md of an exported model: the card that the Hugging Face hub shows, with what run.json knows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.errors import strip_control
from common.paths import command_line

if TYPE_CHECKING:
    from models.config import ModelConfig
    from runner.inference.export.command import ExportConfig

USAGE = {
    "gguf": "llama-cli -m model.gguf\n\nor, with a `Modelfile` of the line `FROM ./model.gguf`: `ollama create my-model && ollama run my-model`",
    "peft": 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "FOLDER")',
    "minimind": "put model.pth into MiniMind's out/ under the name that its scripts expect",
}
DEFAULT_USAGE = 'AutoModelForCausalLM.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")'


def write_model_card(target: Path, model: ModelConfig, run: Mapping[str, Any], source: Path, cfg: ExportConfig) -> None:
    """Write README.md. `run`: the content of run.json, {} for a folder without a run."""
    header: dict[str, Any] = {"library_name": {"peft": "peft", "gguf": "gguf"}.get(cfg.format, "transformers"), "pipeline_tag": "text-generation"}
    if cfg.license:
        header["license"] = cfg.license
    lines = [f"# {source.name}", "", *_facts(model, run, cfg), "", "## Use", "", USAGE.get(cfg.format, f"    {DEFAULT_USAGE}"), ""]
    lines += [
        "## Command",
        "",
        f"    {shlex.join([*command_line('export'), f'run={source.name}', f'to={Path(cfg.to).name}', f'format={cfg.format}', f'dtype={cfg.dtype}'])}",
        "",
    ]
    text = f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n" + strip_control("\n".join(lines))
    (target / "README.md").write_text(text, encoding="utf-8")


def _facts(model: ModelConfig, run: Mapping[str, Any], cfg: ExportConfig) -> list[str]:
    """Return the rows of a table."""
    exported = run.get("export") if isinstance(run.get("export"), dict) else {}
    files = [entry for entry in run.get("data") or () if isinstance(entry, dict)] if isinstance(run.get("data"), list) else []
    facts = {
        "model": f"{model.name}, {model.num_hidden_layers} layers, vocabulary of {model.vocab_size:,} tokens",
        "weights": f"{exported.get('weights')}, step {exported.get('step')}, evaluation loss {exported.get('loss')}" if exported else None,
        "stage": run.get("stage"),
        "started from": Path(str(run["init_from"])).name if run.get("init_from") else None,
        "steps": run.get("step"),
        "tokens": run.get("tokens"),
        "data": ", ".join(f"{Path(str(entry.get('file'))).name} ({entry.get('kept')} rows, {entry.get('tokens')} tokens)" for entry in files) or None,
        "metrics": json.dumps(run["metrics"]) if isinstance(run.get("metrics"), dict) else None,
        "licence": cfg.license or "not given",
        "dtype": cfg.dtype,
    }
    rows = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in facts.items() if value is not None]
    return ["| | |", "|---|---|", *rows]
