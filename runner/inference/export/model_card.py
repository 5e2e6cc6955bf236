"""README.md of an exported model: the card that the Hugging Face hub shows, with what run.json knows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.errors import strip_control
from common.hub.names import hub_name_of
from common.paths import command_line

if TYPE_CHECKING:
    from models.config import ModelConfig

USAGE = {
    "gguf": "llama-cli -m model.gguf\n\nor, with a `Modelfile` of the line `FROM ./model.gguf`: `ollama create my-model && ollama run my-model`",
    "peft": 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "FOLDER")',
    "minimind": "put model.pth into MiniMind's out/ under the name that its scripts expect",
}
DEFAULT_USAGE = 'AutoModelForCausalLM.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")'


def write_model_card(target: Path, model: ModelConfig, run: Mapping[str, Any], name: str, kind: str, dtype: str, license: str | None) -> None:
    """Write README.md into `target`. `run`: the content of run.json, {} for a folder without a run; `name` of the model; `kind`: the format."""
    header: dict[str, Any] = {"library_name": {"peft": "peft", "gguf": "gguf"}.get(kind, "transformers"), "pipeline_tag": "text-generation"}
    if license:
        header["license"] = license
    lines = [f"# {name}", "", *_facts(model, run, dtype, license), "", "## Use", "", USAGE.get(kind, f"    {DEFAULT_USAGE}"), ""]
    lines += [
        "## Command",
        "",
        f"    {shlex.join([*command_line('export'), f'run={name}', 'to=FOLDER', f'format={kind}', f'dtype={dtype}'])}",
        "",
    ]
    text = f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n" + strip_control("\n".join(lines))
    (target / "README.md").write_text(text, encoding="utf-8")


def _facts(model: ModelConfig, run: Mapping[str, Any], dtype: str, license: str | None) -> list[str]:
    """Return the rows of a table."""
    exported = run.get("export") if isinstance(run.get("export"), dict) else {}
    files = [entry for entry in run.get("data") or () if isinstance(entry, dict)] if isinstance(run.get("data"), list) else []
    facts = {
        "model": f"{model.name}, {model.num_hidden_layers} layers, vocabulary of {model.vocab_size:,} tokens",
        "weights": f"{exported.get('weights')}, step {exported.get('step')}, evaluation loss {exported.get('loss')}" if exported else None,
        "stage": run.get("stage"),
        "started from": (hub_name_of(source := Path(str(run["init_from"]))) or source.name) if run.get("init_from") else None,
        "steps": run.get("step"),
        "tokens": run.get("tokens"),
        "data": ", ".join(f"{Path(str(entry.get('file'))).name} ({entry.get('kept')} rows, {entry.get('tokens')} tokens)" for entry in files) or None,
        "metrics": json.dumps(run["metrics"]) if isinstance(run.get("metrics"), dict) else None,
        "licence": license or "not given",
        "dtype": dtype,
    }
    rows = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in facts.items() if value is not None]
    return ["| | |", "|---|---|", *rows]
