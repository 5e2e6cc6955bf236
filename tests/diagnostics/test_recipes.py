"""Every command of docs/guide/troubleshooting.md runs: on the sample data, with a tiny model and two steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
COMMANDS = list(dict.fromkeys(re.findall(r"(?m)^ {4}python runner/(.+)$", TEXT)))
SMALL = {
    "model.hidden_size": "32", "model.num_hidden_layers": "1", "model.num_attention_heads": "2", "model.num_key_value_heads": "1", "model.head_dim": "16",
    "model.intermediate_size": "32", "device": "cpu", "train.max_steps": "2", "train.sample_every": "0", "train.eval_every": "0", "tracker.page": "false",
}  # fmt: skip
STARTS_PROCESSES = ("train.supervise=true", "--multirun")


def argv(line: str) -> list[str]:
    """Return file and arguments of a command, with the settings of a small run that it does not set itself.

    A command that trains in processes of its own is planned, which composes and checks the same settings:
    tests/supervise and tests/sweep train so.
    """
    command, *arguments = shlex.split(line)
    if command == "train.py" and any(argument in STARTS_PROCESSES for argument in arguments):
        command = "plan.py"
    given = {argument.partition("=")[0] for argument in arguments}
    settings = dict(SMALL) if command in ("train.py", "plan.py", "rows.py") else {}
    settings |= {"train.max_steps": "12"} if "schedule.warmup_steps" in given else {}
    settings |= {"train.eval_every": "1"} if "train.patience" in given else {}
    arguments += [
        f"{key}={value}"
        for key, value in settings.items()
        if key not in given and not (key.startswith("model.") and "init_from" in given)
    ]
    return [command, *arguments, *(["timing=false"] if command == "plan.py" and "timing" not in given else [])]


def test_recipes_name_every_section_that_a_message_leads_to() -> None:
    sections = {title.lower().replace(" ", "-") for title in re.findall(r"(?m)^## (.+)$", TEXT)}
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "runner").rglob("*.py"))
    named = set(re.findall(r"troubleshooting\([\"']([\w-]+)[\"']\)", source)) | set(
        re.findall(r'Symptom\(\s*"([\w-]+)"', source)
    )
    assert len(named) > 12 and named <= sections and set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= sections
    assert len(COMMANDS) > 25


@pytest.mark.slow(long=True)
def test_recipes_run(call, call_command, workspace: Path) -> None:
    torch.set_num_threads(1)
    (workspace / "questions.jsonl").write_text(
        "".join(f'{{"question": "what is {i}?", "answer": "{i}"}}\n' for i in range(9))
    )
    (workspace / "data").symlink_to(ROOT / "data")
    failed = []
    for line in ("train.py stage=pretrain", "train.py stage=sft", *COMMANDS):
        command, *arguments = argv(line)
        ended = call(*arguments) if command == "train.py" else call_command(command, *arguments)
        if ended.returncode:
            failed.append((line, ended.returncode, ended.stderr[-600:]))
    assert failed == []
