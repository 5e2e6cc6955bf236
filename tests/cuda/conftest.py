"""`run_on_gpu(cases)`: trainings on GPUs that compute nothing (see fake_gpu.py), in forks of one process."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_fixtures import DATA_FORMAT, stage_overrides
from warm_programs import WarmPrograms, warm_programs

from common.file_lock import FileLock

FOLDER = Path(__file__).parent
COMPILER = ["g++", "-O0", "-w", "-fPIC", "-shared", "-std=c++20"]


@pytest.fixture(scope="session")
def fake_gpu_library(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fake_gpu.cpp, compiled: two seconds, once for each version of torch."""
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("torch was built for GPUs: it registers the device that the fakes take; tests/cuda_real runs there")
    if shutil.which("g++") is None:
        pytest.skip("no g++, which compiles fake_gpu.cpp")
    source = FOLDER / "fake_gpu.cpp"
    cache = getattr(pytestconfig, "cache", None)  # there is none with -p no:cacheprovider
    folder = cache.mkdir("fake_gpu") if cache else tmp_path_factory.getbasetemp()
    library = folder / f"{torch.__version__}-{source.stat().st_mtime_ns}.so"
    with FileLock.acquire(folder / "lock", wait=True):  # one of the processes of pytest compiles for all
        if not library.exists():
            part = library.with_suffix(".part")
            subprocess.run([*COMPILER, f"-I{Path(torch.__file__).parent / 'include'}", source, "-o", part], check=True)
            part.replace(library)
    return library


@pytest.fixture(scope="session")
def warm_gpu(fake_gpu_library: Path) -> Iterator[WarmPrograms]:
    with warm_programs(FOLDER.parents[1], FOLDER / "fake_gpu.py", FAKE_GPU_LIBRARY=str(fake_gpu_library)) as warm:
        for stage in DATA_FORMAT:
            warm.call("engine_fixtures", "composed", *stage_overrides(stage), "device=cuda", "data.path=none")
        yield warm


@pytest.fixture
def run_on_gpu(tmp_path: Path, warm_gpu: WarmPrograms) -> Callable[..., dict]:
    """`run_on_gpu("steps", {name: argument})`: name -> result of the function of fake_runs.py."""

    def run(function: str, cases: dict, **variables: str) -> dict:
        (tmp_path / "cases.json").write_text(json.dumps([function, cases]))
        process = warm_gpu.start(
            FOLDER / "fake_runs.py", str(tmp_path), cwd=tmp_path, out=(output := tmp_path / "output"), env=variables
        )
        assert process.wait(300) == 0, output.read_text()
        return json.loads((tmp_path / "results.json").read_text())

    return run
