"""Hostile suite: harmful folders and files are given to the commands.

`python tests/hostile/suite.py` prints the table and its counts.

    python tests/hostile/suite.py [--light | --heavy] [--part=I/N] [--brief] [--template-seconds=S] [NAME ...]

--light: only the cases that end before torch is imported; --heavy: only the others. --part: every N-th case from the
I-th on; --brief: the first command of each. --template-seconds: limit of a chat template, lower for a fast test. NAME:
part of the name or category of the cases to run. Exit code 1: one failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import harness  # noqa: E402  (after sys.path and the environment)

TOKENIZER = harness.ROOT / "data" / "samples" / "tokenizer"
CASE_FILES = sorted(path.stem for path in Path(__file__).parent.glob("cases_*.py"))


def all_cases() -> list[harness.HostileCase]:
    """The cases of all files cases_*.py, each of which has a list CASES."""
    return [case for name in CASE_FILES for case in importlib.import_module(name).CASES]


def make_base(base: Path, is_light: bool) -> None:
    """Write the unharmed files that `Folder.copy` copies."""
    folder = harness.Folder(base.parent, base)
    for path in (folder.work, folder.outside, folder.root / "home", folder.root / "tmp"):
        path.mkdir()
    texts = [json.dumps({"text": f"{number} goats sing in the rain"}) for number in range(40)]
    chats = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"How many goats? {number}"},
                    {"role": "assistant", "content": f"{number} goats."},
                ]
            }
        )
        for number in range(40)
    ]
    base.mkdir()
    harness.paths.REPO_ROOT = folder.work  # the cache of the saved configs
    (base / "rows.jsonl").write_text("\n".join(texts) + "\n")
    (base / "chats.jsonl").write_text("\n".join(chats) + "\n")
    shutil.copytree(TOKENIZER, base / "tokenizer")
    folder.copy("rows.jsonl")
    _write_new_run(base / "new_run")
    if not is_light:
        ended = harness.run_command(harness.TRAIN, folder)
        assert ended.code == 0, ended
        shutil.move(folder.work / "out", base / "run")
        shutil.copytree(base / "run" / "model", base / "model")
    _write_sweep(base)
    shutil.rmtree(folder.work / ".cache", ignore_errors=True)  # its rows.jsonl stays: the config of the run names it


def _write_new_run(run: Path) -> None:
    from runner.config.compose import compose_tree, without_hydra
    from runner.config.snapshot import complete_hydra_dir
    from runner.run_dir.contents import DEFAULT_METADATA

    overrides = harness.TINY_RUN.split()
    (run / ".hydra").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(DEFAULT_METADATA | {"status": "running", "attempt": 1}))
    (run / ".hydra" / "overrides.yaml").write_text("".join(f"- {override}\n" for override in overrides))
    complete_hydra_dir(run, without_hydra(compose_tree(overrides)), overrides)


def _write_sweep(base: Path) -> None:
    """A sweep of two jobs that are killed before their first step."""
    jobs = [
        {"name": f"seed={seed}", "overrides": {"seed": str(seed)}, "status": "interrupted", "attempt": 1}
        for seed in (1, 2)
    ]
    for job in jobs:
        shutil.copytree(base / "new_run", base / "sweep" / str(job["name"]))
    fields = {
        "overrides": harness.TINY_RUN.split(),
        "swept": {"seed": ["1", "2"]},
        "status": "interrupted",
        "created": "2026-01-01T00:00:00+00:00",
    }
    (base / "sweep" / "sweep.json").write_text(
        json.dumps(fields | {"sweeper": "grid", "launcher": "local", "jobs": jobs})
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--heavy", action="store_true")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--template-seconds", type=float)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    importlib.import_module("runner.train")  # once: the cases run in forked processes
    if not args.light:
        for module in (
            "torch",
            "runner.launch.run",
            "runner.engine.build",
            "runner.inference.load",
            "models.transformers_adapter.model",
        ):
            importlib.import_module(module)
    if args.template_seconds:
        importlib.import_module("data.tokenize.renderer").MAX_SECONDS = args.template_seconds
    part, parts = map(int, args.part.split("/"))
    chosen = [case for case in all_cases() if not (args.heavy if case.is_light else args.light)][part - 1 :: parts]
    if args.brief:
        chosen = [dataclasses.replace(case, commands=case.commands[:1]) for case in chosen]
    chosen = [
        case for case in chosen if not args.names or any(name in f"{case.category} {case.name}" for name in args.names)
    ]
    with tempfile.TemporaryDirectory(prefix="hostile-") as temp:
        base = Path(temp).resolve() / "base"
        make_base(base, args.light)
        return _run_all(chosen, base)


def _run_all(cases: list[harness.HostileCase], base: Path) -> int:
    ends, failed = [], 0
    for case in cases:
        for command, ended in zip(case.commands, harness.run_case(case, base.parent, base), strict=True):
            ends.append(ended)
            failures = ended.failures(case)
            failed += bool(failures)
            print(
                f"{'FAILED' if failures else 'ok':6} {ended.seconds:5.1f} s {ended.bytes >> 20:5} MiB  {case.category}: {case.name}: {command[:60]}"
            )
            for failure in failures[:8]:
                print(f"       {failure}")
            if failures:
                print("       | " + ended.output[-2000:].replace("\n", "\n       | "))
    sums = {name: sum(len(getattr(ended, name)) for ended in ends) for name in ("executed", "wrote", "control")}
    print(
        f"cases {len(cases)}, commands {len(ends)}, failed {failed}, executed {sums['executed']}, outside writes {sums['wrote']}, "
        f"control characters {sums['control']}, tracebacks {sum('Traceback (most' in ended.output for ended in ends)}, "
        f"slowest {max((ended.cpu_seconds for ended in ends), default=0):.1f} s of processor time, largest {max((ended.bytes for ended in ends), default=0) >> 20} MiB"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
