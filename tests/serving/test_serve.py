"""The command serve.py: OpenAI's client and lm-evaluation-harness talk to it, Ctrl-C ends its work, unsafe addresses
are refused.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.errors import INTERRUPTED_BY_USER, UserError
from models.generate import generate
from runner.inference.load import LoadedModel
from runner.serving.command import API_KEY, ServeConfig, serve

REPO = Path(__file__).parents[2]
KEY = "secret"
MESSAGES: list[Any] = [{"role": "user", "content": "Where does Tolo live?"}]


@contextmanager
def started(folder: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start serve.py; yield it and its port, once it says that it serves.

    A command that hangs is ended by the time limit of the test.
    """
    command = [
        sys.executable,
        str(REPO / "runner" / "serve.py"),
        f"run={folder}",
        "port=0",
        "name=small",
        "device=cpu",
        *overrides,
    ]
    process = subprocess.Popen(
        command, env=os.environ | {API_KEY: KEY, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if ready := re.search(r"serving small at http://127\.0\.0\.1:(\d+)/v1 \(with a key\)", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield process, int(ready[1])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def port(served_folder: Path) -> Iterator[int]:
    with started(served_folder) as (_, port):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Any:
    openai = pytest.importorskip("openai", reason="the client of the interface; part of the extra dev")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


@pytest.mark.slow
def test_serve_talks_to_the_client_of_openai(client: Any, trained: LoadedModel) -> None:
    import openai

    settings: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": MESSAGES,
        "temperature": 0,
        "max_completion_tokens": 12,
    }
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].usage == whole.usage
    text = client.completions.create(model="small", prompt="Tolo", temperature=0, max_tokens=6).choices[0].text
    ids = [*trained.tokenizer.bos_ids, *trained.tokenizer.encode("Tolo")]
    answer = generate(
        trained.model,
        [ids],
        max_new_tokens=6,
        temperature=0,
        top_k=0,
        top_p=1,
        repetition_penalty=1,
        stop_ids=list(trained.tokenizer.stop_ids),
    )
    assert text == trained.tokenizer.decode(answer[0])
    with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="presence_penalty=1 is not supported"):
        client.completions.create(model="small", prompt="a", presence_penalty=1)
    with pytest.raises(openai.NotFoundError, match="it has 'small'"):
        client.completions.create(model="gpt", prompt="a")


@pytest.mark.slow
def test_serve_gives_lm_eval_the_score_that_it_has_in_process(
    port: int, served_folder: Path, trained: LoadedModel, tmp_path: Path, monkeypatch: Any
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="part of the extra eval")
    from lm_eval.tasks import TaskManager

    rows = [
        {"q": f"{name} lives in", "c": [" Hale.", " 湖边。", " def f(x):"], "a": i % 3}
        for i, name in enumerate(["Tolo", "Mina", "托洛", "The goat"])
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\ntest_split: test\ndoc_to_text: '{{{{q}}}}'\n"
    kinds = {
        "choice": "output_type: multiple_choice\ndoc_to_choice: '{{c}}'\ndoc_to_target: '{{a}}'\nmetric_list: [{metric: acc}]\n",
        "answer": "output_type: generate_until\ndoc_to_target: '{{c[0]}}'\nmetric_list: [{metric: exact_match}]\n"
        "generation_kwargs: {until: ['lives'], max_gen_toks: 8, do_sample: false, temperature: 0}\n",
    }
    for name, text in kinds.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{head}{text}")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    arguments = {
        "base_url": f"http://127.0.0.1:{port}/v1/completions",
        "model": "small",
        "tokenizer": str(served_folder),
        "max_length": 256,
    }
    manager = TaskManager(include_path=str(tmp_path))
    settings: dict[str, Any] = {
        "tasks": list(kinds),
        "task_manager": manager,
        "bootstrap_iters": 0,
        "log_samples": True,
    }
    through = lm_eval.simple_evaluate("local-completions", model_args=arguments | {"num_concurrent": 2}, **settings)

    from runner.inference.harness.model import HarnessModel
    from runner.tracking.progress import EvaluationProgress

    inside = lm_eval.simple_evaluate(HarnessModel(trained, 4, EvaluationProgress("")), **settings)
    for name, metric in (("choice", "acc,none"), ("answer", "exact_match,none")):
        assert through["results"][name][metric] == inside["results"][name][metric]
    responses = [
        [row["filtered_resps"] for name in kinds for row in result["samples"][name]] for result in (through, inside)
    ]
    for a, b in zip(*responses, strict=True):
        assert (
            a == b
            if isinstance(a[0], str)
            else [float(x) for x, _ in a] == pytest.approx([float(x) for x, _ in b], abs=1e-3)
        )


@pytest.mark.slow
def test_serve_ends_answers_and_itself_at_ctrl_c(served_folder: Path) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with started(served_folder, "max_batch=1", "max_waiting=128") as (process, port):
        client = http.client.HTTPConnection("127.0.0.1", port)
        body = {"prompt": "Tolo", "max_tokens": 200, "n": 128, "temperature": 1, "stream": True}
        client.request("POST", "/v1/completions", json.dumps(body), headers)
        assert client.getresponse().readline().startswith(b"data: {")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == INTERRUPTED_BY_USER


def configured(**changes: Any) -> ServeConfig:
    values: dict[str, Any] = {
        "run": "x",
        "host": "127.0.0.1",
        "port": 0,
        "name": None,
        "max_batch": 1,
        "max_waiting": 9,
        "max_new_tokens": 8,
        "device": "cpu",
        "dtype": "fp32",
    }
    return ServeConfig(**values | changes)


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"host": "0.0.0.0"}, "", f"without a key other machines could use the model.*{API_KEY}"),
        ({"host": "no.such.host.invalid"}, "", "host is no address"),
        ({"port": 70000}, "", "port must be in"),
        ({}, "a b", "the key has a space"),
    ],
)
def test_serve_refuses_addresses_and_keys_that_are_not_safe(
    tmp_path: Path, monkeypatch: Any, changes: dict[str, Any], key: str, message: str
) -> None:
    monkeypatch.setenv(API_KEY, key)
    with pytest.raises(UserError) as refused:
        serve(configured(**changes), tmp_path)
    assert re.search(message, f"{refused.value.message} {refused.value.fix}")


def test_serve_refuses_a_port_in_use_before_it_loads_the_model(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            serve(configured(port=port), tmp_path)


def test_serve_names_the_extra_that_is_not_installed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError) as refused:
        serve(configured(), tmp_path)
    assert "needs the package uvicorn" in refused.value.message and "lm-runner[serve]" in refused.value.fix
