"""The code and the commands of docs/contributing/recipes.md, in a copy of the checkout that has every change of the
page at once.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_fixtures import TINY_MODEL
from documented_commands import ROOT, documented_commands

PAGE = ROOT / "docs" / "contributing" / "recipes.md"
TEXT = PAGE.read_text(encoding="utf-8")
SHORT = [
    *TINY_MODEL, "train.max_steps=2", "train.batch_size=2", "train.eval_every=0", "train.save_every=0", "train.sample_every=0", "data.max_length=64", "device=cpu",
    "init_from=scratch", "tracker.page=false", "tracker.console=quiet",
]  # fmt: skip
LAUNCHER = re.findall(r"^@dataclass\nclass NiceBackend.*?(?=^```)", TEXT, re.M | re.S)[0]
LAUNCHER_ROW = '"nice": NiceBackend'
# (file, what the page says to add) -> the text before it, what is added. A row of a table is shown without its table.
EDITS = {
    "runner/engine/optim/schedules.py": (
        r"\Z",
        re.findall(r'^@register_schedule\("inverse_sqrt"\)\n.*?(?=^```)', TEXT, re.M | re.S)[0],
    ),
    "runner/inference/metrics.py": (
        r"\Z",
        re.findall(r'^@register_metric\("token_accuracy".*?(?=^```)', TEXT, re.M | re.S)[0],
    ),
    "runner/engine/device/precision.py": (
        r"^PRECISIONS\b.*\{\n",
        re.findall(r'^ {4}"medium": PrecisionSpec.*\n', TEXT, re.M)[0],
    ),
    "runner/reporting/columns.py": (
        r"^COLUMNS\b.*[(\[]\n",
        re.findall(r'^\(\n(    Column\(\n        "loss_tokens_percent".*?),\n\)\n', TEXT, re.M | re.S)[0] + ",\n",
    ),
    "runner/sweep/backends.py": (r"^LAUNCHERS\b.*\{", f"{LAUNCHER_ROW}, "),
}
PLANNED = ("tracker=wandb", "--multirun")  # composed and checked only: wandb takes seconds, jobs are processes
NEEDS_A_SWEEP = "runner/report.py sweep=last"  # tests/reporting/test_leaderboard.py adds a column
DRIVER = """
import contextlib, io, json, runpy, sys, traceback
root = sys.argv[1]
sys.path.insert(0, root)
from runner.cli.entrypoint import train_command
failed = []
for argv in json.load(sys.stdin):
    code, output = 0, io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            if argv[0] == "train.py":
                train_command(argv[1:])
            else:
                sys.argv = argv
                runpy.run_path(f"{root}/runner/{argv[0]}", run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        code = traceback.format_exc()
    if code:
        failed.append([argv, code, output.getvalue()[-600:]])
print(json.dumps(failed))
"""


def files() -> dict[str, str]:
    """Return path -> content of the files that the page shows whole."""
    found = re.findall(
        r"^(?:[^\n]* )?`([\w/]+\.(?:py|yaml))`[^\n`]*:\n\n```(?:python|yaml)\n(.*?)^```", TEXT, re.M | re.S
    )
    return {path: content for path, content in found if not (ROOT / path).exists()}


def arguments(text: str) -> list[str]:
    """Return file and arguments of a command, with the settings of a small run."""
    script, *typed = shlex.split(text)[1:]
    name = "plan.py" if any(part in PLANNED for part in typed) else Path(script).name
    steps = ["train.max_steps=12"] if "schedule.warmup_steps" in text else []
    return [
        name,
        *typed,
        *([*SHORT, *steps] if name in ("train.py", "plan.py") else []),
        *(["timing=false"] if name == "plan.py" else []),
    ]


def test_contributing_recipes_show_whole_files_and_edits_of_files_that_exist() -> None:
    assert len(files()) > 10 and all((ROOT / path).parent.is_dir() for path in files())
    assert LAUNCHER_ROW in TEXT and all(
        re.search(before, (ROOT / path).read_text(encoding="utf-8"), re.M) for path, (before, _) in EDITS.items()
    )


@pytest.mark.slow
def test_contributing_recipes_run(checkout: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    shutil.copytree(checkout, program, ignore=shutil.ignore_patterns("outputs", ".cache"))
    for path, content in files().items():
        (program / path).write_text(content, encoding="utf-8")
    for path, (before, added) in EDITS.items():
        source = (program / path).read_text(encoding="utf-8")
        (program / path).write_text(
            re.sub(before, lambda match, added=added: f"{match[0]}{added}", source, count=1, flags=re.M),
            encoding="utf-8",
        )
    launchers = program / "runner/sweep/backends.py"
    source = launchers.read_text(encoding="utf-8")
    launchers.write_text(source.replace("\nLAUNCHERS", f"\n{LAUNCHER}\nLAUNCHERS", 1), encoding="utf-8")
    (program / "qa.jsonl").write_text(
        "".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(9)), encoding="utf-8"
    )
    commands = [
        command.text
        for command in documented_commands(PAGE)
        if command.program.startswith("runner/") and NEEDS_A_SWEEP not in command.text
    ]
    assert len(commands) > 9
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    request = json.dumps([*map(arguments, commands), ["tokens.py", "text=a goat sings"]])
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, str(program)],
        input=request,
        cwd=program,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and json.loads(ended.stdout.splitlines()[-1]) == [], (
        ended.stdout[-3000:] + ended.stderr[-1000:]
    )
