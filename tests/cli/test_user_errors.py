"""Every user error: exit code 2, three lines that name value and fix, nothing left on disk, and no torch where the
settings alone are wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_fixtures import TINY_RUN, Call, is_user_error

ROWS = [*TINY_RUN, "data.path=rows.jsonl"]
MINE = ["--config-dir", "my"]
FILES = {  # YAML files of a user, each with one mistake
    "model/no_family": "hidden_size: 32\n",
    "model/typo": "defaults: [tiny, _self_]\n\nhiden_size: 3\n",
    "model/syntax": "defaults: [tiny, _self_]\nhidden_size: [3\nx: 1\n",
    "model/no_option": "defaults: [tinyy, _self_]\n",
    "model/wrong_type": "defaults: [tiny, _self_]\nhidden_size: abc\n",
    "model/wrong_value": "defaults: [tiny, _self_]\nvocab_size: 0\n",
    "data/absolute": "defaults: [/data/own, _self_]\npath: a.jsonl\n",
    "optimizer/unregistered": "name: lion\nlr: 1e-3\n",
    "stage/wrong_objective": "# @package _global_\nstage: {name: mine, objective: next_tokn, data_format: text, lora: null, init_from_stage: null}\n",
    "stage/no_package": "stage: {name: mine, objective: next_token, data_format: text, lora: null, init_from_stage: null}\n",
    "experiment/typo": "# @package _global_\ntrain:\n  epochss: 3\n",
    "experiment/top_level": "# @package _global_\nsede: 3\n",
    "experiment/no_option": "# @package _global_\ndefaults:\n  - override /model: tinny\n",
    "experiment/no_group": "# @package _global_\ndefaults:\n  - override /modell: tiny\n",
    "experiment/no_package": "train:\n  epochs: 3\n",
    "experiment/optuna": "# @package _global_\ndefaults:\n  - override /hydra/sweeper: optuna\n",
    "experiment/basic_sweeper": "# @package _global_\nhydra:\n  sweeper:\n    _target_: hydra._internal.core_plugins.basic_sweeper.BasicSweeper\n",
}

# refused before torch is imported: (arguments, what the message must have)
EARLY: list[tuple[list[str], list[str]]] = [
    # names
    (["optimizer.lrr=1"], ["unknown setting optimizer.lrr", "did you mean optimizer.lr?"]),
    (["train.foo=1"], ["unknown setting train.foo", "--cfg=job --package=train prints the settings"]),
    (["stage.lora.size=4"], ["stage.lora has rank, alpha, dropout, targets"]),
    (["stage.lora.r=4"], ["unknown setting stage.lora.r", "did you mean stage.lora.rank or stage.lora.rslora?"]),
    (["hydra.run.dir=runs/${nope}"], ["Interpolation key 'nope' not found"]),
    (["hydra.run.dirr=x"], ["unknown setting hydra.run.dirr", "did you mean dir?"]),
    (["precision=fp64"], ["precision has no option fp64", "bf16"]),
    (["optimizer="], ["optimizer needs the name of an option", "adamw, muon"]),
    (["=3"], ["an override begins with the name of a setting", "=3"]),
    (["stage"], ["key=value", "stage=<value>"]),
    (["~tracker"], ["cannot be deleted", "tracker=none or"]),
    (["~optimizer.lr=1"], ["cannot be deleted", "leave it out"]),
    (["+experiment=gpu_8gb"], ["has no +", "fix:   experiment=gpu_8gb"]),
    (["+model=tiny"], ["has no +", "fix:   model=tiny"]),
    (["+seed=3"], ["has no +", "fix:   seed=3"]),
    (["hydra.job.env_set.X=1"], ["hydra.job.env_set has no key X yet", "fix:   +hydra.job.env_set.X=1"]),
    (["hydra.job.env_set={X: 1}"], ["hydra.job.env_set has no key X yet", "fix:   '+hydra.job.env_set={X: 1}'"]),
    (["hydra.callbacks.mine._target_=x.Y"], ["fix:   +hydra.callbacks.mine._target_=x.Y"]),
    (["hydra/callbacks=mine"], ["there is no config group hydra/callbacks", "--config-dir=DIR"]),
    (["data.train_on=all"], ["is now called data.loss_on", "data.loss_on=all"]),
    (["hydra/launcher=submitit_slurm", "-m", "seed=1,2"], ["is now called hydra/launcher=submitit"]),
    (["hydra.launcher.array_parallelism=4", "-m", "seed=1,2"], ["fix:   hydra.launcher.workers=4"]),
    # flags
    (["--epochs", "3"], ["--epochs is not a flag", "train.epochs=3"]),
    (["--bf16"], ["--bf16 is not a flag", "precision=bf16"]),
    (["--output_dir", "x"], ["--output_dir is not a flag", "hydra.run.dir=x"]),
    (["--optim", "adamw_torch"], ["--optim is not a flag", "optimizer=<value>"]),
    (["--no-such-flag"], ["unknown flag"]),
    (["--info", "job"], ["invalid flag"]),
    (["--config-name", "chat"], ["--config-name chat"]),
    (["--config-path", "conf"], ["--config-path conf"]),
    (["--config-dir", "nowhere"], ["the folder of config groups nowhere does not exist"]),
    (["-m", "seed=1,2", "--cfg", "job"], ["a sweep is many runs"]),
    # values
    (["seed=null"], ["seed must be an integer, got null"]),
    (["train.epochs=x"], ["train.epochs must be an integer, got x"]),
    (["train.epochs=${train.nothing}"], ["train.epochs must be an integer, got ${train.nothing}"]),
    (["optimizer.lr=[1"], ["cannot be parsed"]),
    (["optimizer.lr=1e-3,", "seed=1"], ["where: optimizer.lr=1e-3,\n", "remove the comma"]),
    (["data.system_prompts='annulled x'"], ["must be a list", "fix:   data.system_prompts=[annulled,x]"]),
    (["data.system_prompts=Hello"], ["must be a list", "fix:   data.system_prompts=[Hello]"]),
    (["train.epochs=1,2"], ["several values for one run", "--multirun"]),
    (["schedule.min_lr_ratio=4"], ["schedule.min_lr_ratio must be in [0, 1], got 4.0"]),
    (["device=gpu"], ["device must be auto, cpu, cuda, cuda:<number> or mps, got gpu"]),
    (["precision=tf32", "device=cpu"], ["precision=tf32 needs an NVIDIA GPU"]),
    (["model.vocab_size=6000"], ["tokenizer vocabulary (6400) is larger than model.vocab_size (6000)"]),
    (
        ["train.max_steps=5", "schedule.warmup_steps=6"],
        ["schedule.warmup_steps must be at most the 5 steps of the run, got 6"],
    ),
    # files
    (["data.path=nowhere.jsonl"], ["nowhere.jsonl"]),
    (["data.path=empty.jsonl"], ["the file is empty"]),
    (["data.path=rows.jsonl", "stage=sft"], ["stage=pretrain"]),
    (["data.tokenizer=nowhere"], ["data.tokenizer does not exist"]),
    (["data.tokenizer=my"], ["a file of the tokenizer is missing"]),
    (
        ["init_from=nowhere"],
        ["init_from must be auto, scratch, an existing path or a model of the hub (owner/name), got nowhere"],
    ),
    (["plugins=[no_such_module]"], ["plugin no_such_module is neither"]),
    (["plugins=rows"], ["plugins must be a list", "plugins=[rows]"]),
    (["plugins=a.py,b.py"], ["plugins must be a list", "plugins=[a.py,b.py]"]),
    (["hydra.searchpath=my,conf"], ["hydra.searchpath must be a list", "hydra.searchpath=[my,conf]"]),
    *(
        ([f"hydra.searchpath=[{url}]"], [f"config groups {url} does not exist"])
        for url in ("pkg://no", "pkg://no.conf")
    ),
    (["resume=nowhere"], ["nowhere does not exist"]),
    (["resume=last"], ["no run in", "start one"]),
    (["resume=rows.jsonl"], ["there is no run.json"]),
    (["hydra.run.dir="], ["hydra.run.dir must be a directory"]),
    # settings of Hydra that the run directory needs
    (["hydra.output_subdir=null"], ["hydra.output_subdir cannot be set"]),
    (["hydra.mode=MULTIRUN", "seed=1,2"], ["--multirun starts a sweep"]),
    # settings that this run does not read
    (["schedule.decay_fraction=0.1"], ["schedule.decay_fraction is not read by schedule=cosine", "schedule=wsd"]),
    (["stage=sft", "stage.beta=0.2"], ["stage.beta is not read by stage.objective=next_token", "stage=dpo reads it"]),
    (["stage.lora.rank=4"], ["stage.lora is null here", "stage=lora or stage=dpo_lora"]),
    (["distributed.timeout=3"], ["distributed.timeout is not read: distributed=single is one process"]),
    (["train.max_steps=5", "train.epochs=3"], ["train.epochs is not read: train.max_steps sets the length"]),
    (["train.sample_tokens=9", "train.sample_every=0"], ["train.sample_tokens is not read: train.sample_every=0"]),
    (
        ["train.eval_every=9", "data.val_path=null", "data.val_fraction=0"],
        ["train.eval_every is not read: there is no validation data"],
    ),
    (
        ["data.val_duplicates=drop", "data.val_path=null", "data.val_fraction=0", "train.eval_every=0"],
        ["data.val_duplicates is not read: there is no validation data"],
    ),
    (["data.val_fraction=0.5"], ["data.val_fraction is not read: data.val_path has the validation data"]),
    (["sweep.match_budget=steps"], ["sweep.match_budget is read in a sweep only", "--multirun"]),
    (["hydra/launcher=submitit"], ["hydra/launcher is read in a sweep only", "--multirun"]),
    (["hydra.launcher.workers=2"], ["hydra.launcher.workers is read in a sweep only"]),
    # processes
    (["distributed.nnodes=2", "distributed=ddp"], ["distributed.nnodes=2 needs torchrun on every node"]),
    # sweeps
    (["-m", "optimizer.lr=1e-3,x"], ["optimizer.lr must be a number, got x"]),
    (["-m", "seed=1,2", "data.tokenizer=my"], ["a file of the tokenizer is missing"]),
    (["-m", "train.epochs=1,2", "train.max_steps=5"], ["train.epochs is not read"]),
    (
        ["-m", "seed=1,2", *MINE, "experiment=basic_sweeper"],
        ["hydra/sweeper must be one of grid, halving, optuna", "my/experiment/basic_sweeper.yaml:4"],
    ),
    (
        ["-m", "seed=1,2", *MINE, "experiment=optuna"],
        ["hydra/sweeper cannot be selected in a file", "my/experiment/optuna.yaml:3", "type hydra/sweeper=optuna"],
    ),
    (
        ["-m", "seed=1,2", *MINE, "hydra.searchpath=[pkg://hydra.conf]", "experiment=optuna"],  # two folders
        ["hydra/sweeper cannot be selected in a file", "my/experiment/optuna.yaml:3", "type hydra/sweeper=optuna"],
    ),
    (
        ["-m", "optimizer.lr=1e-3,", "5e-4,", "1e-4", "seed=1"],
        ["a space after a comma", "fix:   optimizer.lr=1e-3,5e-4,1e-4\n"],
    ),
    # YAML files of the user
    ([*MINE, "model=no_family"], ["model.family has no value, it must be one of", "my/model/no_family.yaml"]),
    (
        [*MINE, "model=typo"],
        ["model.hiden_size is not read by model.family=decoder", "my/model/typo.yaml:3", "did you mean hidden_size?"],
    ),
    ([*MINE, "model=syntax"], ["invalid YAML", "my/model/syntax.yaml:3"]),
    ([*MINE, "model=no_option"], ["model has no option tinyy", "my/model/no_option.yaml:1", "did you mean tiny?"]),
    ([*MINE, "model=wrong_type"], ["model.hidden_size must be an integer, got abc", "my/model/wrong_type.yaml:2"]),
    (
        [*MINE, "optimizer=unregistered"],
        [
            "optimizer.name must be one of adamw, muon, got lion",
            "my/optimizer/unregistered.yaml:1",
            "plugins=[FILE.py]",
        ],
    ),
    ([*MINE, "data=absolute"], ["unknown setting data.data", "my/data/absolute.yaml"]),
    ([*MINE, "stage=no_package"], ["stage.stage is not a setting", "# @package _global_"]),
    (
        [*MINE, "experiment=typo"],
        ["unknown setting train.epochss", "my/experiment/typo.yaml:3", "did you mean train.epochs?"],
    ),
    ([*MINE, "experiment=no_option"], ["model has no option tinny", "my/experiment/no_option.yaml:3"]),
    (
        [*MINE, "experiment=no_group"],
        ["overrides modell, which is not in the config", "my/experiment/no_group.yaml:3", "did you mean model?"],
    ),
    ([*MINE, "experiment=no_package"], ["# @package _global_"]),
]
EARLY_SLOW: list[tuple[list[str], list[str]]] = [  # the same checks, of other settings
    (["hydra/job_logging=nope"], ["hydra/job_logging has no option nope", "default"]),
    (["seed=-1"], ["seed must be in [0, 4294967295], got -1"]),
    (["optimizer.lr="], ["optimizer.lr must be a number"]),
    (["optimizer.lr=0"], ["optimizer.lr must be a positive number, got 0"]),
    (
        ["stage=lora", "stage.lora.alpha=0"],
        ["stage.lora.alpha must be a positive number, got 0", "stage.lora.alpha=16"],
    ),
    (["optimizer.betas=0.9"], ["optimizer.betas must be a list in brackets, got 0.9"]),
    (["train=3"], ["train is a section"]),
    (["run=last"], ["run is a section", "resume=last means that run", "plan.py plans what is left of it"]),
    (["model.num_key_value_heads=3"], ["model.num_key_value_heads must divide"]),
    (["model.num_experts=4"], ["model.moe_intermediate_size must be at least 1, got 0", "moe_intermediate_size=384"]),
    (["model.rope_theta=0"], ["model.rope_theta must be a positive number, got 0"]),
    (["model.rms_norm_eps=-1"], ["model.rms_norm_eps must be at least 0, got -1"]),
    (["model.router_aux_loss_coef=-1"], ["model.router_aux_loss_coef must be at least 0, got -1"]),
    (["model.num_experts=-1"], ["model.num_experts must be at least 0, got -1"]),
    (["model.attention=blue"], ["model.attention must be one of"]),
    (["data.max_length=4096"], ["data.max_length must be at most model.max_position_embeddings"]),
    (["train.patience=2", "train.eval_every=0"], ["needs evaluations on validation data, and this run has none"]),
    (["data.path=[]"], ["data.path must name a file"]),
    (["data.val_path=nowhere.jsonl"], ["data.val_path does not exist"]),
    (["hydra.run.dir=rows.jsonl/run"], ["the run directory cannot be used"]),
    (["tracker.project=x"], ["tracker.project is not read by tracker=none"]),
    (
        ["distributed=ddp", "distributed.nproc=2", "distributed.shard=2"],
        ["distributed.shard is not read", "distributed=fsdp"],
    ),
    (
        ["train.sample_tokens=9", "train.sample_prompts=[]"],
        ["train.sample_tokens is not read: train.sample_prompts is empty"],
    ),
    (["train.keep_every=9", "train.save_every=0"], ["train.keep_every is not read"]),
    (["data.max_bad_fraction=0.5"], ["data.max_bad_fraction is not read", "data.on_bad_row=skip"]),
    (["data.loss_on=all"], ["data.loss_on is not read: texts have no messages"]),
    (
        ["stage=dpo", "init_from=scratch", "data.loss_on=all"],
        ["what chosen and rejected share has no loss", "data.loss_on=assistant"],
    ),
    (["data.group_by_length=true"], ["data.group_by_length needs data.packing=none"]),
    (["model.norm_topk_prob=true"], ["model.norm_topk_prob is not read: model.num_experts=0"]),
    (["stage=sft", "init_from=scratch", "stage.init_from_stage=sft"], ["stage.init_from_stage is not read"]),
    (["distributed.nproc=2"], ["distributed=single is one process"]),
    (["-m", "seed=1,2", "init_from=nowhere"], ["init_from must be auto"]),
    (["-m", "seed=1,2", "hydra.sweep.dir=rows.jsonl"], ["the sweep directory cannot be used"]),
    (["-m", "seed=1,2", "hydra.launcher.workers=x"], ["hydra.launcher.workers must be an integer, got x"]),
    ([*MINE, "model=wrong_value"], ["model.vocab_size must be at least 1, got 0", "my/model/wrong_value.yaml:2"]),
    (
        [*MINE, "stage=wrong_objective"],
        ["stage.objective must be one of dpo, next_token, got next_tokn", "my/stage/wrong_objective.yaml:2"],
    ),
    ([*MINE, "experiment=top_level"], ["unknown setting sede", "my/experiment/top_level.yaml:2", "did you mean seed?"]),
]
# known only after the data or the weights are read, in a directory that exists
LATE: list[tuple[list[str], list[str]]] = [
    ([*TINY_RUN, "data.path=bad.jsonl"], ["bad.jsonl:2"]),
    ([*TINY_RUN, "data.path=bad.jsonl", "hydra.run.dir=my"], ["bad.jsonl:2"]),
    (
        [*ROWS, "train.max_steps=0", "train.epochs=1", "schedule.warmup_steps=1000"],
        ["schedule.warmup_steps must be at most the", "got 1000"],
    ),
    ([*ROWS, "device=cuda:99"], ["this process needs number 99"]),
]
LATE_SLOW: list[tuple[list[str], list[str]]] = [
    ([*ROWS[:-2], "data.path=rows.jsonl", "data.val_path=bad.jsonl", "device=cpu"], ["bad.jsonl:2"]),
    ([*TINY_RUN, "data.path=bad.jsonl", "hydra.run.dir=new/run"], ["bad.jsonl:2"]),
    ([*ROWS, "data.cache=rows.jsonl"], ["data.cache=rows.jsonl"]),
    ([*ROWS, "init_from=my"], ["my"]),
]


def slow(cases: list[tuple[list[str], list[str]]]) -> list[object]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.fixture
def before(workspace: Path) -> set[Path]:
    """The files of the user, which a user error leaves alone."""
    (workspace / "rows.jsonl").write_text(
        "".join(f'{{"text": "{number} goats sing in the rain"}}\n' for number in range(40))
    )
    (workspace / "bad.jsonl").write_text('{"text": "a goat"}\n{"text": 3}\n')
    (workspace / "empty.jsonl").touch()
    for name, content in FILES.items():
        (workspace / "my" / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / "my" / f"{name}.yaml").write_text(content)
    return set(workspace.rglob("*"))


def name_of(value: object) -> str:
    return " ".join(part for part in value if part not in TINY_RUN) if isinstance(value, list) else ""


def check(result: object, parts: list[str]) -> None:
    assert is_user_error(result), result
    assert [part for part in parts if part not in result.stderr] == [], result.stderr


@pytest.mark.parametrize(("argv", "parts"), [*EARLY, *slow(EARLY_SLOW)], ids=name_of)
def test_user_error_of_settings_leaves_nothing_and_imports_no_torch(
    call: Call, workspace: Path, before: set[Path], monkeypatch: pytest.MonkeyPatch, argv: list[str], parts: list[str]
) -> None:
    for module in ("torch", "runner.engine.build"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it raises
    check(call(*argv), parts)
    assert set(workspace.rglob("*")) == before


@pytest.mark.parametrize(("argv", "parts"), [*LATE, *slow(LATE_SLOW)], ids=name_of)
def test_user_error_of_data_or_weights_removes_what_it_began(
    call: Call, workspace: Path, before: set[Path], argv: list[str], parts: list[str]
) -> None:
    check(call(*argv), parts)
    left = set(workspace.rglob("*")) - before
    assert [path for path in left if workspace / ".cache" not in (path, *path.parents)] == []
    assert [path for path in left if path.name.startswith(".tmp-")] == [], "the cache holds whole files only"
    assert [path for path in left if path.suffix == ".lock" and not path.with_suffix("").exists()] == [], (
        "no lock of a file that is not there"
    )
