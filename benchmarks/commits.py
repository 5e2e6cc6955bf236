"""The engine's step of this checkout beside that of another one: python benchmarks/commits.py --base CHECKOUT
[--precision bf16|fp32] [--rounds N] [--write] [OVERRIDE ...].

`git worktree add ../base COMMIT` makes the folder of --base, and one of --head, if it is not this checkout that is
compared. Each steps with its own code in processes of its own, uncompiled and compiled, as its command would run it;
all take turns step by step, and a process is stopped while it waits. Printed are medians over the rounds with their
smallest and largest value, the peak memory of each process, and whether the losses of both checkouts are bitwise equal.
`--base-env NAME=VALUE` adds a variable to the processes of the base: with `--base .`, the same code with and without
it, e.g. `--base-env LD_PRELOAD=`, which leaves out the memory pool of large tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from lib import ROOT
from lib.environment import LIMITS, describe_facts
from lib.interleave import CaseProcess, Step, case_spec, measure, round_ratios, tokens_per_second
from lib.results import file_part, machine_facts, machine_name, report_result, result_parser
from lib.runs import SAMPLES

FACTS = machine_facts()  # before modules are imported that add variables
ENGINE = {  # module -> what the processes use of a checkout
    "runner.config.compose": ["compose_tree", "to_config", "without_hydra"],
    "runner.engine.build": ["build_run"],
    "runner.engine.loop": ["train_step"],
}
OLDEST = "26b8037"  # commit: the oldest one with which this was tried
LAYERS = {"off": "uncompiled", "default": "compiled", "auto": "auto"}  # value of train.compile -> its name in the table
HEAD = (
    "| layers | checkout | step, s | useful tokens/s | peak memory, MB | speed relative to the base | by processor time | losses of the first steps |\n"
    "|---|---|---|---|---|---|---|---|"
)
# Runs in the checkout as `python -c PROBE NAMES`: print the names that its engine lacks.
PROBE = """
import importlib, json, sys
missing = []
for module, names in json.loads(sys.argv[1]).items():
    try:
        found = vars(importlib.import_module(module))
    except ModuleNotFoundError:
        found = {}
    missing += [f"{module}.{name}" for name in names if name not in found]
print(json.dumps(missing))
"""


class Checkout(NamedTuple):
    folder: str
    commit: str  # abbreviated, "unknown" if the folder has no git
    subject: str
    is_changed: bool  # has changes that are not committed

    def __str__(self) -> str:
        return f"`{self.commit}`{' with uncommitted changes' * self.is_changed}"


def read_checkout(folder: Path) -> Checkout:
    """Return the commit of a checkout. Raises SystemExit if its engine cannot be measured."""
    if not (folder / "runner" / "engine").is_dir():
        raise SystemExit(
            f"--base and --head must be checkouts of this project, got {folder}, with no folder runner/engine; make one with: git worktree add FOLDER COMMIT"
        )

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit, subject, changes = (
        git("rev-parse", "--short=7", "HEAD"),
        git("log", "-1", "--format=%s"),
        git("status", "--porcelain", "-uno"),
    )
    checkout = Checkout(str(folder), commit or "unknown", subject, bool(changes))
    if missing := missing_names(folder):
        raise SystemExit(
            f"{folder} is at {checkout.commit}, whose engine has no {', '.join(missing)}; the oldest commit that can be measured is {OLDEST}"
        )
    return checkout


def missing_names(folder: Path) -> list[str]:
    """Return the names of ENGINE that the checkout lacks.

    Raises SystemExit if its engine cannot be imported at all.
    """
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(ENGINE)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        error = done.stderr.strip().splitlines()[-1]
        raise SystemExit(
            f"the engine of {folder} cannot be imported: {error}; the oldest commit that can be measured is {OLDEST}"
        )
    return list(json.loads(done.stdout.splitlines()[-1]))


def checkout_spec(spec: dict[str, Any], checkout: Checkout, name: str, variables: dict[str, str]) -> dict[str, Any]:
    """Return the spec of the processes of a checkout: it tokenizes into a cache of its own, because the format may have
    changed.
    """
    cache = f"data.cache={Path(spec['tokens']).parent}/cache-{name}"
    overrides = [cache if override.startswith("data.cache=") else override for override in spec["overrides"]]
    return spec | {
        "case": "ours",
        "checkout": checkout.folder,
        "overrides": overrides,
        "variables": variables,
        "record_loss": True,
    }


def start_specs(
    args: argparse.Namespace, checkouts: dict[str, Checkout], folder: str
) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, spec) of each process."""
    overrides = [f"model={args.model}", *args.overrides]
    tokenizer = str(SAMPLES / "tokenizer")
    spec = case_spec(
        overrides,
        stage=args.stage,
        path=args.path,
        tokenizer=tokenizer,
        rows=args.rows,
        length=args.length,
        folder=folder,
    )
    specs = {
        name: checkout_spec(spec, checkout, name, variables_of(args) if name == "base" else {})
        for name, checkout in checkouts.items()
    }
    return [
        (f"{LAYERS[mode]}, {name}", specs[name] | {"compile": mode, "precision": args.precision})
        for mode in args.compile.split("+")
        for name in checkouts
    ]


def variables_of(args: argparse.Namespace) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in args.base_env)


def compare_losses(mine: list[Step], others: list[Step]) -> str:
    """Return whether the losses of all steps are bitwise equal, and if not from which step on and why."""
    for number, (own, other) in enumerate(zip(mine, others, strict=True), start=1):
        if (own["useful"], own["computed"]) != (other["useful"], other["computed"]):
            return f"other batches from step {number} on"
        if own["loss"] != other["loss"]:
            return f"differ from step {number} on, there by {abs(own['loss'] / other['loss'] - 1):.1e}"
    return f"all {len(mine)} bitwise equal"


def with_spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(cases: list[CaseProcess], checkouts: dict[str, Checkout]) -> str:
    found, rows = {case.name: case for case in cases}, [HEAD]
    for case in cases:
        layers, _, name = case.name.rpartition(", ")
        base = found.get(f"{layers}, base")
        compared = ["", "", ""]
        if base and case is not base:
            ratios = (round_ratios(tokens_per_second, case, base, clock) for clock in ("seconds", "cpu"))
            compared = [
                *(with_spread(values) for values in ratios),
                compare_losses(case.first_steps + case.steps, base.first_steps + base.steps),
            ]
        seconds, memory = (
            with_spread([step["seconds"] for step in case.steps], 3),
            max(step["memory"] for step in case.steps),
        )
        useful = case.median(tokens_per_second) * case.fill_ratio
        rows.append(
            f"| {layers} | {name}, {checkouts[name]} | {seconds} | {useful:,.0f} | {memory:,.0f} | {' | '.join(compared)} |"
        )
    return "\n".join(
        [*rows, "", "What each process had:", "", *(f"- {case.name}: {describe_case(case)}" for case in cases)]
    )


def describe_case(case: CaseProcess) -> str:
    kernels = case.steps[-1]["kernels"]  # that each checkout has chosen
    return describe_facts(case.facts) + (f"; {kernels}" if kernels else "")


def command_of(args: argparse.Namespace) -> str:
    """Return the command that measures this again, without the paths of this machine."""
    flags = {"path": Path(args.path).name} | {
        name: getattr(args, name) for name in ("stage", "model", "precision", "compile", "rows", "length", "rounds")
    }
    limits = [f"{name}={FACTS['variables'][name]}" for name in LIMITS if name in FACTS["variables"]]
    base = [
        "--base CHECKOUT",
        *["--head CHECKOUT"] * (args.head != str(ROOT)),
        *(f"--base-env {entry}" for entry in args.base_env),
    ]
    return " ".join(
        [
            *limits,
            "python benchmarks/commits.py",
            *base,
            *(f"--{name} {value}" for name, value in flags.items()),
            *args.overrides,
        ]
    )


def main(args: argparse.Namespace) -> None:
    if unknown := set(args.compile.split("+")) - set(LAYERS):
        raise SystemExit(f"--compile must be of {', '.join(LAYERS)}, joined by +; got {', '.join(sorted(unknown))}")
    if wrong := [entry for entry in args.base_env if "=" not in entry]:
        raise SystemExit(f"--base-env must be NAME=VALUE, got {', '.join(wrong)}")
    checkouts = {
        name: read_checkout(Path(folder).resolve()) for name, folder in (("head", args.head), ("base", args.base))
    }
    with tempfile.TemporaryDirectory() as folder:
        cases, messages = measure(start_specs(args, checkouts, folder), args.rounds)
    if len({case.facts["threads"] for case in cases}) > 1:
        messages.append("The processes have different numbers of threads: set OMP_NUM_THREADS.")
    about = [f"- {name}: {checkout}, {checkout.subject}" for name, checkout in checkouts.items()]
    about[-1] += f", with {' '.join(args.base_env)}" if args.base_env else ""
    head = f"{args.model}, {args.stage}, {args.precision}, {args.rows} x {args.length} tokens, {args.rounds} rounds; median (smallest to largest)."
    text = "\n\n".join([head, "\n".join(about), table(cases, checkouts), *messages])
    commits, workload = [checkout.commit for checkout in checkouts.values()], Path(args.path).stem.removesuffix("_demo")
    name = file_part(
        " ".join(["commits", *commits, *args.base_env, args.model, workload, args.precision, machine_name(FACTS)])
    )
    report_result(name, f"Step of two checkouts, {args.model}", command_of(args), text, args.write)
    if not cases:
        raise SystemExit(1)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--base", required=True, help=f"folder of another checkout, at {OLDEST} or later")
    parser.add_argument("--head", default=str(ROOT), help="the checkout that is compared with it (default: this one)")
    parser.add_argument(
        "--base-env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the base's processes only; repeatable",
    )
    parser.add_argument("--path", default=str(SAMPLES / "pretrain.jsonl"))
    parser.add_argument("--stage", default="pretrain", choices=["pretrain", "sft"])
    parser.add_argument("--model", default="minimind_26m")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument(
        "--compile", default="off+default", help="values of train.compile, joined by + (default: off+default)"
    )
    parser.add_argument("--rows", type=int, default=4, help="per step (default: 4)")
    parser.add_argument("--length", type=int, default=512, help="tokens per row (default: 512)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("overrides", nargs="*", help="overrides of train.py, for both checkouts")
    main(parser.parse_args())
