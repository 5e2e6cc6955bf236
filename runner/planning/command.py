"""plan.py: estimate each run of a command line, time some steps, print the plan.

Leaves nothing behind but the token cache, which the run reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

from common.errors import print_safely
from runner.engine.config import Config
from runner.engine.data_pipeline import build_data_pipeline
from runner.engine.device.compile import set_inductor_cache
from runner.launch.local_ranks import count_local_ranks
from runner.planning.alternatives import find_alternatives
from runner.planning.estimate import RunPlan, estimate_disk, plan_dict, plan_text, sweep_text
from runner.planning.facts import DataFacts, data_facts, model_facts, resident_bytes, this_machine
from runner.planning.memory import estimate_memory, layer_memory
from runner.planning.starts import PlannedRun, PlannedStart
from runner.planning.trial import trial_of

T = TypeVar("T")


@dataclass
class PlanConfig:
    """Settings of plan.py."""

    # run a few steps, an evaluation, a sample and a save in a child process; false: estimates without times
    timing: bool
    json: bool  # print one JSON object instead of text


def plan(cfg: PlanConfig, start: PlannedStart) -> None:
    """Raises UserError where train.py refuses a run."""
    planner = Planner()
    plans = [planner.plan(run) for run in start.runs]
    if cfg.timing:
        planner.time(plans)
    if cfg.json:
        return print_safely(
            json.dumps({"runs": [plan_dict(each) for each in plans], "trials": start.trials or 1}, indent=1)
        )
    print_safely(sweep_text(plans, start.trials) if start.is_sweep else plan_text(plans[0]))


class Planner:
    """Plans runs; jobs of a sweep that share data, a model or a trial share what is known of them."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._machine = cache(this_machine)
        self._process = 0
        # before torch's compiler is imported, which would set another folder for this process and its trials
        set_inductor_cache()

    def plan(self, run: PlannedRun) -> RunPlan:
        machine = self._machine(run.config.device)
        cfg = replace(run.config, precision=run.config.precision.on(machine.device))
        run, ranks = replace(run, config=cfg), count_local_ranks(cfg)
        world = ranks * cfg.distributed.nnodes
        cfg.model.check_memory()
        # before the model, whose modules without memory import more than a run does
        settings = cfg.data, cfg.stage, cfg.train, cfg.seed, cfg.model.max_position_embeddings, world
        data = self._once(partial(self._read_data, cfg, world), *settings)
        model = self._once(partial(model_facts, cfg), cfg.model, cfg.stage, cfg.optimizer.name)
        memory = estimate_memory(cfg, model, data, machine, ranks, self._process)
        result = RunPlan(run, model, data, memory, estimate_disk(cfg, model, data.steps), machine, ranks)
        if not result.fits_memory:
            result.alternatives = find_alternatives(cfg, model, data, machine, ranks, self._process)
        result.notes = [*notes_of(result), *data.warnings, *cfg.model.training_warnings()]
        return result

    def time(self, plans: list[RunPlan]) -> None:
        """Run the trial of each plan that fits; jobs with the same micro-batches, model and precision share one."""
        for each in plans:
            cfg = each.run.config
            if not each.fits_memory:
                each.notes.append("no step was timed, because the run does not fit")
            elif each.ranks * cfg.distributed.nnodes > 1:
                each.notes.append("no step was timed: a trial has one process, and this run has several")
            elif each.memory.total > each.machine.available:
                each.notes.append("no step was timed: other programs use the memory now")
            else:
                # jobs of other lengths may be computed in other ways
                computed = each.data.shape, each.data.micro_batches, each.memory.execution
                each.trial = self._once(partial(trial_of, cfg), *timed_settings(cfg), *computed)

    def _once(self, make: partial[T], *settings: object) -> T:
        """Return what `make` returns, called once for these settings."""
        key = f"{make.func} {settings}"
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _read_data(self, cfg: Config, ranks: int) -> DataFacts:
        from data.tokenize.origin import open_tokenizer

        tokenizer = open_tokenizer(cfg.data, cfg.init_from)
        cfg.check_vocabulary(tokenizer.vocab_size)
        pipeline = build_data_pipeline(cfg, tokenizer)
        if not self._process:
            import runner.engine.build
            import runner.engine.loop  # noqa: F401  what a run imports is a part of its memory

            self._process = resident_bytes()
        return data_facts(cfg, pipeline, tokenizer, ranks)


def timed_settings(cfg: Config) -> tuple[object, ...]:
    """Return the settings that the time of a step, an evaluation or a set of samples depends on."""
    train = cfg.train
    of_train = (
        train.batch_size,
        train.save_every,
        train.compile,
        train.activation_checkpointing,
        train.sample_prompts,
        train.sample_tokens,
        train.final_eval_rows,
        bool(train.ema_decay),
    )
    sections = cfg.model, cfg.stage, cfg.precision, cfg.data, cfg.distributed
    return *sections, cfg.optimizer.name, *of_train, cfg.init_from, cfg.device


def notes_of(plan: RunPlan) -> list[str]:
    cfg, model, machine, execution = plan.run.config, plan.model, plan.machine, plan.memory.execution
    notes = []
    if not model.layer.is_exact:
        notes.append("activations are approximate: counted as those of a plain decoder of these widths")
    if not model.optimizer_known:
        notes.append(f"the state of optimizer={cfg.optimizer.name} is taken to be that of adamw")
    layer = layer_memory(cfg, model, plan.data.shape, execution)
    if execution.is_compiled and not layer.is_counted_compiled:
        notes.append(
            "the layers will be compiled: activations need less than estimated, what of these layers is saved is not known"
        )
    if execution.has_kernels:
        notes.append(
            "counted is the C++ attention of long runs: where it cannot be compiled, probabilities of attention are saved, too"
        )
    if plan.fits_memory and plan.needed_memory > machine.available:
        notes.append(f"other programs use the memory now: {machine.available / 2**30:.2f} GiB are available")
    if cfg.data.num_workers:
        notes.append(
            f"data.num_workers={cfg.data.num_workers} processes are not counted: each needs about as much as process and data"
        )
    return notes
