"""Every command of README and docs: commands of runner/ are executed with tiny settings, trainings are planned
(composed, checked, their files read) as typed, and of every other program what it names is looked up. A command that is
none of these and has no reason in NOT_EXECUTED fails.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

import pytest
from command_fixtures import TINY_MODEL, Call, Program, Result
from documented_commands import PAGES, ROOT, Command, documented_commands, files_of_page, is_program

COMMANDS = [command for page in PAGES if page.exists() for command in documented_commands(page)]
# as they are called in the docs
RUN, SFT_RUN, SWEEP = (
    "outputs/2026-11-21/10-00-00",
    "outputs/2026-11-21/10-05-00",
    "outputs/multirun/2026-11-21/10-00-00",
)
LORA_RUN = "outputs/2026-11-21/10-10-00"
SHORT = [
    "train.max_steps=2", "train.batch_size=2", "train.accumulation_steps=1", "train.eval_every=0", "train.save_every=0", "train.sample_every=0",
    "data.max_length=64", "device=cpu", "tracker.console=quiet",
]  # fmt: skip
SHORT_JOB = [override for override in SHORT if not override.startswith("train.accumulation_steps")]
SWEEP_COMMAND = "python runner/train.py --multirun optimizer.lr=1e-3,5e-3 train.accumulation_steps=1,4"
# Commands that build what the others need, in this order: command, overrides that shrink it.
TRAINED = (
    ("python runner/train.py", [*TINY_MODEL, *SHORT, f"hydra.run.dir={RUN}"]),
    ("python runner/train.py stage=sft", [*SHORT, f"hydra.run.dir={SFT_RUN}"]),
    ("python runner/train.py stage=lora", [*SHORT, f"hydra.run.dir={LORA_RUN}"]),
    ("python runner/train.py stage=dpo", SHORT),
    ("python runner/export.py run=last to=my-model format=hf", []),
)
# Placeholders of the docs, as regular expressions -> what takes their place.
SUBSTITUTES = {
    "init_from=DIR": "init_from=my-model", "sweep=DIR": f"sweep={SWEEP}", "tokenizer=DIR compare=DIR": "tokenizer=my-model compare=my-model",
    r"\bDIR\b": SFT_RUN, r"\bSWEEP\b": SWEEP, "run=RUN": f"run={LORA_RUN}", "/adapters/mine": LORA_RUN, "outputs/2026-11-21/11-00-00": SFT_RUN,
    r"Qwen/Qwen2\.5-0\.5B(-Instruct)?": "my-model", r"/models/[\w.-]+": "my-model",
}  # fmt: skip
# (page, command) as patterns -> overrides that make an executed command short, or complete it.
SHRINK = {
    ("*", "runner/chat.py run=*"): ["max_new_tokens=4", "prompt=Hi"],
    ("*", "runner/evaluate.py *exact_match*"): ["max_new_tokens=2"],
    ("*", "runner/evaluate.py *conversation*"): ["max_new_tokens=2"],
    ("*", "runner/plan.py *"): ["timing=false", *TINY_MODEL],
    ("*", "runner/tokenizer.py *to=*"): ["vocab_size=300"],
    ("*", "runner/train.py *sweep.budget=*"): [*TINY_MODEL, "timing=false"],
    ("*", f"runner/train.py resume={SWEEP}"): ["optimizer.lr=2e-3"],  # all of its jobs are completed
}
# (page, command) as patterns -> why it is not executed, and what covers it.
NOT_EXECUTED = {
    ("*", "*keep=optimizer*"): "needs a checkpoint of step 4000; tests/launch/test_branch.py branches from step 2",
    ("*", "runner/evaluate.py *tasks=*"): "downloads a data set; tests/inference/test_harness.py runs tasks of a folder",
    ("*", "runner/serve.py *"): "serves until Ctrl-C; tests/serving runs it",
    ("*", "runner/report.py *serve=true*"): "serves until Ctrl-C; tests/browser opens such a page",
    ("*", "runner/compare.py *"): "needs runs of several seeds; tests/reporting/test_arms.py runs it",
    ("*", "*sweep.seeds=*"): "adds jobs that no plan knows; tests/sweep/test_seeds.py runs it",
    ("*", "runner/faults.py *"): "takes minutes; tests/faults runs it with fewer faults",
    ("*", "runner/chat.py run=last"): "reads a terminal; tests/inference/test_chat.py types into it",
    ("*", "runner/export.py *converter=*"): "needs a checkout of llama.cpp",
    ("docs/reference/commands.md", "*[[]key=value ...]"): "is the pattern of a command",
    ("docs/contributing/recipes.md", "*"): "needs the file of its recipe in the checkout; tests/test_contributing_recipes.py runs it",
    ("*", "*=hub:*"): "downloads a data set",
    ("*", "*distributed=ddp*"): "runs several nodes; tests/engine/test_distributed.py runs two ranks",
    ("*", "*resume=DIR distributed.nproc=4*"): "continues a run of several ranks; tests/engine/test_distributed.py does it",
    ("*", "runner/report.py*to=wandb*"): "takes 10 seconds; tests/tracking/test_offline_files.py reads such files",
    ("*", "torchrun *"): "starts several ranks; tests/engine/test_distributed.py runs two",
    ("*", "srun *"): "needs Slurm",
    ("*", "*stage.lora.quantize=nf4*"): "needs bitsandbytes; tests/engine/test_lora_runs.py runs it where it is installed",
    ("*", "*hydra/launcher=ray*"): "needs Ray; tests/sweep/test_backends.py runs it where it is installed",
    ("*", "*hydra/launcher=submitit*"): "needs Slurm; tests/sweep/test_backends.py runs it where it is installed",
    ("*", "*tracker=swanlab*"): "needs an account or the extra swanlab; tests/tracking/test_trackers.py runs it offline",
    ("*", "tensorboard *"): "serves until Ctrl-C",
    ("*", "curl *"): "asks a running server; tests/serving sends the same request",
    ("*", "lm_eval *"): "asks a running server; tests/serving/test_serve.py runs lm_eval against it",
    ("*", "llama-cli *"): "needs llama.cpp; tests/inference/test_export.py opens the file with xllamacpp",
    ("*", "ollama *"): "needs ollama",
    ("*", "hf *"): "needs an account",
    ("*", "docker *"): "needs a daemon; tests/test_packaging.py installs what the image does",
    ("*", "git clone *"): "needs the network",
    ("*", ". .venv/bin/activate"): "changes a shell",
    ("*", "*fresh*"): "installs packages",
    ("*", "*other*"): "installs packages",
    ("*", "head -n 40 data/samples/sft.jsonl*"): "is a command of the shell",
}  # fmt: skip


def reason_of(command: Command) -> str | None:
    return next((reason for key, reason in NOT_EXECUTED.items() if matches(command, key)), None)


def matches(command: Command, key: tuple[str, str]) -> bool:
    page, text = key
    return fnmatch(command.page, page) and (
        fnmatch(command.text, text) or fnmatch(re.sub(r"^([A-Z_]+=\S+ )*python ", "", command.text), text)
    )


def is_of_runner(command: Command) -> bool:
    return command.program.startswith("runner/")


def test_documented_commands_are_found() -> None:
    programs = {command.program for command in COMMANDS}
    assert (
        len(COMMANDS) > 180
        and {f"runner/{path.name}" for path in (ROOT / "runner").glob("*.py")} - {"runner/__init__.py"} <= programs
    )
    assert {SWEEP_COMMAND, *(text for text, _ in TRAINED)} <= {command.text for command in COMMANDS}


@pytest.mark.parametrize("table", [SHRINK, NOT_EXECUTED], ids=["SHRINK", "NOT_EXECUTED"])
def test_documented_commands_use_every_entry_of_the_tables(table: dict) -> None:
    assert [key for key in table if not any(matches(command, key) for command in COMMANDS)] == []


def test_documented_commands_that_are_not_executed_name_tests_that_exist() -> None:
    named = {path for reason in NOT_EXECUTED.values() for path in re.findall(r"tests/[\w/.]+\w", reason)}
    assert len(named) > 8 and [path for path in named if not (ROOT / path).exists()] == []


def test_documented_commands_of_other_programs_name_what_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(
        re.findall(
            r"^(\w+) = \[",
            (ROOT / "pyproject.toml").read_text().partition("optional-dependencies]")[2].partition("\n[")[0],
            re.MULTILINE,
        )
    )
    faults = []
    for command in COMMANDS:
        if is_of_runner(command) or reason_of(command):
            continue
        argv = command.argv
        if command.program == "make":
            missing = [] if argv[1] in targets else argv[1:2]
        elif command.program == "pip":
            missing = [
                name
                for found in re.findall(r"\[([\w,]+)\]", command.text)
                for name in found.split(",")
                if name not in extras
            ]
        elif is_program(argv[0], ("python",)):
            missing = [
                part
                for part in argv[1:]
                if re.match(r"(?:tests|scripts|benchmarks|docs|runner)\b", part) and not (ROOT / part).exists()
            ]
        else:
            missing = ["a reason in NOT_EXECUTED"]
        faults += [f"{command}: no {', '.join(missing)}"] if missing else []
    assert faults == []


@pytest.fixture
def example_files(workspace: Path) -> Path:
    """The files that the docs name, beside short copies of the samples."""
    samples = workspace / "data" / "samples"
    samples.mkdir(parents=True)
    for path in (ROOT / "data" / "samples").glob("*.jsonl"):
        with open(path, encoding="utf-8") as lines:
            (samples / path.name).write_text("".join(islice(lines, 4 if "_val" in path.name else 40)), encoding="utf-8")
    chats = (samples / "sft.jsonl").read_text(encoding="utf-8")
    texts = (samples / "pretrain.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in chats.splitlines()]
    for name, content in {
        "my.json": json.dumps(rows),
        "my.jsonl": chats,
        "chats.jsonl": chats,
        "mine.jsonl": chats,
        "text.jsonl": texts,
    }.items():
        (workspace / name).write_text(content, encoding="utf-8")
    for name in ("my_folder/rows.jsonl", "books/one.txt", "books/two.txt"):
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).write_text(texts, encoding="utf-8")
    for name in ("qa.jsonl", "questions.jsonl"):
        sums = ({"question": f"{n} + 1?", "completion": str(n + 1), "answer": str(n + 1)} for n in range(20))
        (workspace / name).write_text("".join(json.dumps(row) + "\n" for row in sums))
    pandas = pytest.importorskip("pyarrow", reason="the docs name a Parquet file")
    from pyarrow import parquet

    parquet.write_table(pandas.table({"text": texts.splitlines()}), workspace / "wiki.parquet")
    for page in PAGES:
        for name, content in files_of_page(page).items() if page.exists() else ():
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            (workspace / name).write_text(content)
    return workspace


Execute = Callable[..., Result]


@pytest.fixture
def execute(example_files: Path, call: Call, call_command: Call) -> Execute:
    """`execute("python runner/chat.py run=last", *more)` runs a command line in this process."""

    def execute(text: str, *more: str) -> Result:
        _, script, *arguments = arguments_of(text)
        run = call if script == "runner/train.py" else lambda *argv: call_command(Path(script).name, *argv)
        return run(*arguments, *more)

    return execute


def arguments_of(text: str) -> list[str]:
    """Return the arguments of a command line, without assignments to the environment and without a redirection."""
    return [part for part in shlex.split(re.sub(r" > \S+$", "", text)) if not re.match(r"[A-Z_]+=", part)]


def substituted(command: Command) -> str:
    text = command.text
    for placeholder, value in SUBSTITUTES.items():
        text = re.sub(placeholder, value, text)
    return text


def plan_error(text: str) -> str | None:
    """Return what train.py refuses in a command line, None if it would train."""
    from common.errors import UserError
    from runner.config import overrides
    from runner.config.overrides import parse_argv
    from runner.config.resolve import resolve_model_overrides
    from runner.planning.starts import planned_start
    from runner.sweep.state import SweepState

    SweepState.counted_at = time.monotonic()  # a budget counts from the start of its command
    try:
        typed, flags = parse_argv(arguments_of(text)[2:])
        typed = overrides.prepare_overrides(typed, flags.get("--config-dir"))
        planned_start(resolve_model_overrides(typed), flags)
    except UserError as error:
        return f"{error.message} ({error.setting}); {error.fix}"
    return None


PRINTING_FLAGS = ("--help", "--cfg", "--info")  # flags of train.py that print and do not train


@pytest.mark.slow(long=True)
def test_documented_commands_run(execute: Execute, warm_program: Program, example_files: Path) -> None:
    # its jobs are processes
    sweep = warm_program(
        *shlex.split(SWEEP_COMMAND)[2:], *TINY_MODEL, *SHORT_JOB, f"hydra.sweep.dir={example_files / SWEEP}"
    )
    assert sweep.returncode == 0, sweep.stderr
    for text, more in TRAINED:
        ended = execute(text, *more)
        assert ended.returncode == 0, (text, ended.stderr)
    faults, done = [], {SWEEP_COMMAND, *(text for text, _ in TRAINED)}
    for command in COMMANDS:
        text = substituted(command)
        if not is_of_runner(command) or reason_of(command) or text in done:
            continue
        done.add(text)
        more = [override for key, found in SHRINK.items() if matches(command, key) for override in found]
        if "sweep.budget=" in text:  # other processes time steps of each point
            arguments = arguments_of(text)[2:]
            ended = warm_program(*arguments, *more, command="plan.py", cwd=example_files)
            error = None if ended.returncode == 0 else ended.stderr
        elif command.program == "runner/train.py" and not any(flag in text for flag in PRINTING_FLAGS):
            error = plan_error(" ".join([text, *more]))
        else:
            ended = execute(text, *more)
            error = None if ended.returncode == 0 else f"exit code {ended.returncode}: {ended.stderr.strip()}"
        faults += [f"{command}\n    {error}"] if error else []
    assert not faults, "\n".join(faults)
