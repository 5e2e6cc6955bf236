"""Trackers: their settings, the messages of their processes, and processes that fail without stopping training."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import math
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import UserError
from runner.config.compose import compose_config
from runner.config.overrides import check_overrides
from runner.config.schema import config_groups, config_schema
from runner.config.unread import check_typed_are_read
from runner.tracking import tracker_process
from runner.tracking.config import TRACKERS, TrackerConfig
from runner.tracking.logger import RunLogger
from runner.tracking.tracker_process import TrackerProcess, describe_experiment, finish_trackers
from runner.tracking.trackers import program
from runner.tracking.trackers.program import choose_mode, read_history, read_start

ROOT = Path(__file__).parents[2]
FAILS = "import sys; sys.stdin.readline(); raise RuntimeError('no account')"


@dataclass
class ProgramTracker(TrackerConfig):
    """A tracker as a plugin defines one; `program` is Python code."""

    program: str

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program] if self.program else ["./no-such-program"]


def offline_tracker(name: str, *also: str) -> TrackerConfig:
    return TRACKERS.get(name)(name=name, page=False, console="plain", also=[*also], project="test", mode="offline")  # type: ignore[call-arg]  # fields of the subclass


def start_logger(folder: Path, config: TrackerConfig, is_rank_zero: bool = True) -> RunLogger:
    logger = RunLogger(folder, config, is_rank_zero)
    logger.start({"run": str(folder)}, total_steps=20, attempt=1, run_config={"seed": 1}, saved=None, tracker_id=None)
    return logger


def log_steps(logger: RunLogger, steps: range) -> None:
    for step in steps:
        logger.log("train", step, epoch=0, tokens=step * 100, loss=3.0 / step, lr=5e-4)


def test_registry_lists_the_tracker_modules_without_importing_them() -> None:
    code = "import sys; from runner.tracking.config import TRACKERS; print(TRACKERS.names()); assert not {'torch', 'swanlab', 'tensorboard', 'wandb', 'urllib.request'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "['none', 'swanlab', 'tensorboard', 'wandb']"


def test_registry_refuses_an_unknown_tracker_and_suggests_a_known_one() -> None:
    with pytest.raises(UserError) as caught:
        TRACKERS.get("swanlabs")
    assert (caught.value.setting, caught.value.fix) == ("tracker=swanlabs", "did you mean swanlab?")


def test_tracker_none_has_no_settings_of_other_trackers() -> None:
    names = {name: {field.name for field in dataclasses.fields(TRACKERS.get(name))} for name in ("none", "swanlab")}
    assert names == {
        "none": {"name", "page", "console"},
        "swanlab": {"name", "page", "console", "also", "project", "mode"},
    }


def test_compose_selects_the_config_class_of_the_tracker() -> None:
    config = compose_config(["tracker=swanlab", "tracker.project=letters"]).tracker
    assert type(config) is TRACKERS.get("swanlab") and vars(config)["project"] == "letters"
    with pytest.raises(UserError, match="tracker.project is not read by tracker=none"):
        compose_config(["tracker=none", "tracker.project=letters"])


@pytest.mark.parametrize(
    ("changed", "message", "fix"),
    [
        (
            {"also": ["tensorbord"]},
            "must name trackers out of swanlab, tensorboard, wandb, got tensorbord",
            "did you mean tensorboard?",
        ),
        ({"also": ["none"]}, "got none", ""),
        ({"also": ["tensorboard", "wandb"]}, "names the tracker wandb a second time", "name it once"),
        ({"project": "a/b"}, "letters, digits", "tracker.project=training"),
        ({"project": ""}, "letters, digits", "tracker.project=training"),
        ({"mode": "onlin"}, "must be one of auto, online, offline", "did you mean online?"),
    ],
)
def test_wrong_tracker_settings_are_refused_with_what_to_type(changed: dict, message: str, fix: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        dataclasses.replace(offline_tracker("wandb"), **changed)
    assert fix in caught.value.fix


def test_list_of_options_is_refused_with_the_setting_for_further_trackers() -> None:
    with pytest.raises(UserError, match="takes the name of one option, got a list") as caught:
        check_overrides(["tracker=[tensorboard,wandb]"])
    assert caught.value.fix == "tracker=tensorboard 'tracker.also=[wandb]'"


def test_tracker_class_without_a_default_for_each_setting_is_refused() -> None:
    config_schema(), config_groups()  # kept from before the class is registered
    TRACKERS.register("mine")(ProgramTracker)
    try:
        with pytest.raises(
            UserError, match="class ProgramTracker of tracker=mine has no default for page, console, program',"
        ) as caught:
            check_overrides(["tracker=mine"])
    finally:
        TRACKERS.remove("mine")
    assert (
        caught.value.setting == "tracker=mine"
        and "give each a default in the class, or write DIR/tracker/mine.yaml" in caught.value.fix
    )
    with pytest.raises(UserError, match="tracker has no option mine"):
        check_overrides(["tracker=mine"])


def test_project_of_trackers_without_projects_is_refused() -> None:
    config: Any = SimpleNamespace(tracker=offline_tracker("tensorboard"))
    with pytest.raises(UserError, match="tracker.project is not read"):
        check_typed_are_read(["tracker=tensorboard", "tracker.project=letters"], [config])
    config.tracker = offline_tracker("tensorboard", "wandb")
    check_typed_are_read(["tracker=tensorboard", "tracker.project=letters"], [config])


def test_further_trackers_share_project_and_mode() -> None:
    trackers = compose_config(
        ["tracker=tensorboard", "tracker.also=[wandb,swanlab]", "tracker.project=letters", "tracker.mode=offline"]
    ).tracker.selected()
    assert [
        (tracker.name, vars(tracker)["project"], vars(tracker)["mode"], vars(tracker)["also"]) for tracker in trackers
    ] == [
        ("tensorboard", "letters", "offline", ["wandb", "swanlab"]),
        ("wandb", "letters", "offline", []),
        ("swanlab", "letters", "offline", []),
    ]


@pytest.mark.parametrize("name", ["swanlab", "tensorboard", "wandb"])
def test_missing_tracker_package_is_refused_with_its_install_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.settings.find_spec", lambda package: None)
    with pytest.raises(UserError, match=f"the package {name}, which is not installed") as caught:
        offline_tracker(name).check_installed()
    assert f"pip install 'lm-runner[{name}]'" in caught.value.fix


def test_logger_on_other_ranks_writes_nothing_and_starts_no_tracker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = start_logger(tmp_path, offline_tracker("swanlab"), is_rank_zero=False)
    log_steps(logger, range(1, 3))
    logger.samples(2, [{"prompt": "p", "answer": "a"}])
    logger.warning("not printed")
    assert logger.position() == {}
    logger.finish("completed")
    assert not any(tmp_path.iterdir()) and capsys.readouterr().out == ""


@pytest.mark.parametrize("program", [FAILS, "import time; time.sleep(600)", ""], ids=["raises", "hangs", "is missing"])
def test_failing_tracker_costs_one_warning_and_no_step(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker_process, "CLOSE_TIMEOUT", 0.5)
    monkeypatch.setattr(tracker_process, "QUEUE_SIZE", 50)
    logger = start_logger(tmp_path, ProgramTracker(name="program", page=False, console="plain", program=program))
    for step in range(1, 1001):  # more than the queue and the pipe of a hanging tracker hold
        logger.log("train", step, loss=1.0, filler=float(step))
    logger.finish("completed")
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1000
    assert capsys.readouterr().out.count("warning: tracker program:") == 1


def test_tracker_whose_folder_is_a_link_is_not_started(tmp_path: Path) -> None:
    messages: list[str] = []
    (tmp_path / "outside").mkdir()
    (tmp_path / "program").symlink_to("outside")
    process = TrackerProcess([sys.executable, "-c", FAILS], tmp_path / "program", messages.append, messages.append)
    process.start()
    finish_trackers([process], "completed", "")
    assert "a link is not followed" in messages[0] and not any((tmp_path / "outside").iterdir())


def test_tracker_warning_contains_the_reason_of_the_tracker(tmp_path: Path) -> None:
    messages: list[str] = []
    process = TrackerProcess([sys.executable, "-c", FAILS], tmp_path / "program", messages.append, messages.append)
    process.start(name="run")
    finish_trackers([process], "completed", "")
    assert len(messages) == 1 and "RuntimeError: no account" in messages[0]


def test_two_trackers_get_the_same_messages_in_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = "import sys, json; start = sys.stdin.readline(); open(json.loads(start)['folder'] + '/got', 'w').write(start + sys.stdin.read())"
    both = [ProgramTracker(name=name, page=False, console="plain", program=copies) for name in ("first", "second")]
    monkeypatch.setattr(ProgramTracker, "selected", lambda self: both)
    logger = start_logger(tmp_path, both[0])
    log_steps(logger, range(1, 4))
    logger.finish("completed")
    first, second = (
        [json.loads(line) for line in (tmp_path / name / "got").read_text().splitlines()]
        for name in ("first", "second")
    )
    assert first[1:] == second[1:] and first[0]["id"] == second[0]["id"] == logger.tracker_id
    assert [message.get("step") for message in first] == [None, 1, 2, 3, None]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.stdin.readline()\nwhile True: print('x' * 5000, flush=True)", "prints more than 20 lines"),
        ("import sys; sys.stdin.readline()\nwhile True: sys.stderr.write('x' * 100_000)", "exited with code"),
    ],
    ids=["console", "disk"],
)
def test_tracker_that_writes_without_end_is_stopped(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_process, "MAX_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(tracker_process, "_last_line", lambda path: "")
    shown: list[str] = []
    warnings: list[str] = []
    process = TrackerProcess([sys.executable, "-c", program], tmp_path / "flood", shown.append, warnings.append)
    process.start(name="run")
    finish_trackers([process], "completed", "")
    assert len(warnings) == 1 and reason in warnings[0]
    assert len(shown) <= 20 and (tmp_path / "flood" / "tracker.log").stat().st_size <= 1 << 20


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_tracker_that_starts_children_ends_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_process, "CLOSE_TIMEOUT", 0.5)
    messages: list[str] = []
    program = "import subprocess, time; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); time.sleep(600)"
    process = TrackerProcess([sys.executable, "-c", program], tmp_path / "tree", messages.append, messages.append)
    process.start(name="run")
    while not messages:
        time.sleep(0.01)
    finish_trackers([process], "completed", "")
    assert "did not finish in time" in messages[1] and "report.py run=" in messages[1]
    attempts = 500  # the system ends it a moment later
    while attempts and not has_ended(int(messages[0])):
        attempts -= 1
        time.sleep(0.01)
    assert attempts


def start_message(**changed: object) -> dict:
    about = {"name": "n", "group": "", "tags": [], "note": "", "stage": "sft"}
    settings = {"name": "wandb", "project": "p", "mode": "offline"}
    return {
        "folder": "/run/wandb",
        "id": "abc",
        "settings": settings,
        "config": {},
        "history": None,
        **about,
        **changed,
    }


def test_texts_of_a_run_reach_a_service_short_and_without_controls() -> None:
    config = {"data": {"path": ["a\x1b[2J", "\udc80"]}, "lr": float("inf")}
    experiment = read_start(
        start_message(
            name="a\x00b\u202ec" + "x" * 500,
            tags=["t\x1b" + "y" * 100, "same", "same", ""],
            note="n\n\x07",
            config=config,
        )
    )
    assert experiment.name.startswith("a\\x00b\\u202ec") and len(experiment.name) == 128
    assert experiment.tags[1:] == ["same"] and experiment.tags[0].startswith("t\\x1b") and len(experiment.tags[0]) == 64
    assert experiment.note == "n\n\\x07"
    assert experiment.config == {"data": {"path": ["a\\x1b[2J", "\\udc80"]}, "lr": "inf"}


def test_id_of_a_run_folder_never_becomes_a_path() -> None:
    assert read_start(start_message(id="3211f00290a0f39d")).id == "3211f00290a0f39d"
    hostile = read_start(start_message(id="../../outside")).id
    assert hostile.isalnum() and hostile == read_start(start_message(id="../../outside")).id


def test_jobs_of_a_sweep_have_its_group(tmp_path: Path) -> None:
    job = tmp_path / "11-22" / "10-00" / "optimizer.lr=1e-4"
    job.mkdir(parents=True)
    assert describe_experiment(job, {})["group"] == ""
    (job.parent / "sweep.json").write_text("{}")
    config = {"run": {"name": "letters", "tags": ["a"], "note": "why"}, "stage": {"name": "sft"}}
    about = {"group": "11-22/10-00", "tags": ["a"], "note": "why", "stage": "sft"}
    assert describe_experiment(job, config) == {"name": "letters optimizer.lr=1e-4", **about}
    assert describe_experiment(job, {})["name"] == "optimizer.lr=1e-4"
    assert describe_experiment(job.parent, config)["name"] == "letters"


def test_config_of_a_replayed_run_may_have_any_values(tmp_path: Path) -> None:
    about = describe_experiment(tmp_path, {"run": {"name": 5, "tags": 7, "note": ["n"]}, "stage": "sft"})
    assert (about["name"], about["tags"], about["note"], about["stage"]) == ("5", [], "['n']", "")
    assert describe_experiment(tmp_path, {"run": None})["tags"] == []
    messages: list[str] = []
    program = "import sys, json; print(json.loads(sys.stdin.readline())['config']['day'], flush=True); sys.stdin.read()"
    process = TrackerProcess([sys.executable, "-c", program], tmp_path / "program", messages.append, messages.append)
    process.start(config={"day": datetime.date(2000, 1, 2)})
    finish_trackers([process], "completed", "")
    assert messages == ["2000-01-02"]


def test_mode_auto_is_online_only_with_a_key_and_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, timeout: float) -> None:
        raise OSError("no network")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert choose_mode("auto", None, "https://host", "WANDB_MODE") == ("offline", "no API key")
    assert choose_mode("auto", "key", "https://host", "WANDB_MODE") == ("offline", "https://host does not answer")
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: None)
    assert choose_mode("auto", "key", "https://host", "WANDB_MODE")[0] == "online"
    for chosen in ("offline", "disabled", "dryrun"):
        monkeypatch.setenv("WANDB_MODE", chosen)
        assert choose_mode("auto", "key", "https://host", "WANDB_MODE") == ("offline", f"WANDB_MODE={chosen}")
    assert choose_mode("online", None, "https://host", "WANDB_MODE")[0] == "online"
    monkeypatch.setenv("SWANLAB_MODE", "cloud")  # its name for online
    assert choose_mode("auto", None, "https://host", "SWANLAB_MODE") == ("online", "SWANLAB_MODE=cloud")


def test_history_is_read_in_the_order_of_steps_and_not_beyond_the_resume(tmp_path: Path) -> None:
    records = [
        {"kind": "train", "step": 1, "loss": 2.0, "time": 0.1, "attempt": 1},
        {"kind": "train", "step": 2, "loss": None, "lr": 1, "nonfinite": ["loss"], "time": 0.2, "attempt": 1},
        {"kind": "eval", "step": 2, "loss": 1.5, "time": 0.3, "attempt": 1},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records) + "damaged\n[]\n"
    text += f'{{"kind": "train", "step": {10**23}, "loss": 1.0}}\n{{"kind": "train", "step": -1, "loss": 1.0}}\n'
    text += '{"kind": "train", "step": 3, "loss": 1e305, "perplexity": 1.0142320547350045e+304}\n'
    (tmp_path / "metrics.jsonl").write_text(text + json.dumps({"kind": "train", "step": 3, "loss": 1.0}) + "\n")
    (tmp_path / "samples.jsonl").write_text(
        '{"step": 1, "prompt": "p\\u0007", "answer": "a"}\n{"step": 1, "prompt": "q", "answer": "b"}\n'
    )
    message = start_message(folder=str(tmp_path / "wandb"), history={"metrics": len(text), "samples": 1000})
    messages = list(read_history(read_start(message)))
    assert [(message["event"], message["step"]) for message in messages] == [
        ("log", 1),
        ("samples", 1),
        ("log", 2),
        ("log", 2),
        ("log", 3),
    ]
    assert [message["numbers"] for message in messages if message["event"] == "log"] == [
        {"loss": 2.0},
        {"lr": 1},
        {"loss": 1.5},
        {"perplexity": math.exp(700)},  # as large as the engine logs it
    ]
    assert [sample["prompt"] for sample in messages[1]["samples"]] == ["p\\x07", "q"]


def test_program_finishes_as_failed_when_the_trainer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed trainer sends no `finish`: its end of the pipe is closed."""
    calls: list[tuple] = []

    class Log:
        location, history_from = "there", None

        def __init__(self, experiment: program.Experiment) -> None:
            calls.append(("open", experiment.id))

        def log(self, *message: object) -> None:
            calls.append(message)

        def finish(self, *message: object) -> None:
            calls.append(message)

    (tmp_path / "wandb").mkdir()
    lines = [
        start_message(folder=str(tmp_path / "wandb")),
        {"event": "log", "kind": "train", "step": 1, "numbers": {"loss": 1.0}},
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(program.os, "nice", lambda niceness: None)
    monkeypatch.setattr(program.signal, "alarm", lambda seconds: None)
    program.run_program(Log)
    assert calls == [
        ("open", "abc"),
        ("train", 1, {"loss": 1.0}),
        ("failed", "the training process ended without a final message"),
    ]


def test_link_in_the_folder_of_a_tracker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "latest-run").symlink_to(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(start_message(folder=str(tmp_path / "wandb"))) + "\n"))
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(program.os, "nice", lambda niceness: None)
    with pytest.raises(UserError, match="no link is followed"):
        program.run_program(lambda experiment: pytest.fail("opened"))
