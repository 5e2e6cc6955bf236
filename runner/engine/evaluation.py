"""What is due between steps and changes no weight: evaluation on held-out rows, and samples of text."""

from __future__ import annotations

import math
from contextlib import closing, nullcontext

import torch

from models.generate import generate
from runner.engine.objectives.objective import LossSums, mask_dummy_batch
from runner.engine.state import TrainState, chat_template, finite_or_none

PROMPT_SEED = 0x5A3D  # samples draw from a generator of their own: they must not move the run's random state


def evaluate_and_sample_if_due(run: TrainState) -> None:
    """What is due at this step and changes no weight: evaluation and samples."""
    progress, every = run.progress, run.cfg.train
    if progress.looked_at == progress.step:
        return
    if run.val_loader and run.due(every.eval_every):
        record_evaluation(run, evaluate_loss(run))
    if run.cfg.stage.prompts and run.due(every.sample_every):
        run.track.samples(progress.step, generate_samples(run))
    progress.looked_at = progress.step


def record_evaluation(run: TrainState, means: dict[str, float]) -> None:
    progress, loss = run.progress, means["loss"]
    progress.eval_loss = finite_or_none(loss)
    run.track.log("eval", progress.step, tokens=progress.tokens, **means)
    if math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss):
        progress.best_loss, progress.best_step, progress.evals_since_best = loss, progress.step, 0
    else:
        progress.evals_since_best += 1


@torch.no_grad()
def evaluate_loss(run: TrainState) -> dict[str, float]:
    """The objective over the held-out rows, each sum divided by its count; perplexity where it means something."""
    assert run.val_loader
    run.model.eval()
    count, sums = 0, LossSums()
    with closing(run.val_loader.steps(epoch=0)) as steps:
        for batches in steps:
            for batch in batches:
                run.world.alive()
                with run.precision.autocast():
                    parts = mask_dummy_batch(batch, run.objective.loss(run.model, batch.to(run.world.device)))
                count += run.objective.count(batch)
                for name, part in parts.items():
                    sums[name] = sums.get(name, 0.0) + part.double()  # read once, at the end
    total, *summed = run.world.sums([count, *(value.item() for value in sums.values())])
    means = {name: value / total for name, value in zip(sums, summed, strict=True)}
    means["loss"] -= means.pop("aux_loss", 0.0)  # balancing experts is how we train, not what is judged
    if run.cfg.stage.objective == "next_token":
        means["perplexity"] = math.exp(min(means["loss"], 700.0))
    return means


def generate_samples(run: TrainState) -> list[dict[str, str]]:
    """What the model answers to the stage's prompts now; a pure function of weights and step."""
    template, tokenizer = chat_template(run), run.tokenizer
    prompts = [
        template.prompt([{"role": "user", "content": prompt}]) if template else [tokenizer.bos_id, *tokenizer.encode(prompt)]
        for prompt in run.cfg.stage.prompts
    ]
    # Weights that ranks hold between them are gathered in the dtype they are trained in.
    with run.precision.autocast() if run.world.sharded else nullcontext():
        answers = generate(
            run.model,
            prompts,
            max_new_tokens=run.cfg.train.sample_tokens,
            temperature=0.7,
            top_k=0,
            top_p=0.9,
            repetition_penalty=1.0,
            stop_ids=[tokenizer.eos_id],
            generator=torch.Generator(run.world.device).manual_seed(PROMPT_SEED + run.progress.step),
        )
    return [{"prompt": prompt, "answer": tokenizer.decode(ids)} for prompt, ids in zip(run.cfg.stage.prompts, answers, strict=True)]
