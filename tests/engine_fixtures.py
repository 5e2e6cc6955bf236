"""Fixtures for small runs in this process: `make_run(stage, *overrides)` composes from conf/ as a command does, on
examples of different lengths.
"""

import copy
import functools
import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_fixtures import Program
from fault_counts import IS_FULL
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from warm_programs import WarmPrograms, warm_programs

from common.file_lock import FileLock
from data.tokenize import tokenizer
from models.layers.cpu_kernels.upcast_products import upcast_products
from runner.config.compose import compose_tree, to_config, without_hydra
from runner.engine import kernels as kernels_of_run
from runner.engine.build import build_run
from runner.engine.config import Config
from runner.engine.device.distributed import RENDEZVOUS_ENV
from runner.engine.objectives.config import OBJECTIVES
from runner.engine.optim.config import OPTIMIZERS
from runner.engine.optim.schedules import SCHEDULES
from runner.engine.state import TrainState
from runner.run_dir.metadata import RunMetadata

# by their contents: a run loads one or two tokenizers, the tests dozens
tokenizer._build_tokenizer = functools.lru_cache(maxsize=20)(tokenizer._build_tokenizer.__wrapped__)

SMALL_RUN = [
    "model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.head_dim=8", "model.intermediate_size=64",
    "model.max_position_embeddings=128", "data.max_length=64", "data.packing=none", "data.val_path=null", "data.val_fraction=0", "train.batch_size=4", "train.accumulation_steps=1", "train.epochs=1",
    "train.max_steps=0", "train.log_every=1", "train.eval_every=0", "train.save_every=0", "train.sample_every=0", "optimizer=adamw", "optimizer.lr=1e-3", "schedule.warmup_steps=0", "tracker.console=quiet",
    "init_from=scratch",
]  # fmt: skip
SMALL_LORA = "stage.lora={rank:8,alpha:16.0,dropout:0.0,targets:[q_proj,k_proj,v_proj,o_proj],rslora:false,dora:false,quantize:null,continue_adapter:false}"
# of each stage
DATA_FORMAT = {"pretrain": "text", "sft": "chat", "lora": "chat", "dpo": "preference", "dpo_lora": "preference"}
VOCABULARY = [
    "the",
    "lake",
    "of",
    "Oru",
    "lies",
    "north",
    "of",
    "the",
    "old",
    "mill",
    "where",
    "Tami",
    "keeps",
    "nine",
    "grey",
    "goats",
    "and",
    "sings",
]


def text(i: int) -> str:
    """Return a text of 1 to 15 vocabulary entries."""
    return " ".join(VOCABULARY[(i * 7 + k) % len(VOCABULARY)] for k in range(1 + (i * 11) % 15))


def example(data_format: str, i: int) -> dict:
    conversation = [{"role": "user", "content": text(i)}, {"role": "assistant", "content": text(i + 1)}]
    if data_format == "text":
        return {"text": text(i) + " " + text(i + 3)}
    if data_format == "chat":
        return {"conversations": conversation + conversation[: 2 * (i % 2)]}
    return {"chosen": conversation, "rejected": [conversation[0], {"role": "assistant", "content": text(i + 2)}]}


def stage_overrides(stage: str) -> list[str]:
    return [f"stage={stage}", *SMALL_RUN, *([SMALL_LORA] if stage in ("lora", "dpo_lora") else [])]


def write_examples(folder: Path, data_format: str, rows: int) -> Path:
    path = folder / f"{data_format}{rows}.jsonl"
    path.write_text("".join(json.dumps(example(data_format, i)) + "\n" for i in range(rows)))
    return path


@pytest.fixture
def overrides_for(tmp_path: Path) -> Callable[..., list[str]]:
    """`overrides_for(stage, *overrides)`: all overrides of a small run, with its data file."""

    def overrides_for(stage: str, *overrides: str, rows: int = 36) -> list[str]:
        data = f"data.path={write_examples(tmp_path, DATA_FORMAT[stage], rows)}"
        return [*stage_overrides(stage), data, f"data.cache={tmp_path / 'cache'}", *overrides]

    return overrides_for


def composed(*overrides: str) -> Config:
    """Return what `compose_config` returns; Hydra, which takes half the time of a small run, composes each set of group
    options once.
    """
    options = [override for override in overrides if "." not in override.partition("=")[0]]
    values = copy.deepcopy(_composed_values(*options))
    for key, value in map(_parsed, [override for override in overrides if override not in options]):
        *sections, name = key.split(".")
        # a later override may be of a part of it
        functools.reduce(lambda section, inner: section[inner], sections, values)[name] = copy.deepcopy(value)
    return to_config(values)


@functools.cache
def _composed_values(*options: str) -> dict[str, Any]:
    return OmegaConf.to_container(without_hydra(compose_tree(list(options))), resolve=True)


@functools.cache
def _parsed(override: str) -> tuple[str, Any]:
    parsed = OverridesParser.create().parse_override(override)
    return parsed.key_or_group, parsed.value()


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainState]]:
    torch.set_num_threads(1)
    # it would stay in this process, where a later test limits the memory
    monkeypatch.setattr(kernels_of_run, "use_memory_pool", lambda folder: "")
    made: list[TrainState] = []

    def make(stage: str, *overrides: str, folder: str = "run", rows: int = 36, attempt: int = 1) -> TrainState:
        run_dir = tmp_path / folder
        run_dir.mkdir(exist_ok=True)
        cfg = composed(*stage_overrides(stage), "data.path=default", "data.cache=default", *overrides)
        if cfg.data.cache == "default":
            cfg.data.cache = str(tmp_path / "cache")
        if cfg.data.path == "default":
            cfg.data.path = str(write_examples(tmp_path, cfg.stage.data_format, rows))
        made.append(build_run(cfg, RunMetadata.detached(run_dir, attempt)))
        return made[-1]

    yield make
    upcast_products(False)
    for state in made:
        state.logger.finish("completed")  # closes its files


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPrograms]:
    """`warm.start(script, *argv, ...)` runs a script of this repository in a fork of a process that has imported torch."""
    with warm_programs(Path(__file__).parents[1]) as warm:
        yield warm


@pytest.fixture(scope="session")
def warm_checkout(checkout: Path) -> Iterator[WarmPrograms]:
    """`warm` of the copy of the program that has smaller sample files."""
    with warm_programs(checkout) as warm:
        yield warm


@pytest.fixture
def warm_program(checkout: Path, warm_checkout: WarmPrograms, tmp_path: Path, tmp_path_factory: Any) -> Program:
    """`program` of tests that do not test imports: a fork of the process that has imported torch."""
    out, err = (tmp_path_factory.mktemp("program") / name for name in ("out", "err"))

    def program(*argv: str, command: str = "train.py", cwd: Path = tmp_path, **env: str) -> subprocess.CompletedProcess:
        process = warm_checkout.start(checkout / "runner" / command, *argv, cwd=cwd, out=out, err=err, env=env)
        return subprocess.CompletedProcess(list(argv), process.wait(500), out.read_text(), err.read_text())

    return program


@pytest.fixture
def run_ranks(tmp_path: Path, warm: WarmPrograms) -> Callable[..., None]:
    """`run_ranks(2, [{"folder": ..., "overrides": ...}, ...])` runs these trainings one after the other on two
    processes (see rank_script.py).
    """
    calls: list[int] = []

    def run(size: int, trainings: list[dict]) -> None:
        calls.append(size)
        for training in trainings:
            warm.call("engine_fixtures", "composed", *training["overrides"])
        (plan := tmp_path / f"plan{len(calls)}.json").write_text(json.dumps(trainings))
        common = {"WORLD_SIZE": str(size), RENDEZVOUS_ENV: f"file://{tmp_path / f'rendezvous{len(calls)}'}"}
        script, output = Path(__file__).parent / "engine" / "rank_script.py", tmp_path / f"output{len(calls)}-"
        ranks = [
            warm.start(
                script,
                str(plan),
                cwd=Path.cwd(),
                out=Path(f"{output}{rank}"),
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(size)
        ]
        try:
            assert [rank.wait(600) for rank in ranks] == [0] * size, "\n".join(
                Path(f"{output}{rank}").read_text() for rank in range(size)
            )
        finally:
            for rank in ranks:
                rank.kill()

    return run


@pytest.fixture
def logged() -> Callable[..., list[dict]]:
    """`logged(run_dir, kind)`: the records of that kind in metrics.jsonl."""

    def read(run_dir: Path, kind: str = "train") -> list[dict]:
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return [record for record in records if record["kind"] == kind]

    return read


STAGE_OF_OBJECTIVE = {"next_token": "sft"}  # of others: the stage with the objective's name


def pairwise(*values: list[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations, one of each list, in which every pair of values of two lists occurs; all of them with
    FAULT_TESTS=full.
    """
    combinations = list(itertools.product(*values))
    if IS_FULL:
        return combinations
    pairs = {combination: set(itertools.combinations(enumerate(combination), 2)) for combination in combinations}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(combinations, key=lambda combination: len(pairs[combination] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def registered_combinations(warmup_steps: int):
    """Yield (stage, overrides) of every registered optimizer, schedule and objective, each with the first of the other
    two; the fast ones are those of the optimizers, the slow ones have all pairs.
    """
    names = [OBJECTIVES.names(), OPTIMIZERS.names(), SCHEDULES.names()]
    firsts = ("next_token", "adamw", "cosine")
    fast = [each for each in itertools.product(*names) if sum(map(str.__eq__, each, firsts)) == 2]
    for objective, optimizer, schedule in dict.fromkeys([*fast, *pairwise(*names)]):
        marks = (
            []
            if (objective, optimizer, schedule) in fast and (objective, schedule) == firsts[::2]
            else [pytest.mark.slow]
        )
        overrides = [
            f"optimizer={optimizer}",
            f"schedule={schedule}",
            f"schedule.warmup_steps={warmup_steps}",
            "optimizer.lr=1e-3",
        ]
        yield pytest.param(
            STAGE_OF_OBJECTIVE.get(objective, objective),
            overrides,
            id=f"{objective}-{optimizer}-{schedule}",
            marks=marks,
        )


@pytest.fixture(scope="session")
def kernels(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The C++ kernels, compiled once: .pytest_cache keeps them for all processes and later sessions."""
    from models.layers.cpu_kernels.fused_attention import fused_attention
    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels

    cache = getattr(pytestconfig, "cache", None)  # there is none with -p no:cacheprovider
    folder = cache.mkdir("kernels") if cache else tmp_path_factory.mktemp("kernels")
    x = torch.randn(1, 1, 16, 16)
    try:
        with FileLock.acquire(folder / "lock", wait=True):  # one of the processes compiles for all
            load_kernels(folder)
        fused_attention(x, x, x, None)
    except KernelsUnavailableError as error:
        pytest.skip(f"no C++ kernels on this machine: {error}")


def require_product(dtype: torch.dtype) -> None:
    """Skip a test of the C++ kernels where oneDNN has no product of `dtype` for this processor: bf16 needs AVX-512.
    Call it after `kernels`.
    """
    from models.layers.cpu_kernels.fused_attention import check_product
    from models.layers.cpu_kernels.library import KernelsUnavailableError

    try:
        check_product(dtype, 16)
    except KernelsUnavailableError as error:
        pytest.skip(f"{dtype} on this machine: {error}")
