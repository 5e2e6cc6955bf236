"""The tokenizer of a run: `data.tokenizer`, by default the one that belongs to the weights that the run starts from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError, did_you_mean_path
from common.filesystem import atomic_path, make_dirs, remove_tree, sync_tree
from common.guarded_files import (
    GENERATION_CONFIG,
    MAX_TOKENIZER_BYTES,
    TOKENIZER_FILES,
    check_own_files,
    copy_unchanged_tokenizer,
    read_source_file,
)
from common.hub import find_base_model
from common.limits import parse_json
from data.config import DataConfig

if TYPE_CHECKING:
    from data.tokenize.tokenizer import Tokenizer

AUTO, MINIMIND = "auto", "minimind"  # values of data.tokenizer that are no folder
RUN_TOKENIZER = "tokenizer"  # folder of a run directory
SCRATCH = "scratch"  # value of init_from
TOKENIZER_JSON = "tokenizer.json"
SAMPLE_TOKENIZER = Path(__file__).parents[1] / "samples" / "tokenizer"
COPIED_FILES = (*TOKENIZER_FILES, GENERATION_CONFIG)
# of tokenizers that the library `tokenizers` does not read
OTHER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
MAX_ADAPTERS = 8  # adapters of adapters that are followed to their base model
MAX_CONFIG_BYTES = 1 << 20


def resolve_tokenizer(data: DataConfig, init_from: str) -> Path:
    """Return the tokenizer folder of a run that starts from `init_from`, a path or "scratch".

    Raises UserError if there is none, or if a typed one has other tokens than that of the weights.
    """
    if init_from == SCRATCH:
        return _tokenizer_from_scratch(data)
    of_weights = tokenizer_of_weights(Path(init_from))
    if data.tokenizer in (AUTO, MINIMIND):
        if of_weights is None:
            raise _missing_error(Path(init_from))
        return of_weights
    typed = check_tokenizer_path(data.tokenizer)
    if of_weights and typed.resolve() != of_weights.resolve():
        check_same_tokens(typed, of_weights)
    return typed


def open_tokenizer(data: DataConfig, init_from: str, run_dir: Path | None = None) -> Tokenizer:
    """Return the tokenizer of a run: the copy in its directory if there is one, otherwise as `resolve_tokenizer`
    (init_from=auto: from scratch).
    """
    from data.tokenize.tokenizer import Tokenizer

    if run_dir and (run_dir / RUN_TOKENIZER).is_dir():
        return Tokenizer.load(run_dir / RUN_TOKENIZER)
    if data.tokenizer not in (AUTO, MINIMIND):
        return Tokenizer.load(check_tokenizer_path(data.tokenizer))
    return Tokenizer.load(resolve_tokenizer(data, SCRATCH if init_from == "auto" else init_from))


def check_tokenizer_path(setting: str) -> Path:
    """Return a typed data.tokenizer as a path. Raises UserError if it does not exist."""
    if not Path(setting).exists():
        raise UserError(
            f"data.tokenizer does not exist: {setting}", f"data.tokenizer={setting}", did_you_mean_path(setting)
        )
    return Path(setting)


def tokenizer_of_weights(source: Path) -> Path | None:
    """Return the tokenizer folder of a run, a Hugging Face or PEFT folder, or a MiniMind .pth file; None if there is
    none.
    """
    return next((folder for folder in _candidates(source) if (folder / TOKENIZER_JSON).is_file()), None)


def _candidates(source: Path) -> Iterator[Path]:
    if source.is_file():  # MiniMind's checkout: out/pretrain_768.pth and model/tokenizer.json
        yield from (source.parent, source.parent.parent / "model")
        return
    if source.parent.name == "checkpoints":  # a checkpoint of a run
        source = source.parent.parent
    check_own_files(source, (), shallow=(RUN_TOKENIZER, "model"))
    if (source / RUN_TOKENIZER).is_dir():
        yield source / RUN_TOKENIZER
    for _ in range(MAX_ADAPTERS):
        source = source / "model" if (source / "model").is_dir() else source
        yield source
        if (base := _base_model(source)) is None:
            return
        source = base


def _base_model(folder: Path) -> Path | None:
    """Return the base model of an adapter folder, None if `folder` is none."""
    try:
        settings = parse_json(read_source_file(folder / "adapter_config.json", MAX_CONFIG_BYTES))
        return find_base_model(folder, settings)[0]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _tokenizer_from_scratch(data: DataConfig) -> Path:
    if data.tokenizer == AUTO:
        return SAMPLE_TOKENIZER
    if data.tokenizer != MINIMIND:
        return check_tokenizer_path(data.tokenizer)
    # MiniMind's checkout has its data in dataset/ and its tokenizer in model/.
    parents = [Path(path).absolute().parent for path in data.paths]
    folders = list(
        dict.fromkeys(folder for parent in parents for folder in (parent, parent / "model", parent.parent / "model"))
    )
    if found := next((folder for folder in folders if (folder / TOKENIZER_JSON).is_file()), None):
        return found
    raise UserError(
        f"MiniMind's tokenizer is not found: no tokenizer.json in {', '.join(map(str, folders))}",
        f"data.tokenizer={MINIMIND}",
        "data.tokenizer=DIR/model, where DIR is a clone of https://github.com/jingyaogong/minimind",
    )


def _missing_error(source: Path) -> UserError:
    folders = [str(folder) for folder in dict.fromkeys(_candidates(source))]
    fix = "data.tokenizer=DIR names the tokenizer that they were trained with"
    if found := next((name for folder in folders for name in OTHER_FORMATS if Path(folder, name).is_file()), None):
        fix = f"convert {found} with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR); or {fix}"
    return UserError(
        f"the weights come without a tokenizer: there is no tokenizer.json in {' or '.join(folders)}",
        f"init_from={source}",
        fix,
    )


def check_same_tokens(typed: Path, of_weights: Path) -> None:
    """Raise UserError if the tokenizers differ in more than file bytes, template and which tokens are called bos, eos
    and pad.
    """
    from data.tokenize.tokenizer import Tokenizer

    first, second = Tokenizer.load(typed), Tokenizer.load(of_weights)
    if first.tokens_fingerprint == second.tokens_fingerprint:
        return
    raise UserError(
        f"data.tokenizer is not the tokenizer of the weights, {of_weights}: {_difference(first, second)}",
        f"data.tokenizer={typed}",
        f"data.tokenizer=auto takes that of the weights; a model with this tokenizer starts from random weights: init_from={SCRATCH}",
    )


def check_same_tokenizer(typed: Path, of_run: Path) -> None:
    """Raise UserError if a resumed run would get another tokenizer or another chat template."""
    from data.tokenize.tokenizer import Tokenizer

    if Tokenizer.load(typed).fingerprint != Tokenizer.load(of_run).fingerprint:
        fix = f"leave it out; or start a new run with init_from={of_run.parent}"
        raise UserError(
            f"cannot resume: the tokenizer of a run does not change, and {typed} differs from {of_run}",
            f"data.tokenizer={typed}",
            fix,
        )


def _difference(first: Tokenizer, second: Tokenizer) -> str:
    mine, others = first.token_ids(), second.token_ids()
    if mine == others:
        return (
            "the tokens are equal, and texts are split into them in another way (merges, normalizer or pre_tokenizer)"
        )
    same = len(mine.items() & others.items())
    return f"{same:,} of {len(mine):,} and {len(others):,} tokens have the same id"


def generation_config_of_run(source: Path, init_from: str) -> bytes | None:
    """Return generation_config.json for a run's copy of the tokenizer `source`: of that folder, else of the weights;
    None if there is none.

    Of a run from scratch only the ids of tokens: how to sample is a matter of the model that the folder belongs to.
    """
    folders = [source] if init_from == SCRATCH else [source, *_candidates(Path(init_from))]
    file = next((file for folder in folders if os.path.lexists(file := folder / GENERATION_CONFIG)), None)
    if file is None:
        return None
    content = read_source_file(file, MAX_TOKENIZER_BYTES)
    if init_from != SCRATCH:
        return content
    settings = parse_json(content)
    return json.dumps(
        {key: value for key, value in settings.items() if key.endswith("token_id")}
        if isinstance(settings, dict)
        else {}
    ).encode()


def copy_tokenizer(source: Path, target: Path, init_from: str = SCRATCH) -> None:
    """Copy the files of a tokenizer, all or none, in place of the copy of an earlier launch."""
    make_dirs(target.parent)
    with atomic_path(target) as new:
        new.mkdir()
        copy_unchanged_tokenizer(source, new)
        if (settings := generation_config_of_run(source, init_from)) is not None:
            (new / GENERATION_CONFIG).write_bytes(settings)
        sync_tree(new)
        if target.exists():
            remove_tree(target)
