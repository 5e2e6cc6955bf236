"""A program of the tests in this folder: reads [function, cases], calls the function with each case, writes its
results.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fake_gpu
import torch
from engine_fixtures import DATA_FORMAT, composed, stage_overrides, write_examples
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, unset_fake_temporarily

from data.batching.batch import Batch
from models.language_model import LanguageModel, create_model
from runner.engine import build, loop
from runner.engine.device import rng
from runner.engine.device.distributed import DistributedContext
from runner.engine.state import TrainState
from runner.run_dir.metadata import RunMetadata

MODE = fake_gpu.pretend_gpus()
PHASES, TRAIN_STEP = ("forward", "backward", "update", "optimizer"), loop.train_step
PINNED_ON: set[int] = set()  # numbers of the GPUs


def within_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with MODE:
            return function(*args, **options)

    return call


def pin_memory(tensor: Tensor) -> Tensor:
    PINNED_ON.add(torch.cuda.current_device())
    return tensor


def prepare_build() -> None:
    """Let `build_run` create models on the GPU, where Module.to cannot bring them, without digests of their weights."""
    build_model = build.build_model

    def build_on_gpu(cfg: Any, **options: Any) -> LanguageModel:
        with torch.device("cuda", torch.cuda.current_device()):
            return build_model(cfg, **options)

    build.build_model = build_on_gpu
    LanguageModel.to = lambda model, device: model
    Tensor.pin_memory = pin_memory
    build.describe_run = lambda *_, **__: {}
    loop.get_rng_state, loop.set_rng_state = dict, lambda state: None  # of the CPU
    rng.mark_products_deterministic = lambda: None  # of cuBLAS
    for name in ("prepare_model", "distribute", "build_optimizer", "wrap_model"):
        setattr(build, name, within_mode(getattr(build, name)))


def join_fake_ranks(size: int) -> None:
    """Let this process be one of `size` ranks, whose collectives exchange nothing."""
    from torch.distributed import device_mesh, init_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_mesh = device_mesh.init_device_mesh

    def init_real_mesh(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return init_mesh(*args, **options)

    device_mesh.init_device_mesh = init_real_mesh
    init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    DistributedContext.all_reduce_sum = lambda dist, numbers: [dist.size * number for number in numbers]
    DistributedContext.gather = lambda dist, value: [value] * dist.size


def new_run(folder: Path, stage: str, *overrides: str) -> TrainState:
    data = write_examples(folder, DATA_FORMAT[stage], 36)
    cfg = composed(
        *stage_overrides(stage), f"data.path={data}", f"data.cache={folder / 'cache'}", "device=cuda", *overrides
    )
    return build.build_run(cfg, RunMetadata.detached(folder, 1))


def devices_of_state(state: TrainState) -> list[str]:
    return sorted({str(value.device) for value in state.optimizers.state_dict().values()})


def watch_steps(state: TrainState, launches: fake_gpu.Launches) -> Callable[..., Any]:
    """Name the phases of a step for `launches`; return the step."""
    state.logger.log = lambda kind, step, **metrics: None
    state.precision.backward = launches.within("backward", state.precision.backward)
    state.precision.clip_and_update = launches.within("update", state.precision.clip_and_update)
    state.optimizers.step = launches.within("optimizer", state.optimizers.step)
    train_step = launches.within("forward", TRAIN_STEP)

    def step(*args: Any) -> Any:
        output = train_step(*args)
        launches.phase = f"after {output.step}"
        return output

    return step


def steps(folder: Path, case: list[str]) -> dict[str, Any]:
    """Train as the loop does; return what makes the host wait within steps and after which steps, launches, and
    devices.
    """
    PINNED_ON.clear()
    state, launches = new_run(folder, *case), fake_gpu.Launches()
    loop.train_step = watch_steps(state, launches)
    with MODE, launches:
        loop.train_steps(state)
    return {
        "syncs": sorted({name for phase, name in launches.syncs if phase in PHASES}),
        "fetched after": sorted({int(phase.split()[1]) for phase, _ in launches.syncs if phase.startswith("after")}),
        "devices": sorted({device for phase, device in launches.devices if phase in PHASES}),
        "state": devices_of_state(state),
        "pinned on": sorted(PINNED_ON),
    }


def resumed_state(folder: Path, case: list[str]) -> list[list[str]]:
    """Train, load what a checkpoint would hold, and train on; return the devices of the optimizer's state each time."""
    state, devices = new_run(folder, *case), []
    state.logger.log, loop.train_step = lambda kind, step, **metrics: None, TRAIN_STEP
    with MODE, fake_gpu.Launches():
        loop.train_steps(state)
        devices.append(devices_of_state(state))
        files = {
            file: {name: source().cpu() for name, source in sources.items()}
            for file, sources in state.tensor_sources().items()
        }
        state.load_tensors(files, folder)
        state.total_steps += 1
        loop.train_steps(state)
        assert state.progress.step == 2
        devices.append(devices_of_state(state))
    return devices


def saved_bytes(folder: Path, case: list[str]) -> int:
    """Return the bytes of distinct storages, without those of parameters, that 4 x 64 tokens save for a backward pass."""
    state, ids = new_run(folder, *case), torch.zeros(4, 64, dtype=torch.long)
    documents = (ids, ids) if state.cfg.data.packing != "none" else ()
    batch = Batch(ids, ids, torch.full((4,), 64), ["rows"], *documents)
    own = {p.untyped_storage()._cdata for p in state.model.parameters()}
    sizes, alive = {}, []

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    with MODE, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), state.precision.autocast():
        state.objective.loss(state.model.train(), batch.to(state.dist.device))
    return sum(size for storage, size in sizes.items() if storage not in own)


def shapes_of_batches(folder: Path, case: list[str]) -> list[tuple[int, int]]:
    epoch = new_run(folder, *case).loader.iter_epoch(0)
    return sorted({tuple(batch.input_ids.shape) for batches in epoch for batch in batches})


def is_deterministic(folder: Path, case: list[str]) -> bool:
    new_run(folder, *case)
    return torch.are_deterministic_algorithms_enabled()


def updates(folder: Path, case: list[str]) -> dict[str, int]:
    """Update the weights twice; return the launches of the second update, with clipping: the first makes the state of
    the optimizer.
    """
    state = new_run(folder, *case)
    with MODE:
        for _ in range(2):
            for p in state.optimizers.names:
                p.grad = torch.empty_like(p)
            with fake_gpu.Launches() as launches:
                state.precision.clip_and_update(state.optimizers, 1.0)
    return launches.operators


def programs(folder: Path, case: dict[str, Any]) -> list[int]:
    """Compute packed batches of (rows, tokens) with compiled layers, each of a new document every 40 tokens; return the
    number of programs after each.
    """
    torch.nn.functional.scaled_dot_product_attention = fake_gpu.TORCH_ATTENTION  # which dynamo knows
    torch._dynamo.reset()  # the programs of the case before
    found: list[Any] = []
    with MODE, torch.device("cuda", 0):
        model = create_model(composed(*stage_overrides("pretrain"), *case["overrides"]).model).train()
        model.compile_layers(single_row=case["shapes"][0][0] == 1, backend=lambda graph, _: found.append(1) or graph)
        numbers = []
        for rows, tokens in case["shapes"]:
            ids = torch.empty(rows, tokens, dtype=torch.long)
            documents = torch.empty(rows * -(-tokens // 40), dtype=torch.long)
            with torch.autocast("cuda", torch.bfloat16):
                model(ids, ids, lengths=documents, document_ids=ids, position_ids=ids).nll.sum().backward()
            numbers.append(len(found))
    return numbers


def syncs_of_statements(folder: Path, case: list[str]) -> list[str]:
    """Return what each statement about `x` of a GPU makes the host wait for."""
    found = []
    for statement in case:
        with MODE, (launches := fake_gpu.Launches()), suppress(DynamicOutputShapeException):
            exec(statement, {"torch": torch, "x": torch.ones(3, device="cuda")})
        found.append(", ".join(sorted(name for _, name in launches.syncs)))
    return found


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()  # the process is short, and has the modules of the server
    folder = Path(sys.argv[1])
    function, cases = json.loads((folder / "cases.json").read_text())
    prepare_build()
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        join_fake_ranks(size)
    results = {name: globals()[function](folder, case) for name, case in cases.items()}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
