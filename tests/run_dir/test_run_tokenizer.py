"""The tokenizer of runs, by command: it comes with the weights, is kept in the run directory, and another one is
refused.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from command_fixtures import TINY_RUN, Call, Result, is_user_error

from common import paths
from common.errors import UserError
from data.tokenize.origin import SAMPLE_TOKENIZER
from data.tokenize.tokenizer import Tokenizer

CHATS = [
    {"conversations": [{"role": "user", "content": f"{i} goats?"}, {"role": "assistant", "content": f"{i} sheep"}]}
    for i in range(40)
]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tokenizer of 6,400 tokens as the sample's, of which two have other ids, and a pretraining run with
    it.
    """
    from runner.cli.entrypoint import train_command

    root = tmp_path_factory.mktemp("pretrained")
    other = shutil.copytree(SAMPLE_TOKENIZER, root / "other")
    stored = json.loads((other / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(stored))
    (root / "rows.jsonl").write_text(
        "".join(f'{{"text": "{number} goats sing in the rain"}}\n' for number in range(40))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "REPO_ROOT", root)
        patch.setenv("OMP_WAIT_POLICY", "passive")
        train_command(
            [
                *TINY_RUN,
                f"data.path={root / 'rows.jsonl'}",
                f"data.tokenizer={other}",
                f"hydra.run.dir={root / 'base'}",
            ],
        )
    return root


@pytest.fixture
def base(pretrained: Path, workspace: Path) -> Path:
    """A copy of the run."""
    shutil.copytree(pretrained, workspace, dirs_exist_ok=True)
    return workspace / "base"


@pytest.fixture
def other(base: Path) -> Path:
    """A copy of its tokenizer."""
    return base.parent / "other"


@pytest.fixture
def sft(call: Call, workspace: Path):
    """`sft(*overrides)`: the end of an SFT on a few rows."""
    (workspace / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))

    def sft(*overrides: str) -> Result:
        return call("stage=sft", *TINY_RUN, f"data.path={workspace / 'chats.jsonl'}", *overrides)

    return sft


def fingerprint(folder: Path) -> str:
    return Tokenizer.load(folder).fingerprint


@pytest.mark.slow
def test_tokenizer_follows_the_weights_from_stage_to_stage(
    sft, call: Call, workspace: Path, base: Path, other: Path
) -> None:
    wanted = fingerprint(other)
    refused = sft("init_from=base", f"data.tokenizer={SAMPLE_TOKENIZER}", "hydra.run.dir=refused")
    assert (
        refused.returncode == 2 and "tokens have the same id" in refused.stderr and not (workspace / "refused").exists()
    )

    assert sft("hydra.run.dir=tuned", "train.max_steps=1").returncode == 0
    tuned, fields = workspace / "tuned", json.loads((workspace / "tuned" / "run.json").read_text())
    assert (fields["init_from"], fields["tokenizer_source"]) == (str(base), str(base / "tokenizer"))
    assert fingerprint(tuned / "tokenizer") == fingerprint(tuned / "model") == wanted
    assert fields["fingerprints"]["tokenizer"] == Tokenizer.load(other).tokens_fingerprint

    shutil.rmtree(other)  # a resume and its export do not depend on where the tokenizer came from
    shutil.rmtree(base / "tokenizer")
    shutil.copytree(SAMPLE_TOKENIZER, base / "model", dirs_exist_ok=True)
    resumed = call("resume=tuned", "train.max_steps=2")
    assert resumed.returncode == 0, resumed.stderr
    assert fingerprint(tuned / "model") == wanted and json.loads((tuned / "run.json").read_text())["exact"]


@pytest.mark.slow
def test_another_tokenizer_cannot_be_typed_for_a_resume(call: Call, base: Path) -> None:
    refused = call("resume=base", "train.max_steps=3", f"data.tokenizer={SAMPLE_TOKENIZER}")
    assert refused.returncode == 2 and "the tokenizer of a run does not change" in refused.stderr


@pytest.mark.slow
def test_weights_without_a_tokenizer_are_refused_before_the_run_directory(sft, workspace: Path, base: Path) -> None:
    weights = shutil.copytree(base / "model", workspace / "weights")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (weights / name).unlink()
    refused = sft("init_from=weights", "hydra.run.dir=refused")
    assert refused.returncode == 2 and "data.tokenizer=DIR" in refused.stderr and not (workspace / "refused").exists()


def test_minimind_experiment_without_its_tokenizer_is_refused(call: Call, workspace: Path, rows: str) -> None:
    refused = call("experiment=minimind_pretrain", rows, "hydra.run.dir=refused")
    assert (
        is_user_error(refused)
        and "github.com/jingyaogong/minimind" in refused.stderr
        and not (workspace / "refused").exists()
    )


def test_rows_command_shows_the_tokens_of_the_weights(call_command, sft, workspace: Path, base: Path) -> None:
    shown = call_command(
        "rows.py",
        "stage=sft",
        "init_from=base",
        f"data.path={workspace / 'chats.jsonl'}",
        "data.val_path=null",
        "n=1",
        "ids=true",
        "plain=true",
    )
    ids_of_goats = Tokenizer.load(base / "model").encode(" goats")
    assert shown.returncode == 0 and " ".join(map(str, ids_of_goats)) in shown.stdout.replace(",", " "), shown.stdout


@pytest.mark.slow
def test_run_refused_for_its_data_leaves_no_copy_of_the_tokenizer(call: Call, workspace: Path) -> None:
    (workspace / "bad.jsonl").write_text('{"nothing": 1}\n')
    assert (
        call(*TINY_RUN, f"data.path={workspace / 'bad.jsonl'}", "data.schema=text", "hydra.run.dir=refused").returncode
        == 2
    )
    assert not (workspace / "refused").exists()


@pytest.mark.slow
def test_run_of_an_earlier_version_resumes_with_the_folder_it_names(call: Call, base: Path, other: Path) -> None:
    shutil.rmtree(base / "tokenizer")
    fields = json.loads((base / "run.json").read_text())
    del fields["tokenizer_source"]
    (base / "run.json").write_text(json.dumps(fields))
    resumed = call("resume=base", "train.max_steps=3")
    assert resumed.returncode == 0, resumed.stderr
    assert fingerprint(base / "tokenizer") == fingerprint(other)


def test_tokenizer_without_template_or_with_too_many_tokens_is_refused(
    tmp_path: Path,
) -> None:
    from runner.config.compose import compose_config
    from runner.engine.build import load_tokenizer

    folder = shutil.copytree(SAMPLE_TOKENIZER, tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert load_tokenizer(compose_config([f"data.tokenizer={folder}"]), tmp_path).vocab_size == 6400  # of texts
    chats = compose_config(["stage=sft", f"data.tokenizer={folder}"])
    with pytest.raises(
        UserError, match="stage=sft trains on conversations, and the tokenizer has no chat template"
    ) as refused:
        load_tokenizer(chats, tmp_path)
    assert f"{folder}/chat_template.jinja" in refused.value.fix
    with pytest.raises(
        UserError, match=r"tokenizer vocabulary \(6402\) is larger than that of the weights \(6400\)"
    ) as refused:
        dataclasses.replace(chats, init_from=str(tmp_path)).check_vocabulary(6402)
    assert "model.vocab_size" not in refused.value.fix
