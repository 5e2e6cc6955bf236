"""Architecture of the source: which folder may import which, what may be imported from outside, and that nothing that
is read from a file is executed.

`python tests/test_architecture.py` prints the violations of all rules.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import code_stats  # noqa: E402  (a script of this checkout)
from code_stats import imported_names, module_name, nodes, parse  # noqa: E402  (scripts/ is on the path from here on)

# A folder imports folders of lower lines. In a line, `a | b` do not import each other, and `a > b`: only a imports b.
# Modules without an entry of their own belong to their folder.
LAYERS = """
runner
runner.cli
hydra_plugins.lm_runner
runner.planning > runner.planning.trial
runner.sweep > runner.sweep.backends
runner.launch | runner.fault_injection | runner.serving
runner.reporting
runner.config
runner.inference.export | runner.inference.harness
runner.inference
runner.planning.alternatives > runner.planning.memory > runner.planning.facts
runner.engine > runner.engine.state > runner.engine.data_pipeline > runner.engine.config
runner.engine.objectives | runner.engine.optim > runner.engine.device > runner.engine.device.spinning > runner.engine.device.cpu
runner.run_dir > runner.run_dir.contents
runner.checkpoint | runner.tracking.trackers > runner.tracking > runner.tracking.bar > runner.tracking.lines
runner.diagnostics
data.batching > data.store > data.tokenize > data.tokenize.pieces > data.tokenize.tokenizer_limits > data.tokenize.renderer > data.tokenize.training_version > data.tokenize.jinja_sandbox > data.config > data.schemas > data.sources > data | models.formats > models.transformers_adapter > models > models.layers > models.layers.cpu_kernels > models.layers.ops > models.families > models.config
common.file_lock > common.ownership > common.guarded_files > common.hub > common > common.limits
"""
# Packages besides the standard library that a folder and the folders below it may import.
THIRD_PARTY = {
    "runner": {"hydra", "omegaconf"},  # the commands
    "runner.cli": {"hydra", "omegaconf"},
    "hydra_plugins": {"hydra", "omegaconf"},
    "runner.sweep": {"hydra", "omegaconf", "yaml", "optuna"},
    "runner.sweep.backends": {"submitit", "ray"},
    "runner.launch": {"torch"},
    "runner.fault_injection": {"torch"},
    "runner.reporting": {"jinja2", "markupsafe", "optuna", "yaml"},
    "runner.planning": {"torch", "numpy"},
    "runner.run_dir": set(),
    "runner.diagnostics": set(),
    "runner.launch.resume": {"hydra", "omegaconf", "yaml"},
    "runner.config": {"hydra", "omegaconf", "yaml"},
    "runner.inference": {"torch", "numpy", "rich", "yaml"},
    "runner.inference.export": {"torch", "numpy", "transformers", "gguf", "yaml"},
    "runner.inference.harness": {"torch", "numpy", "lm_eval"},
    "runner.serving": {"torch", "starlette", "pydantic", "uvicorn", "llguidance"},
    "runner.engine": {"torch", "numpy"},
    "runner.checkpoint": {"torch", "numpy", "safetensors"},
    "runner.tracking": {"rich"},
    "runner.tracking.trackers": {"swanlab", "tensorboard", "wandb"},
    "data": {"torch", "tokenizers", "numpy", "jinja2", "pyarrow", "datasets", "huggingface_hub", "charset_normalizer"},
    "models": {"torch", "safetensors", "transformers", "huggingface_hub", "bitsandbytes"},
    "common": {"yaml"},  # imported where YAML is parsed
}
DISTRIBUTED = "runner.engine.device"  # the only folder with torch.distributed
NOT_SETTINGS = {"EncodingConfig"}  # not a section of the config
# a command refuses settings before it imports these
HEAVY = {"torch", "transformers", "swanlab", "tensorboard", "wandb"}

EXECUTES = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.full_load", "yaml.unsafe_load"}
UNPICKLES = {"dill", "cloudpickle", "joblib", "marshal", "shelve"}
IMPORTS_BY_NAME = {  # modules that import a module whose name is not written there
    "common.registry",  # modules of a package of this checkout; the value of plugins=, typed by the user
    "data.schemas",  # its own modules
    "lm_runner",  # the commands of this checkout
    "models.language_model",  # the model of a registered config class
    "runner.launch.fork_server",  # a fixed list of this checkout, and train.py
}


def source_files() -> list[Path]:
    return code_stats.python_files(ROOT, (*code_stats.PRODUCT, "lm_runner"))


def command_files() -> list[Path]:
    return [file for file in source_files() if file.parent == ROOT / "runner" and file.stem != "__init__"]


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def layers() -> dict[str, tuple[int, int, int]]:
    """Folder -> (line, column between `|`, position between `>`)."""
    table = {}
    for number, line in enumerate(LAYERS.strip().splitlines()):
        for column, chain in enumerate(line.split(" | ")):
            table |= {name: (number, column, position) for position, name in enumerate(chain.split(" > "))}
    return table


def folder_of(module: str, table: dict) -> str | None:
    """The longest entry of `table` that contains the module."""
    return max((name for name in table if is_inside(module, name)), key=len, default=None)


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """(module:line, name of the function, call) of every call."""
    return [
        (f"{module_name(ROOT, file)}:{node.lineno}", ast.unparse(node.func), node)
        for file in source_files()
        for node in nodes(file)
        if isinstance(node, ast.Call)
    ]


def keywords(call: ast.Call) -> dict[str, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}


# --- layers -----------------------------------------------------------------------------------------------------------


def forbidden_imports() -> list[str]:
    table, found = layers(), []
    for importer, targets in code_stats.import_graph(ROOT, code_stats.PRODUCT).items():
        for target in sorted(targets):
            above, below = folder_of(importer, table), folder_of(target, table)
            if above is None or below is None:
                found.append(f"{importer} or {target} is in no line of LAYERS")
            elif above != below:
                line, column, position = table[above]
                other_line, other_column, other_position = table[below]
                if other_line < line or (other_line == line and (other_column != column or other_position < position)):
                    found.append(f"{importer} imports {target}: {above} must not import {below}")
    return found


def forbidden_packages() -> list[str]:
    internal = {*code_stats.PRODUCT, "lm_runner", *sys.stdlib_module_names}
    found = []
    for file in source_files():
        module = module_name(ROOT, file)
        allowed = THIRD_PARTY.get(folder_of(module, THIRD_PARTY) or "", set())
        found += [
            f"{module} imports {name}"
            for name in imported_names(ROOT, file)
            if name.partition(".")[0] not in allowed | internal
        ]
        if not is_inside(module, DISTRIBUTED):
            attributes = [
                node for node in nodes(file) if isinstance(node, ast.Attribute) and node.attr == "distributed"
            ]
            names = [*imported_names(ROOT, file), *map(ast.unparse, attributes)]
            found += [
                f"{module} uses {name}: only {DISTRIBUTED} does"
                for name in names
                if is_inside(name, "torch.distributed")
            ]
    return sorted(set(found))


def test_layers_import_lower_layers_only():
    assert forbidden_imports() == []


def test_layers_name_every_folder_and_no_other():
    folders = {
        module_name(ROOT, file / "__init__.py") for file in {file.parent for file in code_stats.python_files(ROOT)}
    }
    # modules with a line of their own
    modules = {name for name in layers() if (ROOT / f"{name.replace('.', '/')}.py").is_file()}
    assert folders == set(layers()) - modules


def test_third_party_packages_are_imported_only_where_allowed():
    assert forbidden_packages() == []


def test_modules_import_each_other_without_cycles():
    assert code_stats.import_cycles(ROOT, code_stats.PRODUCT + code_stats.TOOLS) == []


def test_lm_runner_package_imports_the_standard_library_only():
    files = code_stats.python_files(ROOT, ("lm_runner",))
    assert {name.partition(".")[0] for file in files for name in imported_names(ROOT, file)} <= {
        *sys.stdlib_module_names,
        "lm_runner",
    }


def test_folders_describe_themselves():
    packages = [file for file in code_stats.python_files(ROOT) if file.stem == "__init__"]
    assert [module_name(ROOT, file) for file in packages if not ast.get_docstring(parse(file))] == []
    without_init = {file.parent for file in code_stats.python_files(ROOT)} - {file.parent for file in packages}
    assert without_init == set()


# --- commands ---------------------------------------------------------------------------------------------------------


def test_commands_are_not_imported_and_define_no_class():
    """A command started by its path is the module __main__; imported as well, its classes would exist twice."""
    commands = {module_name(ROOT, file) for file in command_files()}
    graph = code_stats.import_graph(ROOT, code_stats.PRODUCT)
    assert [(module, target) for module, targets in graph.items() for target in targets & commands] == []
    assert [file.name for file in command_files() if any(isinstance(node, ast.ClassDef) for node in nodes(file))] == []


def test_commands_begin_with_a_command_line_that_runs():
    assert [
        file.name
        for file in command_files()
        if f"`python runner/{file.name}" not in (ast.get_docstring(parse(file)) or "")
    ] == []


def test_commands_refuse_settings_before_torch_is_imported():
    folders = (
        "runner.cli",
        "runner.sweep",
        "runner.launch",
        "runner.fault_injection",
        "runner.reporting",
        "runner.run_dir",
        "runner.config",
        "hydra_plugins",
    )
    names = [module_name(ROOT, file) for file in [*source_files(), *command_files()]]
    modules = {name for name in names if any(is_inside(name, folder) for folder in folders)} | {
        module_name(ROOT, file) for file in command_files()
    }
    code = (
        f"import sys, runner.engine.config, {', '.join(sorted(modules))}\nprint(sorted({HEAVY} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def settings_with_values() -> list[str]:
    """Fields of config classes with a default.

    `field(metadata=...)` and the fields with a limit have none: they declare what a changed value means on resume, and
    which values are allowed.
    """
    classes = [
        node
        for file in source_files()
        for node in nodes(file)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
    ]
    found = []
    for node in classes:
        for item in node.body:
            value = item.value if isinstance(item, ast.AnnAssign) else None
            is_setting = isinstance(item, ast.AnnAssign) and not ast.unparse(item.annotation).startswith("ClassVar")
            is_metadata = (
                isinstance(value, ast.Call)
                and ast.unparse(value.func) in ("field", "limited", "at_least", "within", "one_of")
                and keywords(value).keys() <= {"metadata", "resume"}
            )
            if is_setting and value is not None and not is_metadata and node.name not in NOT_SETTINGS:
                found.append(f"{node.name}: {ast.unparse(item)}")
    return found


def test_config_classes_hold_no_values():
    """The values are in conf/*.yaml only: in two places they would differ one day.

    Earlier YAML files of users have no model.model_type, no penalties of a stage, and no optimizer.mup_base_width.
    """
    assert [setting.partition(":")[2].partition(":")[0].strip() for setting in settings_with_values()] == [
        "model_type",
        "label_smoothing",
        "z_loss",
        "neftune_alpha",
        "mup_base_width",
    ]


# --- nothing that is read is executed ---------------------------------------------------------------------------------


def test_code_imports_no_module_that_unpickles_or_executes():
    names = [(module_name(ROOT, file), name) for file in source_files() for name in imported_names(ROOT, file)]
    forbidden = {"torch.load", "yaml.load", "hydra.utils.instantiate"}
    assert [
        edge
        for edge in names
        if edge[1].partition(".")[0] in UNPICKLES or edge[1] in forbidden or edge[1].startswith("pickle.")
    ] == []


def test_code_uses_no_pickle():
    uses = {
        ast.unparse(node)
        for file in source_files()
        for node in nodes(file)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"
    }
    assert uses <= {"pickle.UnpicklingError"}  # raised by torch.load(weights_only=True)


def test_code_calls_nothing_that_executes_text_or_loads_code():
    assert [
        (where, function)
        for where, function, _ in calls()
        if function in EXECUTES or function.endswith(".instantiate") or function == "instantiate"
    ] == []
    assert [
        where
        for where, function, call in calls()
        if function == "torch.load" and keywords(call).get("weights_only") != "True"
    ] == []
    switches = {"shell": "False", "trust_remote_code": "False"}
    unsafe = [
        where for where, _, call in calls() for name, safe in switches.items() if keywords(call).get(name, safe) != safe
    ]
    assert unsafe + [where for where, _, call in calls() if "allow_pickle" in keywords(call)] == []


def test_code_imports_by_name_only_in_the_listed_modules():
    importers = (
        "import_module",
        "__import__",
        "exec_module",
        "run_path",
        "run_module",
        "get_class",
        "get_method",
        "get_object",
    )
    found = {
        where.partition(":")[0]
        for where, function, call in calls()
        if function.rpartition(".")[2] in importers and not (call.args and isinstance(call.args[0], ast.Constant))
    }
    assert found == IMPORTS_BY_NAME


def test_conf_names_no_class():
    assert [
        file.name for file in (ROOT / "conf").rglob("*.yaml") if "_target_" in file.read_text(encoding="utf-8")
    ] == []


# --- size: ratchets. A change that grows one moves its number here, and its commit says why --------------------------

MAX_PYTHON_TOKENS = 326_160
MAX_PYTHON_FILES = 270
MAX_EAGER_MODULES = 58  # imported by runner/train.py --help
# Executed by one SFT step. A few functions depend on the load of the machine: a number may be 1 % above the measured one
MAX_FIRST_STEP = {
    "files": 100,
    "functions": 607,
    "hops": 1_508,
    "files_before_build_run": 53,
    "functions_before_build_run": 247,
}


def test_size_of_the_product_does_not_grow():
    files = code_stats.python_files(ROOT)
    assert sum(map(code_stats.count_tokens, files)) <= MAX_PYTHON_TOKENS
    assert len(files) <= MAX_PYTHON_FILES
    assert code_stats.eager_modules(ROOT) <= MAX_EAGER_MODULES


def test_names_of_tests_have_at_most_72_characters():
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    names = {name for text in texts for name in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)}
    assert len(names) > 1000 and sorted(name for name in names if len(name) > 72) == []


@pytest.mark.slow(long=True)
def test_path_of_the_first_step_does_not_grow():
    step = code_stats.traced_step(ROOT)
    assert {name: step[name] for name in MAX_FIRST_STEP if step[name] > MAX_FIRST_STEP[name]} == {}


def main() -> None:
    cycles = [" <-> ".join(cycle) for cycle in code_stats.import_cycles(ROOT, code_stats.PRODUCT + code_stats.TOOLS)]
    rules = {
        "Import cycles": cycles,
        "Layers": forbidden_imports(),
        "Third-party packages": forbidden_packages(),
        "Values in config classes": settings_with_values(),
    }
    rules["Folders without a docstring"] = [
        module_name(ROOT, file)
        for file in code_stats.python_files(ROOT)
        if file.stem == "__init__" and not ast.get_docstring(parse(file))
    ]
    for rule, violations in rules.items():
        print(f"{rule}: {len(violations)}", *violations, sep="\n  ")


if __name__ == "__main__":
    main()
