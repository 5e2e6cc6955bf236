"""README.md of an exported model: the card that the Hugging Face hub shows, with what run.json knows. Texts of a run are quoted, never markup."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.errors import strip_control
from common.filesystem import read_bounded
from common.hub.names import hub_name_of
from common.limits.parsers import parse_yaml
from common.paths import command_line

if TYPE_CHECKING:
    from runner.inference.load import LoadedModel

MAX_CELL = 300  # characters of a value
MAX_CARD_ENTRIES = 50  # files of data, overrides
OVERRIDES_LIMIT = 1 << 20
ABSOLUTE_PATH = re.compile(r"(?<![\w.])/(?:[^\s,'\"\]\[=]+/)*(?=[^\s,'\"/\]\[=])")  # all but its last name: folders of this machine are no fact about the model
NOT_IN_TITLE = re.compile(r"[^\w .+-]")
LIBRARIES = {"hf": "transformers", "merged": "transformers", "peft": "peft", "gguf": "gguf"}
RELATIONS = {"peft": "adapter", "gguf": "quantized"}  # to the base model, as the hub names them
LOAD = {
    "hf": 'model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto")',
    "peft": 'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE", dtype="auto"), "FOLDER")',
}
CHAT_INPUTS = """messages = [{"role": "user", "content": "Who are you?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
TEXT_INPUTS = 'inputs = tokenizer((tokenizer.bos_token or "") + "Once upon a time", add_special_tokens=False, return_tensors="pt")'
GENERATE = """output = model.generate(**inputs, max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""


@dataclass(frozen=True)
class ModelFacts:
    """What the card and the lines after an export say."""

    format: str
    is_chat: bool
    license: str | None
    base_model: str | None  # name on the hub
    rows: dict[str, str]  # of the table
    commands: list[str]

    @classmethod
    def collect(
        cls, source: LoadedModel, run: Mapping[str, Any], run_dir: Path, format: str, dtype: str, license: str | None, base_model: str | None
    ) -> ModelFacts:
        """`run`: the content of run.json, {} for a folder without a run."""
        started_from = Path(str(run["init_from"])) if run.get("init_from") else None
        of_hub = hub_name_of(started_from) if started_from else None
        base_model = base_model or (of_hub.repo if of_hub else None)
        model = source.model.cfg
        rows = {
            "model": f"{_code(model.to_hf_config().get('model_type', model.name))}, {model.num_hidden_layers} layers, {model.vocab_size:,} tokens, "
            f"{sum(p.numel() for p in source.model.parameters()):,} parameters",
            "started from": _code(str(of_hub) if of_hub else started_from.name) if started_from else None,
            "licence": license or "not given",
            "dtype": dtype,
            **_training_facts(run, source.folder),
        }
        export = shlex.join([*command_line("export"), f"run={run_dir.name}", "to=FOLDER", f"format={format}", f"dtype={dtype}"])
        commands = [*_training_command(run_dir), export]
        return cls(format, source.is_chat_model, license, base_model, {name: text for name, text in rows.items() if text}, commands)


def write_model_card(target: Path, facts: ModelFacts, name: str) -> None:
    """Write README.md into `target`."""
    header: dict[str, Any] = {"pipeline_tag": "text-generation"}
    if facts.format in LIBRARIES:
        header["library_name"] = LIBRARIES[facts.format]
    if facts.license:
        header["license"] = facts.license
    if facts.base_model:
        header |= {"base_model": facts.base_model, "base_model_relation": RELATIONS.get(facts.format, "finetune")}
    table = ["| | |", "|---|---|", *(f"| {key} | {text} |" for key, text in facts.rows.items())]
    commands = [f"    {_one_line(command, 4000)}" for command in facts.commands]
    lines = [f"# {NOT_IN_TITLE.sub('-', name)}", "", *table, "", "## Use", "", *_usage(facts), "", "## Commands", "", *commands, ""]
    text = f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n" + strip_control("\n".join(lines))
    (target / "README.md").write_text(text, encoding="utf-8")


def usage_lines(facts: ModelFacts, target: Path) -> list[str]:
    """Return commands that use the exported folder, for the console."""
    folder = shlex.quote(str(target))
    chat = shlex.join([*command_line("chat"), f"run={target}"])
    upload = f"hf upload OWNER/NAME {folder}"
    by_format = {
        "gguf": [f"llama-cli -m {folder}/model.gguf", f"ollama create NAME -f {folder}/Modelfile && ollama run NAME", upload],
        "minimind": [f"copy {folder}/model.pth to MiniMind's out/ under the name that its scripts expect"],
        "peft": [chat, upload],
    }
    return by_format.get(facts.format, [chat, f"vllm serve {folder}", upload])


def _usage(facts: ModelFacts) -> list[str]:
    if facts.format == "gguf":
        return ["    llama-cli -m model.gguf", "", "    ollama create NAME -f Modelfile && ollama run NAME"]
    if facts.format == "minimind":
        return ["Copy model.pth to MiniMind's `out/` under the name that its scripts expect."]
    peft = ["from peft import PeftModel"] if facts.format == "peft" else []
    load = LOAD["peft"].replace("BASE", facts.base_model or "BASE") if peft else LOAD["hf"]
    inputs = CHAT_INPUTS if facts.is_chat else TEXT_INPUTS
    imports = [*peft, "from transformers import AutoModelForCausalLM, AutoTokenizer"]
    return ["```python", *imports, "", 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")', load, inputs, GENERATE, "```"]


def _training_facts(run: Mapping[str, Any], folder: Path) -> dict[str, str | None]:
    """Return the rows of the table that come from run.json, which anyone may have written."""
    exported, metrics, code = (value if isinstance(value := run.get(key), dict) else {} for key in ("export", "metrics", "code"))
    listed = run.get("data")
    files = [entry for entry in listed if isinstance(entry, dict)][:MAX_CARD_ENTRIES] if isinstance(listed, list) else []
    losses = [
        f"{label} {_number(metrics[key])}" for label, key in (("training", "loss"), ("evaluation", "val_loss"), ("best", "best_val_loss")) if key in metrics
    ]
    weights = f"{exported.get('weights')}, step {exported.get('step')}, evaluation loss {_number(exported.get('loss'))}" if exported else None
    versions = run.get("versions") if isinstance(run.get("versions"), dict) else {}
    return {
        "stage": _code(run["stage"]) if run.get("stage") else None,
        "weights": _code(f"checkpoint {folder.name}" if folder.parent.name == "checkpoints" else weights) if exported or run else None,
        "steps": _number(run.get("step")),
        "tokens": _number(run.get("tokens")),
        "tokens with a loss": _number(run.get("loss_tokens")),
        "losses": _code(", ".join(losses)) if losses else None,
        "data": ", ".join(
            f"{_code(Path(str(entry.get('file'))).name)} ({_number(entry.get('kept'))} rows, {_number(entry.get('tokens'))} tokens)" for entry in files
        ),
        "code": _code(code["commit"]) if code.get("commit") else None,
        "versions": _code(", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "tokenizers") if name in versions)) if versions else None,
    }


def _training_command(run_dir: Path) -> list[str]:
    """Return the command that trained the run, without the folders of this machine."""
    try:
        typed = parse_yaml(read_bounded(run_dir / ".hydra" / "overrides.yaml", OVERRIDES_LIMIT).decode("utf-8"))
    except (OSError, ValueError):
        return []
    overrides: Sequence[Any] = typed[:MAX_CARD_ENTRIES] if isinstance(typed, list) else []
    return [shlex.join([*command_line("train"), *(ABSOLUTE_PATH.sub("", str(override)) for override in overrides)])]


def _number(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _code(value: Any) -> str:
    """Return untrusted text as a code span, in which nothing is markup."""
    return f"`{_one_line(value, MAX_CELL).replace('`', chr(39)).replace('|', '/')}`"


def _one_line(value: Any, limit: int) -> str:
    return " ".join(strip_control(str(value)).split())[:limit]
