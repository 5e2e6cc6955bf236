"""Models of the Hugging Face hub by name: the files of one commit in the local cache, recorded, and the same after a
resume.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from command_fixtures import TINY_MODEL, TINY_RUN, Call
from tiny_models import lora_config

from common.errors import UserError
from common.guarded_files import check_source_file
from common.hub import HubName, hub_name_of, parse_hub_name
from models.formats.hub import fetch_model
from models.formats.load import load_weights
from models.formats.save import save_adapter, save_model
from runner.config.resolve import resolve_model_overrides, resolve_model_run

FIRST, SECOND = "a" * 40, "b" * 40
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
}
Publish = Callable[..., Path]


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """`publish(commit, seed)` adds a commit of the model owner/name to the cache, as huggingface_hub lays it out; main
    means it from then on.
    """
    from tiny_models import TOKENIZER, random_model

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def add(commit: str = FIRST, seed: int = 0) -> Path:
        home = tmp_path / "hub" / "models--owner--name"
        snapshot, blobs = home / "snapshots" / commit, home / "blobs"
        model = random_model(seed=seed, **SMALL)
        save_model(tmp_path / "published", model, model.cfg, TOKENIZER)
        for folder in (snapshot, blobs, home / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (tmp_path / "published").iterdir():
            file.rename(blobs / f"{commit[:1]}-{file.name}")
            (snapshot / file.name).symlink_to(f"../../blobs/{commit[:1]}-{file.name}")
        (home / "refs" / "main").write_text(commit)
        return snapshot

    return add


@pytest.mark.parametrize("text", ["owner/name", "Qwen/Qwen2.5-0.5B", "a/b@v1.0", "a/b@refs/pr/1", f"a/b@{FIRST}"])
def test_hub_name_is_a_repository_and_a_revision(text: str) -> None:
    name = parse_hub_name(text)
    assert name is not None and str(name) == text and name.revision == (text.partition("@")[2] or "main")


def test_mistyped_path_into_a_local_folder_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    assert parse_hub_name("outputs/my_run") is None and parse_hub_name("outputs/my_run@main") is not None


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "a/b/c",
        "/a/b",
        "../b",
        "a/..",
        "a/b@../x",
        "a/b.",
        "-a/b",
        "a b/c",
        "a--b/c",
        "out/pretrain_768.pth",
        "auto",
    ],
)
def test_text_that_is_no_hub_name_stays_a_path(text: str) -> None:
    assert parse_hub_name(text) is None and resolve_model_overrides([f"init_from={text}"]) == [f"init_from={text}"]


@pytest.mark.parametrize("folder", ['models--a")--b', "models--a--b\n```", "models--a--`b`", "models--..--b"])
def test_path_of_a_run_with_odd_characters_is_no_hub_model(folder: str) -> None:
    assert hub_name_of(Path("/cache", folder, "snapshots", FIRST)) is None, (
        "the name is written into commands of the model card"
    )


def test_local_folder_comes_before_the_hub(publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = publish()
    monkeypatch.chdir(tmp_path)
    assert (
        resolve_model_overrides(["init_from=owner/name"]) == [f"init_from={snapshot}"]
        and resolve_model_run("owner/name") == snapshot
    )
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert parse_hub_name("owner/name") is None and resolve_model_overrides(["init_from=owner/name"]) == [
        "init_from=owner/name"
    ]
    assert parse_hub_name("owner/name@main") is not None
    (tmp_path / "owner" / "name@main").mkdir()
    assert parse_hub_name("owner/name@main") is None


def test_several_models_of_a_sweep_become_folders(publish: Publish) -> None:
    first, second = publish(FIRST), publish(SECOND)
    assert resolve_model_overrides([f"init_from=owner/name@{FIRST},scratch,owner/name"]) == [
        f"init_from={first},scratch,{second}"
    ]
    assert resolve_model_overrides([f"model.path=owner/name@{FIRST}"]) == [f"model.path={first}"]


@pytest.mark.parametrize(
    "target",
    [
        "../../refs/main",
        f"../{SECOND}/config.json",
        "../../../models--owner--other/blobs/x",
        "../../blobs/folder/x",
        "../../blobs",
    ],
)
def test_link_of_a_snapshot_is_followed_to_a_blob_of_its_model_only(publish: Publish, target: str) -> None:
    snapshot = publish()
    for name in ("../../blobs/folder/x", "../../../models--owner--other/blobs/x", f"../{SECOND}/config.json"):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text("{}")
    check_source_file(snapshot / "config.json")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(target)
    with pytest.raises(UserError, match="this is a link"):
        check_source_file(snapshot / "config.json")


@pytest.mark.slow
def test_run_records_the_commit_and_its_resume_never_takes_another(
    publish: Publish, call: Call, tmp_path: Path
) -> None:
    publish(FIRST)
    chat = {
        "messages": [{"role": "user", "content": "How many goats?"}, {"role": "assistant", "content": "Two goats."}]
    }
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 20)
    settings = [each for each in TINY_RUN if each not in TINY_MODEL and not each.startswith("data.max_length")]
    started = call(
        "stage=lora",
        *settings,
        "stage.lora.rank=2",
        "data.path=chats.jsonl",
        "data.max_length=64",
        "data.val_fraction=0",
        "init_from=owner/name",
        "hydra.run.dir=out",
    )
    assert started.returncode == 0, started.stderr
    assert f"owner/name@{FIRST} from the cache" in started.stderr + started.stdout
    for recorded in (
        json.loads((tmp_path / "out" / "run.json").read_text()),
        yaml.safe_load((tmp_path / "out" / ".hydra" / "config.yaml").read_text()),
    ):
        assert hub_name_of(Path(recorded["init_from"])) == HubName("owner/name", FIRST)
    base = json.loads((tmp_path / "out" / "model" / "adapter_config.json").read_text())
    assert (base["base_model_name_or_path"], base["revision"]) == ("owner/name", FIRST)
    of_base = load_weights(tmp_path / "hub" / "models--owner--name" / "snapshots" / FIRST)
    # an adapter may replace one of the two names of a tied weight
    assert load_weights(tmp_path / "out" / "model").keys() == {*of_base, "lm_head.weight"}
    publish(SECOND, seed=1)
    assert call("resume=out", "train.max_steps=3").returncode == 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["init_from"].endswith(FIRST)
    shutil.rmtree(tmp_path / "hub" / "models--owner--name" / "snapshots" / FIRST)
    refused = call("resume=out", "train.max_steps=4")
    assert refused.returncode == 2 and f"the model owner/name@{FIRST} is not here" in refused.stderr


def test_model_that_is_not_in_the_cache_is_refused_offline_with_what_to_type(
    publish: Publish, call: Call, rows: str, tmp_path: Path
) -> None:
    refused = call(rows, "init_from=owner/name", "hydra.run.dir=out")
    assert (
        refused.returncode == 2
        and "the model owner/name is not here: HF_HUB_OFFLINE=1 forbids to ask the hub" in refused.stderr
    )
    assert "hf download owner/name" in refused.stderr and not (tmp_path / "out").exists()
    (publish() / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"its cached copy lacks model\.safetensors"):
        fetch_model("owner/name@main", "init_from=owner/name")


class FakeHub:
    """A client of the hub for a repository with files of every format.

    `requested`: the files of the last download.
    """

    FILES = [
        "config.json",
        "tokenizer.json",
        "model-1.safetensors",
        "model.safetensors",
        "pytorch_model.bin",
        "model.gguf",
        "modeling.py",
        "onnx/model.onnx",
    ]

    def __init__(self, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        self.requested: list[str] = []
        self.error: Exception | None = None
        self.files = self.FILES
        self.snapshot = snapshot
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(model_info=self.model_info))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def model_info(self, repo: str, revision: str, **_: Any) -> SimpleNamespace:
        if self.error:
            raise self.error
        return SimpleNamespace(
            sha=self.snapshot.name, siblings=[SimpleNamespace(rfilename=name, size=10) for name in self.files]
        )

    def download(self, repo: str, revision: str, allow_patterns: list[str], **_: Any) -> str:
        self.requested = allow_patterns
        return str(self.snapshot)


def test_download_takes_the_files_of_a_model_and_no_code(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(publish(), monkeypatch)
    assert fetch_model("owner/name", "init_from=owner/name") == hub.snapshot
    assert hub.requested == ["config.json", "tokenizer.json", "model.safetensors"]
    hub.files = [
        "config.json",
        "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
        "modeling.py",
    ]
    fetch_model("owner/name", "init_from=owner/name")
    assert hub.requested == hub.files[:-1]
    hub.files = ["config.json", "model-q4.gguf"]
    with pytest.raises(UserError, match=r"has no model\.safetensors and no pytorch_model\.bin, but model-q4\.gguf"):
        fetch_model("owner/name", "init_from=owner/name")


def test_download_is_watched_in_its_folder_of_the_cache_with_its_size(
    publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    hub = FakeHub(publish(), monkeypatch)
    before = are_progress_bars_disabled()  # another test of this process may have disabled them
    watched: list[Any] = []

    @contextmanager
    def watch(*download: Any) -> Iterator[None]:
        yield
        watched.append((*download, are_progress_bars_disabled()))

    monkeypatch.setattr(
        hub, "download", lambda *args, **_: watched.append(are_progress_bars_disabled()) or str(hub.snapshot)
    )
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.download)
    fetch_model("owner/name", "init_from=owner/name", watch)
    assert (
        watched == [True, ("downloading owner/name", tmp_path / "hub" / "models--owner--name", 30, before)]
        and are_progress_bars_disabled() == before
    )


def test_hub_that_cannot_be_reached_leaves_the_cached_commit(
    publish: Publish, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = FakeHub(publish(), monkeypatch)
    hub.error = ConnectionError("no route")
    assert fetch_model("owner/name", "init_from=owner/name") == hub.snapshot
    assert f"the hub cannot be reached (ConnectionError); owner/name@{FIRST} from the cache" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"the hub cannot be reached .* has no copy of it"):
        fetch_model("owner/other", "init_from=owner/other")


def test_base_model_of_a_hub_adapter_comes_from_the_cache_only(publish: Publish, tmp_path: Path) -> None:
    from tiny_models import TOKENIZER

    from models.formats.load import load_model
    from models.lora import add_lora

    model = load_model(snapshot := publish())
    lora = lora_config(2, 4.0, 0.0, ["q_proj"])
    add_lora(model, lora)
    save_adapter(tmp_path / "adapter", model, lora, str(snapshot), TOKENIZER)
    assert load_model(tmp_path / "adapter").cfg == model.cfg
    shutil.rmtree(tmp_path / "hub")
    with pytest.raises(UserError, match="base model does not exist") as error:
        load_model(tmp_path / "adapter")
    assert "hf download owner/name" in error.value.fix
