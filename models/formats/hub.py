"""Models of the Hugging Face hub: `owner/name` or `owner/name@revision` becomes the folder of one commit in the local
cache.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from common.errors import UserError, did_you_mean_path, print_note
from common.guarded_files import TOKENIZER_FILES
from common.hub import HubName, cached_snapshot, hub_cache_dir, is_hub_offline, model_cache_dir, parse_hub_name
from models.formats.stored_size import INDEX_SUFFIX, SAFETENSORS, TORCH, read_index

# Files that are downloaded, besides weights. No code: modules of a repository are never used.
SETTINGS_FILES = (
    *("config.json", "generation_config.json", "adapter_config.json"),
    *TOKENIZER_FILES,
    *("tokenizer.model", "vocab.json", "merges.txt"),  # of a tokenizer that has to be converted first
)
# Names of weights, the first that a repository has is taken: one file, or the index of several
WEIGHT_FILES = (
    *(SAFETENSORS, SAFETENSORS + INDEX_SUFFIX, "adapter_model.safetensors"),
    *(TORCH, TORCH + INDEX_SUFFIX),
)
TIMEOUT = 10.0  # seconds until the hub counts as unreachable


WatchDownload = Callable[[str, Path, int], AbstractContextManager[object]]  # (title, folder that grows, bytes)


def fetch_model(text: str, setting: str, watch: WatchDownload = lambda *_: nullcontext()) -> Path | None:
    """Return the folder of a model of the hub, None if `text` is no name of one.

    It is downloaded unless the cache has this commit.

    A branch means its newest commit, or without a network the commit that was downloaded last. Raises UserError, about
    `setting`, if there is neither a network nor a copy, and for a repository without a model. `watch` shows the
    progress of a download.
    """
    name = parse_hub_name(text)
    if name is None:
        return None
    cached = cached_snapshot(name)
    if cached is not None and not _missing_files(cached) and (name.is_fixed or is_hub_offline()):
        print_note(f"{setting}: {name.repo}@{cached.name} from the cache")
        return cached
    if is_hub_offline():
        raise _offline_error(name, setting, cached, "HF_HUB_OFFLINE=1 forbids to ask the hub")
    return _download(name, setting, cached, watch)


def _download(name: HubName, setting: str, cached: Path | None, watch: WatchDownload) -> Path:
    from huggingface_hub import HfApi, errors, snapshot_download

    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True, timeout=TIMEOUT)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = _files_to_download(list(sizes), name, setting)
        total = sum(sizes[file] for file in files)
        present = cached_snapshot(HubName(name.repo, str(info.sha)))
        if present is None or _missing_files(present):
            _check_free_space(total, setting)
            print_note(f"{setting}: downloading {name.repo}@{info.sha}, {len(files)} files, {total / 2**20:,.0f} MiB")
        with watch(f"downloading {name.repo}", model_cache_dir(name), total), _without_bars():
            folder = Path(
                snapshot_download(name.repo, revision=name.revision, allow_patterns=files, etag_timeout=TIMEOUT)
            )
    except UserError:
        raise
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} asks for an agreement",
            setting,
            f"accept it at https://huggingface.co/{name.repo}, then type: hf auth login",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{name.repo} has no revision {name.revision}", setting, f"{name.repo} takes {name.repo}@main"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"there is no folder {name.repo}, and no such model on the hub", setting, did_you_mean_path(name.repo)
        ) from error
    # the exceptions of a missing network belong to the HTTP library, which changes with the version of huggingface_hub
    except Exception as error:
        reason = f"the hub cannot be reached ({type(error).__name__})"
        if cached is None or _missing_files(cached):
            raise _offline_error(name, setting, cached, reason) from error
        print_note(f"{setting}: {reason}; {name.repo}@{cached.name} from the cache")
        return cached
    if folder.name != info.sha:
        raise UserError(f"{name} changed during its download", setting, "type the command again")
    if missing := _missing_files(folder):
        raise UserError(
            f"{name} has no {missing[0]}", setting, "choose another model, or another revision: owner/name@revision"
        )
    print_note(f"{setting}: {name.repo}@{info.sha}")
    return folder


@contextmanager
def _without_bars() -> Iterator[None]:
    """Switch off the bars of huggingface_hub, which would be drawn beside ours, and write one line for each change into
    a pipe.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _files_to_download(names: list[str], name: HubName, setting: str) -> list[str]:
    """Return the files of the top folder that a model needs: safetensors, or files of torch where there are none. No
    other format, and no code.
    """
    weights = next((file for file in WEIGHT_FILES if file in names), None)
    if weights is None:
        found = ", ".join(
            sorted(file for file in names if file.endswith((".gguf", ".safetensors", ".bin", ".h5", ".msgpack")))[:3]
        )
        message = f"{name} has no {SAFETENSORS} and no {TORCH}{f', but {found}' if found else ''}"
        raise UserError(message, setting, "choose the repository of the original weights")
    files = [file for file in SETTINGS_FILES if file in names]
    if not weights.endswith(INDEX_SUFFIX):
        return [*files, weights]
    stem, suffix = weights.removesuffix(INDEX_SUFFIX).split(".")
    return [
        *files,
        weights,
        *sorted(
            file for file in names if file.startswith(f"{stem}-") and file.endswith(f".{suffix}") and "/" not in file
        ),
    ]


def _missing_files(folder: Path) -> list[str]:
    """Return what a cached snapshot lacks: it may hold only the settings or the tokenizer that another program has
    asked for.
    """
    names = set(os.listdir(folder))
    settings = next((file for file in ("config.json", "adapter_config.json") if file in names), None)
    weights = next((file for file in WEIGHT_FILES if file in names), None)
    if settings is None or weights is None:
        return ["config.json"] if settings is None else [SAFETENSORS]
    return sorted(read_index(folder / weights) - names) if weights.endswith(INDEX_SUFFIX) else []


def _check_free_space(needed: int, setting: str) -> None:
    folder = next(parent for parent in (hub_cache_dir(), *hub_cache_dir().parents) if parent.is_dir())
    if (free := shutil.disk_usage(folder).free) < needed:
        message = f"the model has {needed / 2**30:,.1f} GiB, {folder} has {free / 2**30:,.1f} GiB free"
        raise UserError(message, setting, "HF_HOME=DIR places the cache on another disk")


def _offline_error(name: HubName, setting: str, cached: Path | None, reason: str) -> UserError:
    problem = f"its cached copy lacks {_missing_files(cached)[0]}" if cached else f"{hub_cache_dir()} has no copy of it"
    if os.path.isdir(name.repo.partition("/")[0]):
        problem += f"; there is no folder {name.repo} either"
    fix = f"where there is a network: hf download {name.repo}{'' if name.revision == 'main' else f' --revision {name.revision}'}; or give the path of a folder"
    return UserError(f"the model {name} is not here: {reason}, and {problem}", setting, fix)
