"""Training, validation and test files by their names: `train-00000-of-00002.parquet`, `validation.jsonl`, `test/a.csv`,
`x_val.jsonl` of `x.jsonl`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.errors import UserError
from data.sources.detect import COMPRESSED, EXTENSIONS, extension_of
from data.sources.files import ReadOptions, Source, find_files, open_entry, unread_files

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# preferred first
EVALUATION_SPLITS = [name for split in ("validation", "test") for name in SPLIT_NAMES if SPLIT_NAMES[name] == split]
SHARD = re.compile(r"[-_.]\d+(-of-\d+)?\Z")  # train-00000-of-00002
PART = re.compile(r"[^-_. ]+")
LISTED_NAMES = 3


@dataclass
class DataFiles:
    train: list[list[Source]] = field(default_factory=list)  # of each entry of data.path
    validation: list[Source] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was chosen by name, for the log


def resolve_data_files(paths: list[str], val_paths: dict[str, str], options: ReadOptions) -> DataFiles:
    """Return the files of `paths` to train on, and the validation files: those of `val_paths` (DataConfig.val_paths), or
    with auto those in the folders of the training files.

    A file that is named itself is trained on whatever its name is; of a folder or a glob, the files of other splits are
    not. Raises UserError if an entry has no file to train on.
    """
    result, auto, used = DataFiles(), set[Path](), set[Path]()
    is_auto = val_paths.get("") == "auto"
    for name, entry in {} if is_auto else val_paths.items():
        found_files, note = resolve_evaluation_files(entry, options, "data.val_path")
        result.validation += [replace(source, val_set=name) for source in found_files]
        used |= {source.path.absolute() for source in found_files}
        result.notes += [note] if note else []
    named = {Path(entry).expanduser().absolute() for entry in paths}
    for entry in paths:
        if entry.startswith("hub:"):
            result.train.append(open_entry(entry, options))
            continue
        splits = split_files(entry)
        if not splits["train"]:
            first = next(iter(splits["validation"] + splits["test"]))
            message = f"no file to train on: by their names, {_listed(entry, splits['validation'] + splits['test'])} are validation or test data"
            raise UserError(
                message, f"data.path={entry}", f"data.path={first} trains on that file, whatever its name is"
            )
        found = sorted({*splits["validation"], *_validation_files_of(splits["train"])}) if is_auto else []
        found = [file for file in found if file.absolute() not in named]
        auto |= {file.absolute() for file in found}
        result.notes += _notes(entry, splits, found, used)
        result.train.append([Source.open(file, options) for file in splits["train"]])
    if auto:
        result.train = [[source for source in group if source.path.absolute() not in auto] for group in result.train]
        result.validation = [Source.open(file, options) for file in sorted(auto)]
        if emptied := next((entry for entry, group in zip(paths, result.train, strict=True) if not group), None):
            message = "all files of this entry of data.path are, by their names, validation data of another one"
            raise UserError(
                message, f"data.path={emptied}", "data.val_path=null trains on them, too; or leave out the entry"
            )
    return result


def resolve_evaluation_files(entry: str, options: ReadOptions, setting: str) -> tuple[list[Source], str]:
    """Return the files to evaluate on, and a line that names them if their names decided it: of a folder or a glob the
    validation files, without them the test files, and all of them if no name says what it is for. `setting`: data.path
    or data.val_path.

    Raises UserError if some files are training data by their names and no other name says what it is for.
    """
    if entry.startswith("hub:"):
        return open_entry(entry, options, EVALUATION_SPLITS), ""
    splits = split_files(entry)
    used = splits["validation"] or splits["test"] or splits["train"]
    if used is splits["train"] and splits["others"]:
        message = f"{_listed(entry, used)} are training data by their names, and no other file is named as validation or test data"
        raise UserError(
            f"which files to evaluate on is unclear: {message}",
            f"{setting}={entry}",
            f"{setting}={splits['others'][0]}",
        )
    left_out = [file for files in splits.values() if files is not used for file in files]
    note = f"{entry}: by their names, evaluates on {_listed(entry, used)}, leaves out {_listed(entry, left_out)}"
    return [Source.open(file, options) for file in used], note if left_out else ""


def split_files(entry: str) -> dict[str, list[Path]]:
    """Return the files of a path by what they are for: train, validation, test, and others: files without such a name
    in a folder that has training files.
    """
    files = find_files(entry)
    path = Path(entry).expanduser()
    by_split: dict[str, list[Path]] = {name: [] for name in ("train", "validation", "test", "others")}
    if files == [path]:
        return by_split | {"train": files}
    for file in files:
        by_split[split_of(file, _root(entry)) or "others"].append(file)
    if not by_split["train"]:
        by_split |= {"train": by_split["others"], "others": []}
    if not by_split["train"] and not path.is_dir() and not (by_split["validation"] and by_split["test"]):
        return {name: [] for name in by_split} | {"train": files}  # a pattern that names one split: test-*.parquet
    return by_split


def _root(entry: str) -> Path:
    """Return the folder of a path; of a glob the folder before its first special character."""
    path = Path(entry).expanduser()
    if os.path.isdir(path) or (magic := re.search(r"[*?[]", entry)) is None:
        return path
    return Path(entry[: magic.start()] + "x").parent.expanduser()


def split_of(file: Path, root: Path) -> str | None:
    """Return train, validation or test if that is the first or last part of the file's name, or a folder below `root`;
    else None.
    """
    parts = PART.findall(_stem(file)) or [""]
    folders = [folder.lower() for folder in reversed(file.relative_to(root).parts[:-1])]
    return next((SPLIT_NAMES[name] for name in (parts[0], parts[-1], *folders) if name in SPLIT_NAMES), None)


def _stem(file: Path) -> str:
    """Return the name of a file in lower case, without its extensions and the number of a shard."""
    return SHARD.sub("", _bare_name(file).lower())


def _bare_name(file: Path) -> str:
    """Return the name of a file without its extensions: x of x.jsonl.gz and of x.jsonl.txt."""
    name = file.with_suffix("")
    while name.suffix.lower() in (*EXTENSIONS, *COMPRESSED):
        name = name.with_suffix("")
    return name.name


def _validation_files_of(files: Iterable[Path]) -> list[Path]:
    """Return `x_val.jsonl` of `x.jsonl`, and `validation_x.jsonl` of `train_x.jsonl` with any other name for
    validation, in the same folders.
    """
    files = [file for file in files if os.path.exists(file)]  # Path.exists raises an error for a name that is too long
    expected = {(file.parent, name) for file in files for name in _validation_names(_stem(file))}
    siblings = [
        file
        for folder in {folder for folder, _ in expected}
        for file in folder.iterdir()
        if extension_of(file) in EXTENSIONS
    ]
    found = {file for file in siblings if (file.parent, _stem(file)) in expected} | {
        file.with_name(f"{name}_val{file.name.removeprefix(name)}") for file in files for name in [_bare_name(file)]
    }
    return sorted(file for file in found if file.is_file())


def _validation_names(stem: str) -> list[str]:
    """Return the stem of a training file with each name for validation in place of the one for training."""
    parts = PART.findall(stem) or [""]
    of_train = {part for part in (parts[0], parts[-1]) if SPLIT_NAMES.get(part) == "train"}
    others = [name for name, split in SPLIT_NAMES.items() if split == "validation"]
    return [re.sub(rf"(?<![^-_. ]){part}(?![^-_. ])", other, stem) for part in of_train for other in others]


def _notes(entry: str, splits: dict[str, list[Path]], validation: list[Path], used: set[Path]) -> list[str]:
    """Return lines that say which files of an entry are used for what, where a name decided it.

    `used`: files that data.val_path names.
    """
    left_out = [
        file
        for name in ("validation", "test", "others")
        for file in splits[name]
        if file not in validation and file.absolute() not in used
    ]
    unread = unread_files(_root(entry)) if os.path.isdir(Path(entry).expanduser()) else []
    kinds = "files without a known extension, linked folders and broken links"
    notes = [f"{entry}: leaves out {kinds}: {_listed(entry, unread)}"] if unread else []
    if not left_out and not splits["validation"]:
        return notes
    parts = [
        f"trains on {_listed(entry, splits['train'])}",
        f"validates on {_listed(entry, validation)}" if validation else "",
        left_out and f"leaves out {_listed(entry, left_out)}",
    ]
    return [f"{entry}: by their names, {', '.join(part for part in parts if part)}", *notes]


def _listed(entry: str, files: list[Path]) -> str:
    """Return the names of files below the folder of `entry`."""
    root = _root(entry)
    names = [str(file.relative_to(root) if file.is_relative_to(root) else file.name) for file in files[:LISTED_NAMES]]
    return ", ".join(names) + (f" and {len(files) - LISTED_NAMES} more" if len(files) > LISTED_NAMES else "")
