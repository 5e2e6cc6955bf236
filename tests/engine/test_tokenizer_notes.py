"""Tokenizers without pad_token or bos_token, and templates that training reads in another way: what is computed, and
what is printed before the first step.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data.tokenize.origin import SAMPLE_TOKENIZER
from runner.engine.loop import train

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.fixture
def changed_tokenizer(tmp_path: Path):
    """`changed_tokenizer(bos_token=None)`: override for the sample's tokenizer with these values in
    tokenizer_config.json.
    """

    def change(template: str | None = None, **values: str | None) -> str:
        folder = shutil.copytree(SAMPLE_TOKENIZER, tmp_path / "changed")
        config = json.loads((folder / "tokenizer_config.json").read_text()) | values
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return f"data.tokenizer={folder}"

    return change


def losses(logged, folder: Path) -> list[tuple[float, int, int]]:
    return [(record["loss"], record["loss_tokens"], record["tokens"]) for record in logged(folder)]


@pytest.mark.slow
def test_padding_with_the_end_token_changes_no_loss_and_is_printed(
    make_run, logged, changed_tokenizer, tmp_path: Path
) -> None:
    for folder, override in (("own", []), ("eos", [changed_tokenizer(pad_token=None)])):
        state = make_run("sft", "train.max_steps=3", *override, folder=folder)
        train(state)
    assert state.loader.collate.keywords["pad_id"] == state.tokenizer.eos_id
    assert losses(logged, tmp_path / "eos") == losses(logged, tmp_path / "own")
    assert (
        "no pad_token: batches are padded with its eos_token <|im_end|>" in (tmp_path / "eos" / "train.log").read_text()
    )
    assert "pad_token" not in (tmp_path / "own" / "train.log").read_text()


def test_texts_of_a_tokenizer_without_bos_begin_with_their_first_token(make_run, changed_tokenizer) -> None:
    state = make_run("pretrain", changed_tokenizer(bos_token=None))
    first = state.pipeline.train[0][0].sequences[0]
    assert state.tokenizer.decode(first.ids.tolist(), skip_special=False).endswith("<|im_end|>")
    assert first.ids[0] != state.tokenizer.control_ids["<|im_start|>"] and first.loss_mask.tolist() == [False] + [
        True
    ] * (len(first.ids) - 1)
    assert "the tokenizer has no bos_token: texts begin without one" in state.pipeline.notes


def test_template_without_an_end_token_warns_also_from_the_cache(
    make_run, changed_tokenizer, monkeypatch, tmp_path: Path
) -> None:
    override = changed_tokenizer(PLAIN)
    make_run("sft", override)
    monkeypatch.setattr("data.tokenize.chat_template.ChatTemplate.__init__", lambda *_: pytest.fail("rendered again"))
    moved = Path(override.partition("=")[2]).rename(tmp_path / "moved")
    state = make_run("sft", f"data.tokenizer={moved}")
    [warning] = [warning for warning in state.pipeline.warnings if "writes no end token" in warning]
    assert "<|im_end|> is added" in warning and f"({state.tokenizer.folder}/chat_template.jinja)" in warning
    row = state.pipeline.train[0][0].sequences[0]
    assert row.ids[row.loss_mask][-1] == state.tokenizer.eos_id
