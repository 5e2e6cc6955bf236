"""Loaded before any test and before torch: what every test, and every process a test starts, should find."""

import gc
import importlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
# without bytecode every process that a test starts compiles torch again: 6 s
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# small tensors: more threads only wait for each other, for minutes on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the commands do
# a process that a test ends by SIGSEGV would first be written to disk, a gigabyte, while its parent waits
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

# nohup, and a shell that starts tests in the background, ignore them: so would every process that a test starts
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# a slow machine is not a counterexample
settings.register_profile("project", deadline=None, max_examples=50)
settings.load_profile("project")
# it would parse the source of every imported module for constants: two seconds, and the examples would depend on which
# tests came before
providers.is_local_module_file = lambda path: False


FIXTURES = ("command_fixtures", "engine_fixtures")
pytest.register_assert_rewrite(*FIXTURES)


def pytest_configure(config: pytest.Config) -> None:
    """Import what tests use; not in the process that only distributes them: torch takes three seconds."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    for plugin in FIXTURES:
        config.pluginmanager.import_plugin(plugin)
    importlib.import_module("composition_cache").install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests of half a minute, `slow(long=True)`: at the end they would leave all workers but one idle."""
    items.sort(key=lambda item: not any(mark.kwargs.get("long") for mark in item.iter_markers("slow")))


REGISTRIES = (  # module and name of each
    ("models.config", "MODELS"),
    ("runner.engine.objectives.config", "OBJECTIVES"),
    ("runner.engine.optim.config", "OPTIMIZERS"),
    ("runner.engine.optim.schedules", "SCHEDULES"),
    ("runner.inference.evaluate", "METRICS"),
    ("runner.inference.export.formats", "FORMATS"),
    ("runner.tracking.config", "TRACKERS"),
)


def pytest_collection_finish() -> None:
    """Collect garbage less often, and not among the modules and tests that stay to the end: a tenth of the time of the
    fast tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def remove_entries_of(plugin: str) -> None:
    """Remove what a module has registered."""
    for module, name in REGISTRIES:
        if imported := sys.modules.get(module):
            registry = getattr(imported, name)
            for entry, value in registry.entries().items():
                if value.__module__ == plugin:
                    registry.remove(entry)
    if imported := sys.modules.get("data.schemas.registry"):
        for entry, schema in list(imported.SCHEMAS.items()):
            if schema.parse.__module__ == plugin:
                del imported.SCHEMAS[entry]


@pytest.fixture(autouse=True)
def forget_commands() -> Iterator[None]:
    """Forget what commands leave in this process: handlers of Hydra that log to the streams of a test, and the plugins
    that it has imported, with what they have registered: a run copies their source, messages list them.
    """
    level = logging.root.level
    yield
    logging.root.setLevel(level)
    for handler in [handler for handler in logging.root.handlers if type(handler) is logging.StreamHandler]:
        logging.root.removeHandler(handler)
    if plugins := sys.modules.get("common.registry"):
        for module in plugins.IMPORTED_MODULES.values():
            remove_entries_of(module.__name__)
            sys.modules.pop(module.__name__, None)
        plugins.IMPORTED_MODULES.clear()
        os.environ.pop(plugins.PLUGINS_ENV, None)


@pytest.fixture(autouse=True)
def reset_compiler() -> Iterator[None]:
    """Drop compiled programs after each test: torch limits their number per process, and a run has its own process."""
    yield
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.reset()
