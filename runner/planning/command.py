"""plan.py: estimate each run of a command line, time some steps, print the plan.

Leaves nothing behind but the token cache, which the run reads.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import TYPE_CHECKING

from common.errors import print_safely
from runner.engine.config import Config
from runner.engine.data_pipeline import DataPipeline, build_data_pipeline
from runner.engine.device.compile import set_inductor_cache
from runner.planning.activations import is_counted_compiled
from runner.planning.alternatives import find_alternatives
from runner.planning.config import PlanConfig
from runner.planning.estimate import RunPlan, estimate_disk
from runner.planning.facts.cpu import cpu_execution, saved_kernels
from runner.planning.facts.data import DataFacts, data_facts
from runner.planning.facts.machine import resident_bytes, this_machine
from runner.planning.facts.model import ModelSizes, model_facts
from runner.planning.memory import PLAIN, computation, estimate_memory
from runner.planning.report import plan_dict, plan_text, sweep_text
from runner.planning.starts import PlannedRun, PlannedStart
from runner.planning.trial.start import trial_of

if TYPE_CHECKING:
    from data.tokenize.tokenizer import Tokenizer


def plan(cfg: PlanConfig, start: PlannedStart) -> None:
    """Raises UserError where train.py refuses a run."""
    planner = Planner()
    plans = [planner.plan(run) for run in start.runs]
    if cfg.timing:
        planner.time(plans)
    if cfg.json:
        return print_safely(json.dumps({"runs": [plan_dict(each) for each in plans], "trials": start.trials}, indent=1))
    print_safely(sweep_text(plans, start.trials) if start.is_sweep else plan_text(plans[0]))


class Planner:
    """Plans runs; jobs of a sweep that share data or a model share what is known of them."""

    def __init__(self) -> None:
        self._data: dict[str, DataFacts] = {}
        self._models: dict[str, ModelSizes] = {}
        self._process = 0
        self._machine = cache(this_machine)
        # before torch's compiler is imported, which would set another folder for this process and its trials
        set_inductor_cache()

    def plan(self, run: PlannedRun) -> RunPlan:
        cfg = run.config
        machine, ranks = self._machine(cfg.device), count_ranks(cfg)
        cfg.model.check_memory()
        # before the model, whose modules without memory import more than a run does
        data = self._facts_of_data(cfg, ranks * cfg.distributed.nnodes)
        facts = self._model(cfg)
        world, saved = ranks * cfg.distributed.nnodes, saved_kernels(run.folder)
        cpu = cpu_execution(cfg, facts, data, world, saved) if machine.device == "cpu" else PLAIN
        memory = estimate_memory(
            cfg, facts, data.shape, data.steps, data.micro_batches, machine.device, self._process, world, cpu
        )
        result = RunPlan(run, facts, data, memory, estimate_disk(cfg, facts, data.steps), machine, ranks, cpu)
        if not result.fits_memory:
            result.alternatives = find_alternatives(cfg, facts, data, machine, self._process, ranks, saved)
        result.notes = [*notes_of(result), *data.warnings, *cfg.model.training_warnings()]
        return result

    def time(self, plans: list[RunPlan]) -> None:
        """Run the trial of each plan that fits; jobs with the same micro-batches, model and precision share one."""
        trials: dict[str, dict | None] = {}
        for each in plans:
            # jobs of other lengths may be computed in other ways
            parts = [dataclasses.asdict(part) for part in (each.data.shape, each.cpu)]
            key = json.dumps([shared_settings(each.run.config), *parts, each.data.micro_batches], default=str)
            if not each.fits_memory:
                each.notes.append("no step was timed, because the run does not fit")
            elif each.ranks * each.run.config.distributed.nnodes > 1:
                each.notes.append("no step was timed: a trial has one process, and this run has several")
            elif each.memory.total > each.machine.available:
                each.notes.append("no step was timed: other programs use the memory now")
            else:
                if key not in trials:
                    trials[key] = trial_of(each.run.config)
                each.trial = trials[key]

    def _model(self, cfg: Config) -> ModelSizes:
        key = json.dumps(
            [dataclasses.asdict(part) for part in (cfg.model, cfg.stage)] + [cfg.optimizer.name], default=str
        )
        if key not in self._models:
            self._models[key] = model_facts(cfg)
        return self._models[key]

    def _facts_of_data(self, cfg: Config, ranks: int) -> DataFacts:
        key = json.dumps(
            [dataclasses.asdict(part) for part in (cfg.data, cfg.stage, cfg.train)]
            + [cfg.seed, cfg.model.max_position_embeddings, ranks],
            default=str,
        )
        if key not in self._data:
            tokenizer, pipeline = open_data(cfg)
            if not self._process:
                import runner.engine.build
                import runner.engine.loop  # noqa: F401  what a run imports is a part of its memory

                self._process = resident_bytes()
            self._data[key] = data_facts(cfg, pipeline, tokenizer, ranks)
        return self._data[key]


def open_data(cfg: Config) -> tuple[Tokenizer, DataPipeline]:
    from data.tokenize.origin import open_tokenizer

    tokenizer = open_tokenizer(cfg.data, cfg.init_from)
    cfg.check_vocabulary(tokenizer.vocab_size)
    return tokenizer, build_data_pipeline(cfg, tokenizer)


def count_ranks(cfg: Config) -> int:
    from runner.launch.local_ranks import count_local_ranks

    return count_local_ranks(cfg)


def shared_settings(cfg: Config) -> list[object]:
    """Return the settings that the time of a step, an evaluation or a set of samples depends on."""
    parts = [dataclasses.asdict(part) for part in (cfg.model, cfg.stage, cfg.precision, cfg.data, cfg.distributed)]
    train = cfg.train
    timed = (
        train.batch_size,
        train.save_every,
        train.compile,
        train.activation_checkpointing,
        train.sample_prompts,
        train.sample_tokens,
        train.final_eval_rows,
    )
    return [*parts, cfg.optimizer.name, *timed, cfg.init_from, cfg.device]


def notes_of(plan: RunPlan) -> list[str]:
    cfg, facts, machine = plan.run.config, plan.model, plan.machine
    notes = []
    if not facts.layer.is_exact:
        notes.append("activations are approximate: counted as those of a plain decoder of these widths")
    if not facts.optimizer_known:
        notes.append(f"the state of optimizer={cfg.optimizer.name} is taken to be that of adamw")
    if plan.cpu.is_compiled and not is_counted_compiled(facts.layer, computation(cfg, facts, machine.device, plan.cpu)):
        notes.append(
            "the layers will be compiled: activations need less than estimated, what of these layers is saved is not known"
        )
    if plan.cpu.attention is None:
        notes.append(
            "the attention kernel is measured when the run starts: counted is the one that saves probabilities, the fused kernel saves none"
        )
    if plan.cpu.is_upcast is None:
        notes.append(
            "whether 16-bit products are faster in fp32 is measured when the run starts: counted are those in fp32, which need copies of a layer's weights"
        )
    if plan.fits_memory and plan.needed_memory > machine.available:
        notes.append(f"other programs use the memory now: {machine.available / 2**30:.2f} GiB are available")
    if cfg.data.num_workers:
        notes.append(
            f"data.num_workers={cfg.data.num_workers} processes are not counted: each needs about as much as process and data"
        )
    return notes
