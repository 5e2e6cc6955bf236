"""README.md of an exported model: the card that the Hugging Face hub shows, with what run.json knows.

Texts of a run are quoted, never markup.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.errors import strip_control
from common.filesystem import read_bounded, read_json_object
from common.hub import hub_name_of, parse_hub_name
from common.limits.parsers import parse_yaml
from common.paths import command_line

if TYPE_CHECKING:
    from runner.inference.load import LoadedModel

MAX_CELL = 300  # characters of a value
MAX_CARD_ENTRIES = 50  # files of data, overrides
OVERRIDES_LIMIT = 1 << 20
# all but its last name: folders of this machine are no fact about the model
ABSOLUTE_PATH = re.compile(r"(?<![\w.])/(?:[^\s,'\"\]\[=]+/)*(?=[^\s,'\"/\]\[=])")
NOT_IN_TITLE = re.compile(r"[^\w .+-]")
LIBRARIES = {"hf": "transformers", "merged": "transformers", "peft": "peft", "gguf": "gguf"}
MAX_LINEAGE = 16  # runs and adapters that are followed to the model that they started from
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
    relation: str | None  # of the model to base_model, as the hub names it: adapter, quantized or finetune
    rows: dict[str, str]  # of the table
    commands: list[str]

    @classmethod
    def collect(
        cls,
        source: LoadedModel,
        run: Mapping[str, Any],
        run_dir: Path,
        format: str,
        dtype: str,
        license: str | None,
        base_model: str | None,
    ) -> ModelFacts:
        """`run`: the content of run.json, {} for a folder without a run."""
        start = run.get("init_from") or (None if run else source.folder)
        lineage, of_hub = _lineage(Path(str(start))) if start else ([], None)
        base_model = base_model or of_hub
        relation = "adapter" if format == "peft" else "quantized" if dtype == "q8_0" else "finetune" if run else None
        model = source.model.cfg
        sizes = {is_adapter: 0 for is_adapter in (False, True)}
        for name, parameter in source.model.named_parameters():
            sizes[".lora." in name] += parameter.numel()
        rows = {
            "model": f"{_code(model.to_hf_config().get('model_type', model.name))}, {model.num_hidden_layers} layers, {model.vocab_size:,} tokens, "
            f"{sizes[False]:,} parameters",
            "adapter": f"{sizes[True]:,} parameters{'' if format == 'peft' else ', merged'}" if sizes[True] else None,
            "started from": _code(" from ".join(lineage)) if run and lineage else None,
            "licence": license or "not given",
            "dtype": dtype,
            **_training_facts(run, source.folder),
        }
        export = shlex.join(
            [*command_line("export"), f"run={run_dir.name}", "to=FOLDER", f"format={format}", f"dtype={dtype}"]
        )
        commands = [*_training_command(run_dir), export]
        return cls(
            format,
            source.is_chat_model,
            license,
            base_model,
            relation,
            {name: text for name, text in rows.items() if text},
            commands,
        )


def write_model_card(target: Path, facts: ModelFacts, name: str) -> None:
    """Write README.md into `target`."""
    header: dict[str, Any] = {"pipeline_tag": "text-generation"}
    if facts.format in LIBRARIES:
        header["library_name"] = LIBRARIES[facts.format]
    if facts.license:
        header["license"] = facts.license
    if facts.base_model:
        header |= {"base_model": facts.base_model} | ({"base_model_relation": facts.relation} if facts.relation else {})
    table = ["| | |", "|---|---|", *(f"| {key} | {text} |" for key, text in facts.rows.items())]
    commands = [f"    {_one_line(command, 4000)}" for command in facts.commands]
    lines = [
        f"# {NOT_IN_TITLE.sub('-', name)}",
        "",
        *table,
        "",
        "## Use",
        "",
        *_usage(facts),
        "",
        "## Commands",
        "",
        *commands,
        "",
    ]
    text = f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n" + strip_control("\n".join(lines))
    (target / "README.md").write_text(text, encoding="utf-8")


def usage_lines(facts: ModelFacts, target: Path) -> list[str]:
    """Return commands that use the exported folder, for the console."""
    folder = shlex.quote(str(target))
    chat = shlex.join([*command_line("chat"), f"run={target}"])
    upload = f"hf upload OWNER/NAME {folder}"
    by_format = {
        "gguf": [
            f"llama-cli -m {folder}/model.gguf",
            f"ollama create NAME -f {folder}/Modelfile && ollama run NAME",
            upload,
        ],
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
    return [
        "```python",
        *imports,
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        load,
        inputs,
        GENERATE,
        "```",
    ]


def _lineage(source: Path) -> tuple[list[str], str | None]:
    """Return (names of the runs and folders that `source` comes from, itself first; the repository of the hub that the
    last one is, or is a copy of).
    """
    names: list[str] = []
    for _ in range(MAX_LINEAGE):
        if of_hub := hub_name_of(source):
            return [*names, str(of_hub)], of_hub.repo
        run = next(
            (folder for folder in (source, source.parent, source.parent.parent) if (folder / "run.json").is_file()),
            None,
        )
        names.append((run or source).name)
        if run:
            start: Any = read_json_object(run / "run.json").get("init_from")
        elif not (start := read_json_object(source / "adapter_config.json").get("base_model_name_or_path")):
            # where transformers loaded it from: of the hub, or not known
            start = read_json_object(source / "config.json").get("_name_or_path")
            name = parse_hub_name(start) if isinstance(start, str) else None
            return [*names, *([str(name)] if name else [])], name.repo if name else None
        if not isinstance(start, str) or not start:
            break
        if not run and (name := parse_hub_name(start)) and not (source / start).is_dir():
            return [*names, str(name)], name.repo
        source = source / start if not run else Path(start)
    return names, None


def _training_facts(run: Mapping[str, Any], folder: Path) -> dict[str, str | None]:
    """Return the rows of the table that come from run.json, which anyone may have written."""
    exported, metrics, code = (
        value if isinstance(value := run.get(key), dict) else {} for key in ("export", "metrics", "code")
    )
    listed = run.get("data")
    files = (
        [entry for entry in listed if isinstance(entry, dict)][:MAX_CARD_ENTRIES] if isinstance(listed, list) else []
    )
    losses = [
        f"{label} {_number(metrics[key])}"
        for label, key in (("training", "loss"), ("evaluation", "val_loss"), ("best", "best_val_loss"))
        if _number(metrics.get(key))
    ]
    loss = _number(exported.get("loss"))  # None: no evaluation of these weights
    weights = (
        f"{exported.get('weights')}, step {exported.get('step')}{f', evaluation loss {loss}' if loss else ''}"
        if exported
        else "not recorded"
    )
    versions = run.get("versions") if isinstance(run.get("versions"), dict) else {}
    return {
        "stage": _code(run["stage"]) if run.get("stage") else None,
        "weights": _code(f"checkpoint {folder.name}" if folder.parent.name == "checkpoints" else weights)
        if exported or run
        else None,
        "steps": _number(run.get("step")),
        "tokens": _number(run.get("tokens")),
        "tokens with a loss": _number(run.get("loss_tokens")),
        "losses": _code(", ".join(losses)) if losses else None,
        "data": ", ".join(
            f"{_code(Path(str(entry.get('file'))).name)}"
            + (
                f" ({', '.join(counts)})"
                if (
                    counts := [
                        f"{n} {unit}"
                        for key, unit in (("kept", "rows"), ("tokens", "tokens"))
                        if (n := _number(entry.get(key)))
                    ]
                )
                else ""
            )
            for entry in files
        ),
        "code": _code(code["commit"]) if code.get("commit") else None,
        "versions": _code(
            ", ".join(
                f"{name} {versions[name]}" for name in ("torch", "transformers", "tokenizers") if name in versions
            )
        )
        if versions
        else None,
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
