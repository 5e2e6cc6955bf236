"""Training, validation and test files by their names: `train-00000-of-00002.parquet`, `validation.jsonl`, `test/a.csv`, `x_val.jsonl` of `x.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UserError
from data.sources.detect import COMPRESSED, EXTENSIONS, extension_of
from data.sources.files import ReadOptions, Source, find_files, open_entry

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
SHARD = re.compile(r"[-_.]\d+(-of-\d+)?\Z")  # train-00000-of-00002
PART = re.compile(r"[^-_. ]+")
LISTED_NAMES = 3


@dataclass
class DataFiles:
    train: list[list[Source]] = field(default_factory=list)  # of each entry of data.path
    validation: list[Source] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was chosen by name, for the log


def resolve_data_files(paths: list[str], val_path: str | None, options: ReadOptions) -> DataFiles:
    """Return the files of `paths` to train on, and the validation files: those of `val_path`, or with auto those in the folders of the training files.

    A file that is named itself is trained on whatever its name is; of a folder or a glob, the files of other splits are not.
    Raises UserError if an entry has no file to train on.
    """
    result, auto = DataFiles(), set[Path]()
    for entry in paths:
        if entry.startswith("hub:"):
            result.train.append(open_entry(entry, options))
            continue
        splits = split_files(entry)
        if not splits["train"]:
            first = next(iter(splits["validation"] + splits["test"]))
            message = f"no file to train on: by their names, {_listed(splits['validation'] + splits['test'])} are validation or test data"
            raise UserError(message, f"data.path={entry}", f"data.path={first} trains on that file, whatever its name is")
        found = sorted({*splits["validation"], *_validation_files_of(splits["train"])}) if val_path == "auto" else []
        auto |= {file.absolute() for file in found}
        result.notes += _notes(entry, splits, found)
        result.train.append([Source.open(file, options) for file in splits["train"]])
    if val_path == "auto":
        result.train = [[source for source in group if source.path.absolute() not in auto] for group in result.train]
        result.validation = [Source.open(file, options) for file in sorted(auto)]
    elif val_path:
        result.validation = open_entry(val_path, options) if val_path.startswith("hub:") else _open_validation(val_path, options)
    return result


def split_files(entry: str) -> dict[str, list[Path]]:
    """Return the files of a path by what they are for: train, validation, test, and others: files without such a name in a folder that has training files."""
    files = find_files(entry)
    path = Path(entry).expanduser()
    by_split: dict[str, list[Path]] = {name: [] for name in ("train", "validation", "test", "others")}
    if files == [path]:
        return by_split | {"train": files}
    root = path if path.is_dir() else Path(entry[: re.search(r"[*?[]", entry).start()]).parent  # type: ignore[union-attr]
    for file in files:
        by_split[split_of(file, root.expanduser()) or "others"].append(file)
    if not by_split["train"]:
        by_split |= {"train": by_split["others"], "others": []}
    if not by_split["train"] and not path.is_dir() and not (by_split["validation"] and by_split["test"]):
        return {name: [] for name in by_split} | {"train": files}  # a pattern that names one split: test-*.parquet
    return by_split


def split_of(file: Path, root: Path) -> str | None:
    """Return train, validation or test if that is the first or last part of the file's name, or a folder below `root`; else None."""
    parts = PART.findall(_stem(file)) or [""]
    folders = [folder.lower() for folder in reversed(file.relative_to(root).parts[:-1])]
    return next((SPLIT_NAMES[name] for name in (parts[0], parts[-1], *folders) if name in SPLIT_NAMES), None)


def _stem(file: Path) -> str:
    """Return the name of a file in lower case, without its extensions and the number of a shard."""
    name = file.with_suffix("") if file.suffix.lower() in COMPRESSED else file
    return SHARD.sub("", name.stem.lower())


def _validation_files_of(files: Iterable[Path]) -> list[Path]:
    """Return `x_val.jsonl` of `x.jsonl`, and `validation_x.jsonl` of `train_x.jsonl` with any other name for validation, in the same folders."""
    expected = {(file.parent, name) for file in files for name in _validation_names(_stem(file))}
    siblings = [file for folder in {folder for folder, _ in expected} for file in folder.iterdir() if extension_of(file) in EXTENSIONS]
    found = {file for file in siblings if (file.parent, _stem(file)) in expected} | {_with_val(file) for file in files}
    return sorted(file for file in found if file.is_file())


def _with_val(file: Path) -> Path:
    name, compression = (file.stem, file.suffix) if file.suffix.lower() in COMPRESSED else (file.name, "")
    return file.with_name(f"{Path(name).stem}_val{Path(name).suffix}{compression}")


def _validation_names(stem: str) -> list[str]:
    """Return the stem of a training file with each name for validation in place of the one for training."""
    parts = PART.findall(stem) or [""]
    of_train = {part for part in (parts[0], parts[-1]) if SPLIT_NAMES.get(part) == "train"}
    others = [name for name, split in SPLIT_NAMES.items() if split == "validation"]
    return [re.sub(rf"(?<![^-_. ]){part}(?![^-_. ])", other, stem) for part in of_train for other in others]


def _open_validation(path: str, options: ReadOptions) -> list[Source]:
    splits = split_files(path)
    return [Source.open(file, options) for file in splits["validation"] or splits["test"] or splits["train"]]


def _notes(entry: str, splits: dict[str, list[Path]], validation: list[Path]) -> list[str]:
    """Return one line that says which files of an entry are used for what, where a name decided it."""
    left_out = [file for name in ("validation", "test", "others") for file in splits[name] if file not in validation]
    if not left_out and not splits["validation"]:
        return []
    parts = [
        f"trains on {_listed(splits['train'])}",
        f"validates on {_listed(validation)}" if validation else "",
        left_out and f"leaves out {_listed(left_out)}",
    ]
    return [f"{entry}: by their names, {', '.join(part for part in parts if part)}"]


def _listed(files: list[Path]) -> str:
    names = [file.name for file in files[:LISTED_NAMES]]
    return ", ".join(names) + (f" and {len(files) - LISTED_NAMES} more" if len(files) > LISTED_NAMES else "")
