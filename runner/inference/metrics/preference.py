"""Accuracy of a model's implicit rewards on preference pairs."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError
from common.filesystem import read_json_object
from runner.inference.evaluate import EvaluateConfig, MetricResults, register_metric
from runner.inference.evaluation_data import EvaluationSet
from runner.inference.load import LoadedModel, load_trained


@register_metric("preference", reads=("preference",))
def preference(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of pairs whose implicit reward (https://arxiv.org/abs/2305.18290) is larger for chosen than for
    rejected, and the mean margin.

    The reward is the log-ratio of model and reference in nats: beta is 1.
    """
    from runner.engine.objectives.dpo import Dpo
    from runner.engine.objectives.objective import Reference

    reference = load_trained(Path(cfg.reference or _reference_dir(trained.folder)), cfg.device)
    objective = Dpo(1.0, Reference(reference.model))
    pairs, totals = 0, {"reward_accuracy": 0.0, "reward_margin": 0.0}
    for batch in examples.batches(trained, cfg.batch_size):
        sums = objective.loss(trained.model, batch)
        pairs += objective.count(batch)
        totals = {name: total + sums[name].item() for name, total in totals.items()}
    return {name: total / pairs for name, total in totals.items()} | {"rows": pairs}


def _reference_dir(folder: Path) -> str:
    source = read_json_object(folder / "run.json").get("init_from")
    if not source or source == "scratch":
        raise UserError(
            "no reference model is recorded for this model", f"run={folder}", "give the model before DPO: reference=DIR"
        )
    return str(source)
