"""The list of all runs: read from run.json, whatever else is in the folder; its lineage and links never lead out of it."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from report_fixtures import HOSTILE, make_run, make_sweep, train_record

from runner.reporting.page_server import PageServer, list_pages, page_bytes
from runner.reporting.run_list import (
    BROKEN,
    FOREIGN,
    ListedRun,
    RunList,
    age_text,
    file_link,
    lineage_trees,
    list_page,
    list_text,
    scan_runs,
)


def rows_of(root: Path) -> dict[str, ListedRun]:
    return {str(row.folder.relative_to(root)): row for row in scan_runs(root).rows}


def file_page(root: Path) -> str:
    return list_page(scan_runs(root), lambda row: file_link(row, root / "index.html"), is_served=False)


def test_list_has_runs_sweeps_jobs_and_what_is_neither(tmp_path: Path) -> None:
    make_run(tmp_path / "d" / "run", name="base", tags=["a"], note="n")
    make_sweep(tmp_path / "multirun" / "d" / "s", {"seed=1": {}, "seed=2": {"status": "failed", "outcome": "diverged"}})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    (tmp_path / "killed" / ".hydra").mkdir(parents=True)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{torn")
    os.symlink("/etc", tmp_path / "linked")
    rows = rows_of(tmp_path)
    kinds = {name: (row.kind, row.status) for name, row in rows.items()}
    assert kinds == {
        "d/run": ("run", "completed"), "multirun/d/s": ("sweep", "completed"), "multirun/d/s/seed=1": ("job", "completed"),
        "multirun/d/s/seed=2": ("job", "diverged"), "notes": ("other", FOREIGN), "killed": ("other", BROKEN), "torn": ("other", BROKEN), "linked": ("other", FOREIGN),
    }  # fmt: skip
    run = rows["d/run"]
    assert (run.label, run.tags, run.note, run.stage, run.model, run.data, run.evaluation_loss) == (
        "base",
        ["a"],
        "n",
        "pretrain",
        "tiny",
        "rows.jsonl",
        2.5,
    )
    assert rows["multirun/d/s"].evaluation_loss == 2.5 and "3 other folders" not in list_text(scan_runs(tmp_path))


def test_list_calls_a_run_without_its_process_interrupted(tmp_path: Path) -> None:
    gone = {"host": os.uname().nodename, "pid": 2**22 + 1, "boot_id": None, "start_ticks": 1}
    records = [train_record(step, 3.0) for step in range(1, 400)] + [train_record(400, 2.25)]
    make_run(tmp_path / "killed", records, status="running", outcome=None, metrics={}, step=100, **gone)
    make_run(tmp_path / "other_host", records, status="running", outcome=None, metrics={}, host="another")
    rows = rows_of(tmp_path)
    assert (rows["killed"].status, rows["killed"].training_loss, rows["killed"].step) == ("interrupted", 2.25, 400)
    assert rows["other_host"].status == "running"


def test_sweep_of_jobs_that_were_judged_differently_has_no_loss(tmp_path: Path) -> None:
    make_sweep(tmp_path / "s", {"seed=1": {}, "seed=2": {"evaluation": {"on": "training"}}})
    assert rows_of(tmp_path)["s"].evaluation_loss is None


def test_lineage_connects_runs_of_the_list_only(tmp_path: Path) -> None:
    pretrain = make_run(tmp_path / "pretrain")
    sweep = make_sweep(
        tmp_path / "s", {"seed=1": {"init_from": f"{pretrain}/model"}, "seed=2": {"init_from": str(pretrain)}}
    )
    make_run(tmp_path / "dpo", init_from=str(sweep / "seed=2" / "checkpoints" / "step-1"))
    make_run(tmp_path / "far", init_from="/etc")
    make_run(tmp_path / "relative", init_from="../../pretrain")
    make_run(tmp_path / "above", init_from=str(tmp_path))
    runs = scan_runs(tmp_path)
    parents = {
        str(row.folder.relative_to(tmp_path)): str(row.start.folder.relative_to(tmp_path))
        for row in runs.rows
        if row.start
    }
    assert parents == {"s": "pretrain", "s/seed=1": "pretrain", "s/seed=2": "pretrain", "dpo": "s/seed=2"}
    (tree,) = lineage_trees(runs)
    assert [tree.label, tree.children[0].kind, tree.children[0].children[0].folder.name] == [
        f"{tmp_path.name}/pretrain",
        "sweep",
        "dpo",
    ]


def test_lineage_that_is_a_circle_is_cut(tmp_path: Path) -> None:
    make_run(tmp_path / "a", init_from=str(tmp_path / "b"))
    make_run(tmp_path / "b", init_from=str(tmp_path / "c"))
    make_run(tmp_path / "c", init_from=str(tmp_path / "a"))
    make_run(tmp_path / "self", init_from=str(tmp_path / "self"))
    assert len(lineage_trees(scan_runs(tmp_path))) == 1 and file_page(tmp_path).count('class="edge"') == 2


def test_list_links_to_pages_of_its_own_runs_and_escapes_every_text(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "a b#c",
        name=HOSTILE,
        note=HOSTILE,
        tags=[HOSTILE],
        stage=HOSTILE,
        init_from="javascript:alert(1)",
        data=[{"file": HOSTILE}],
    )
    (run / "report.html").write_text("x")
    make_run(tmp_path / "child", init_from=str(run), error=HOSTILE, status="failed")
    outside = tmp_path.parent / "outside.html"
    outside.write_text("x")
    linked = make_run(tmp_path / "linked")
    os.symlink(outside, linked / "report.html")
    page = file_page(tmp_path)
    assert {*re.findall(r'href="([^"]*)"', page)} == {"a%20b%23c/report.html"}
    assert "<img" not in page and "alert(1)</script>" not in page and "\x1b" not in page and "\u202e" not in page


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"status": "completed", "started": 1e400}',
        b'{"status": "completed", "metrics": [1], "tags": "x", "init_from": 3, "data": 1}',
    ],
)
def test_list_is_written_whatever_run_json_holds(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_bytes(content)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_bytes(content)
    assert file_page(tmp_path).endswith("</html>") and list_text(scan_runs(tmp_path))


@pytest.mark.parametrize("value", [1, {"a": [1]}])
def test_page_of_a_listed_run_is_made_whatever_types_run_json_has(tmp_path: Path, value: object) -> None:
    fields = json.loads((make_run(tmp_path / "whole") / "run.json").read_text())
    for name in [
        *fields,
        "tags",
        "note",
        "name",
        "attempts",
        "error",
        "export",
        "evaluations",
        "ended",
        "recovered",
        "degraded",
    ]:
        if name != "status":
            make_run(tmp_path / name, **{name: value})
            assert page_bytes(tmp_path / name).endswith(b"</html>")
    assert file_page(tmp_path).endswith("</html>")


def test_list_reads_hundreds_of_runs_without_their_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        make_run(tmp_path / f"{number:03d}", [train_record(1)])
    opened: list[str] = []
    monkeypatch.setattr("runner.reporting.run_list.last_records", lambda path: opened.append(path.name))
    assert len(scan_runs(tmp_path).rows) == 60 and opened == []


def test_list_keeps_of_run_json_only_what_it_shows(tmp_path: Path) -> None:
    make_run(
        tmp_path / "run",
        note="n",
        config={"x": "y" * 9999},
        error="e" * 9999,
        data=[{"file": f"/d/{number}.txt", "rows": 1} for number in range(5)],
    )
    [row] = scan_runs(tmp_path).rows
    assert len(repr(row)) < 2500 and row.note == "n" and row.data == "0.txt, 1.txt, 2.txt and 2 more"


@pytest.mark.parametrize(("limit", "value"), [("MAX_JSON_BYTES_IN_ALL", 2000), ("MAX_FOLDERS", 5)])
def test_list_ends_with_a_notice_where_folders_hold_too_much(
    limit: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        make_run(tmp_path / f"{number}") if limit == "MAX_JSON_BYTES_IN_ALL" else (tmp_path / f"{number}").symlink_to(
            tmp_path
        )
    monkeypatch.setattr(f"runner.reporting.run_list.{limit}", value)
    runs = scan_runs(tmp_path)
    assert runs.is_cut and len(runs.rows) < 9 and "this list is not complete" in file_page(tmp_path)


def test_served_page_of_a_run_is_found_without_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "one")
    (tmp_path / "through").symlink_to(tmp_path)
    scanned: list[Path] = []
    monkeypatch.setattr("runner.reporting.page_server.scan_runs", lambda root: scanned.append(root) or RunList(root))
    monkeypatch.setattr("runner.reporting.page_server.MAX_PAGE_SHARE", 1e-9)
    pages = list_pages(tmp_path)
    assert (
        pages("run/one/", {})
        and not scanned
        and pages("run/through/one/", {}) is None
        and pages("run/one/../one/", {}) is None
    )
    with PageServer(pages, 0) as server:
        assert server.page("/") == server.page("/") and scanned == [tmp_path]


def test_server_closes_extra_connections_and_those_without_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.reporting.page_server.MAX_PAGE_CONNECTIONS", 1)
    monkeypatch.setattr("runner.reporting.page_server.PageHandler.timeout", 300)
    with PageServer(lambda path, query: b"page", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with (
                socket.create_connection(server.server_address, timeout=20) as slow,
                socket.create_connection(server.server_address, timeout=300) as other,
            ):
                slow.sendall(b"GET / HTTP/1.1\r\nHost:")
                assert other.recv(1) == b"" and len(server.deadlines) == 1
                server.deadlines.update(dict.fromkeys(server.deadlines, 0.0))  # the deadline has passed
                assert slow.recv(1) == b""
        finally:
            server.shutdown()
            thread.join()


def test_age_and_order_are_those_of_the_first_attempt(tmp_path: Path) -> None:
    times = [f"2026-11-{day}T10:00:00+00:00" for day in (20, 21, 22)]
    make_run(
        tmp_path / "resumed",
        started=times[2],
        attempts=[{"attempt": 1, "started": times[0]}, {"attempt": 2, "started": times[2]}],
    )
    make_run(tmp_path / "newer", started=times[1], attempts=[{"attempt": 1, "started": times[1]}])
    make_run(tmp_path / "damaged", started=times[2], attempts=[None])
    started = {row.folder.name: row.begun for row in scan_runs(tmp_path).rows}
    assert [*started] == ["damaged", "newer", "resumed"]
    assert (
        started["resumed"] == datetime.fromisoformat(times[0]).timestamp()
        and started["damaged"] == datetime.fromisoformat(times[2]).timestamp()
    )


def test_age_has_one_unit() -> None:
    assert [age_text(0.0, now) for now in (5.0, 120.0, 7200.0, 90_000.0)] == ["5 s", "2 min", "2 h", "1 d"]
    assert age_text(None, 0.0) == "" and age_text(10.0, 0.0) == "0 s"


@contextmanager
def serving(pages: Any) -> Iterator[Any]:
    """Yield `get(address)`, which returns (status, text)."""
    with PageServer(pages, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def get(
            address: str, host: str = "127.0.0.1", port: int = server.server_port, site: str = "none"
        ) -> tuple[int, str]:
            headers = {"Host": f"{host}:{port}", "Sec-Fetch-Site": site}
            request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/{address}", headers=headers)
            try:
                with urllib.request.urlopen(request) as answer:
                    return answer.status, answer.read().decode()
            except HTTPError as error:
                return error.code, error.read().decode()

        try:
            yield get
        finally:
            server.shutdown()
            thread.join()


def test_served_list_has_a_page_for_each_run_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.reporting.page_server.PAGE_SECONDS", -1.0)
    monkeypatch.setattr("runner.reporting.page_server.MAX_PAGE_SHARE", 1e9)
    root = tmp_path / "outputs"
    make_run(root / "d" / "one", name="first run")
    make_run(root / "d" / "two")
    make_sweep(root / "s", {"seed=1": {}})
    make_run(tmp_path / "secret")
    linked = make_run(root / "linked")
    (linked / "train.log").symlink_to(tmp_path / "secret" / "run.json")
    with serving(list_pages(root)) as get:
        status, page = get("")
        assert (
            status == 200 and 'href="run/d/one/"' in page and 'href="run/s/seed%3D1/"' in page and '"reload":5' in page
        )
        assert (
            get("run/d/one/")[0] == get("run/s/seed%3D1/")[0] == get("run/s/")[0] == 200
            and not (root / "d" / "one" / "report.html").exists()
        )
        assert get("compare?run=d/one&run=d/two")[1].count("<tr data-run") == 2
        assert [
            get(address)[0]
            for address in (
                "run/../secret/",
                "run/%2e%2e/secret/",
                "run//etc/",
                "d/one",
                "run/d/one/metrics.jsonl",
                "run/",
            )
        ] == [404] * 6
        assert [
            get(address)[0]
            for address in ("compare", "compare?run=../secret", "compare?run=d/one&run=gone", "run/linked/")
        ] == [400] * 4
        assert [
            get("", **request)[0]
            for request in ({"host": "evil.example"}, {"port": 1}, {"site": "cross-site"}, {"site": "same-origin"})
        ] == [403] * 3 + [200]
        (root / "d" / "one" / "run.json").write_text(json.dumps({"status": "failed", "name": "renamed"}))
        assert "first run" in page and "renamed" in get("")[1]
