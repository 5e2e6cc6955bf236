"""export.py: write a trained model for other programs with a model card, read it again, and compare.

A failed comparison leaves nothing. The card is what the Hugging Face hub shows, with what run.json knows; texts of a
run are quoted, never markup.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError, print_safely, strip_control
from common.filesystem import read_json_object, sync_path, sync_tree
from common.hub import hub_name_of, parse_hub_name
from common.paths import command_line
from runner.inference.export.formats import FORMATS, ExportSettings
from runner.inference.load import LoadedModel, load_trained
from runner.run_dir.contents import enclosing_record
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.saved_config import OVERRIDES_FILE, load_yaml
from runner.tracking.progress import PolledProgress

MAX_CELL = 300  # characters of a value
MAX_CARD_ENTRIES = 50  # files of data, overrides
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
    parent = target.parent.resolve()
    if parent.is_relative_to(source.resolve()) or enclosing_record(parent):
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


def model_card(cfg: ExportSettings, source: LoadedModel, run: Mapping[str, Any], run_dir: Path, name: str) -> str:
    """Return the card of a model whose adapter is not merged yet. `run`: the fields of run.json, {} without a run."""
    start = run.get("init_from") or (None if run else source.folder)
    lineage, of_hub = _lineage(Path(str(start))) if start else ([], None)
    base_model = cfg.base_model or of_hub
    relation = (
        "adapter" if cfg.format == "peft" else "quantized" if cfg.dtype == "q8_0" else "finetune" if run else None
    )
    header = {
        "pipeline_tag": "text-generation",
        "library_name": LIBRARIES.get(cfg.format),
        "license": cfg.license,
        "base_model": base_model,
        "base_model_relation": base_model and relation,
    }
    model, sizes = source.model.cfg, {False: 0, True: 0}  # parameters of the model, and of its adapter
    for path, parameter in source.model.named_parameters():
        sizes[".lora." in path] += parameter.numel()
    model_type = _code(model.to_hf_config().get("model_type", model.name))
    rows = {
        "model": f"{model_type}, {model.num_hidden_layers} layers, {model.vocab_size:,} tokens, {sizes[False]:,} parameters",
        "adapter": f"{sizes[True]:,} parameters{'' if cfg.format == 'peft' else ', merged'}" if sizes[True] else None,
        "started from": _code(" from ".join(lineage)) if run and lineage else None,
        "licence": cfg.license or "not given",
        "dtype": cfg.dtype,
        **_training_facts(run, source.folder),
    }
    export = [f"run={run_dir.name}", "to=FOLDER", f"format={cfg.format}", f"dtype={cfg.dtype}"]
    commands = [*_training_command(run_dir), shlex.join([*command_line("export"), *export])]
    lines = [
        f"# {NOT_IN_TITLE.sub('-', name)}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {text} |" for key, text in rows.items() if text),
        "",
        "## Use",
        "",
        *_usage(cfg.format, base_model, source.is_chat_model),
        "",
        "## Commands",
        "",
        *(f"    {_one_line(command, 4000)}" for command in commands),
        "",
    ]
    known = {key: value for key, value in header.items() if value}
    return f"---\n{yaml.safe_dump(known, sort_keys=False)}---\n\n" + strip_control("\n".join(lines))


def usage_lines(format: str, target: Path) -> list[str]:
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
    return by_format.get(format, [chat, f"vllm serve {folder}", upload])


def _usage(format: str, base_model: str | None, is_chat: bool) -> list[str]:
    if format == "gguf":
        return ["    llama-cli -m model.gguf", "", "    ollama create NAME -f Modelfile && ollama run NAME"]
    if format == "minimind":
        return ["Copy model.pth to MiniMind's `out/` under the name that its scripts expect."]
    is_adapter = format == "peft"
    return [
        "```python",
        *(["from peft import PeftModel"] if is_adapter else []),
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        LOAD["peft"].replace("BASE", base_model or "BASE") if is_adapter else LOAD["hf"],
        CHAT_INPUTS if is_chat else TEXT_INPUTS,
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
        runs = ((folder, RunMetadata.read(folder)) for folder in (source, source.parent, source.parent.parent))
        run, fields = next(((folder, fields) for folder, fields in runs if fields), (None, {}))
        names.append((run or source).name)
        start: Any = fields.get("init_from")
        if run is None and not (
            start := read_json_object(source / "adapter_config.json").get("base_model_name_or_path")
        ):
            # where transformers loaded it from: of the hub, or not known
            start = read_json_object(source / "config.json").get("_name_or_path")
            name = parse_hub_name(start) if isinstance(start, str) else None
            return [*names, *([str(name)] if name else [])], name.repo if name else None
        if not isinstance(start, str) or not start:
            break
        if run is None and (name := parse_hub_name(start)) and not (source / start).is_dir():
            return [*names, str(name)], name.repo
        source = source / start if run is None else Path(start)
    return names, None


def _training_facts(run: Mapping[str, Any], folder: Path) -> dict[str, str | None]:
    """Return the rows of the table that come from run.json, which anyone may have written."""
    exported, metrics, code, versions = (
        value if isinstance(value := run.get(key), dict) else {} for key in ("export", "metrics", "code", "versions")
    )
    files = data if isinstance(data := run.get("data"), list) else []
    loss = _number(exported.get("loss"))  # None: no evaluation of these weights
    weights = "not recorded"
    if folder.parent.name == "checkpoints":
        weights = f"checkpoint {folder.name}"
    elif exported:
        weights = f"{exported.get('weights')}, step {exported.get('step')}{f', evaluation loss {loss}' if loss else ''}"
    measured = {"training": "loss", "evaluation": "val_loss", "best": "best_val_loss"}
    losses = [f"{label} {number}" for label, key in measured.items() if (number := _number(metrics.get(key)))]
    libraries = [f"{name} {versions[name]}" for name in ("torch", "transformers", "tokenizers") if name in versions]
    return {
        "stage": _code(run.get("stage")),
        "weights": _code(weights) if run else None,
        "steps": _number(run.get("step")),
        "tokens": _number(run.get("tokens")),
        "tokens with a loss": _number(run.get("loss_tokens")),
        "losses": _code(", ".join(losses)),
        "data": ", ".join(_data_file(entry) for entry in files[:MAX_CARD_ENTRIES] if isinstance(entry, dict)),
        "code": _code(code.get("commit")),
        "versions": _code(", ".join(libraries)),
    }


def _data_file(entry: Mapping[str, Any]) -> str:
    counts = ((_number(entry.get(key)), unit) for key, unit in (("kept", "rows"), ("tokens", "tokens")))
    known = ", ".join(f"{count} {unit}" for count, unit in counts if count)
    return f"{_code(Path(str(entry.get('file'))).name)}{f' ({known})' if known else ''}"


def _training_command(run_dir: Path) -> list[str]:
    """Return the command that trained the run, without the folders of this machine."""
    try:
        overrides = load_yaml(run_dir / OVERRIDES_FILE)
    except (OSError, ValueError):
        return []
    overrides = overrides[:MAX_CARD_ENTRIES] if isinstance(overrides, list) else []
    return [shlex.join([*command_line("train"), *(ABSOLUTE_PATH.sub("", str(override)) for override in overrides)])]


def _number(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _code(value: Any) -> str | None:
    """Return untrusted text as a code span, in which nothing is markup; None if there is none."""
    return f"`{_one_line(value, MAX_CELL).replace('`', chr(39)).replace('|', '/')}`" if value else None


def _one_line(value: Any, limit: int) -> str:
    return " ".join(strip_control(str(value)).split())[:limit]
