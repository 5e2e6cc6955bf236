"""What is due between steps and changes no weight: evaluation on held-out rows, and samples of text."""

from __future__ import annotations

import math
from contextlib import closing, nullcontext

import torch

from models.generate import generate
from runner.engine.objectives.objective import LossSums, mask_dummy_batch
from runner.engine.state import TrainState, chat_template, finite_or_none

PROMPT_SEED = 0x5A3D  # samples draw from a generator of their own: they must not move the run's random state


def evaluate_and_sample_if_due(state: TrainState) -> None:
    """What is due at this step and changes no weight: evaluation and samples."""
    progress, every = state.progress, state.cfg.train
    if progress.evaluated_step == progress.step:
        return
    if state.val_loader and state.is_due(every.eval_every):
        record_evaluation(state, evaluate_loss(state))
    if state.cfg.train.sample_prompts and state.is_due(every.sample_every):
        state.logger.samples(progress.step, generate_samples(state))
    progress.evaluated_step = progress.step


def record_evaluation(state: TrainState, means: dict[str, float]) -> None:
    progress, loss = state.progress, means["loss"]
    progress.eval_loss = finite_or_none(loss)
    state.logger.log("eval", progress.step, loss_tokens=progress.loss_tokens, tokens=progress.tokens, **means)
    if math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss):
        progress.best_loss, progress.best_step, progress.evals_since_best = loss, progress.step, 0
    else:
        progress.evals_since_best += 1


@torch.no_grad()
def evaluate_loss(state: TrainState) -> dict[str, float]:
    """The objective over the held-out rows, each sum divided by its count; perplexity where it means something."""
    assert state.val_loader
    state.model.eval()
    count, sums = 0, LossSums()
    with closing(state.val_loader.iter_epoch(epoch=0)) as steps:
        for batches in steps:
            for batch in batches:
                state.dist.arm_watchdog()
                with state.precision.autocast():
                    parts = mask_dummy_batch(batch, state.objective.loss(state.model, batch.to(state.dist.device)))
                count += state.objective.count(batch)
                for name, part in parts.items():
                    sums[name] = sums.get(name, 0.0) + part.double()  # read once, at the end
    total, *summed = state.dist.all_reduce_sum([count, *(value.item() for value in sums.values())])
    means = {name: value / total for name, value in zip(sums, summed, strict=True)}
    means["loss"] -= means.pop("aux_loss", 0.0)  # balancing experts is how we train, not what is judged
    if state.cfg.stage.objective == "next_token":
        means["perplexity"] = math.exp(min(means["loss"], 700.0))
    return means


def generate_samples(state: TrainState) -> list[dict[str, str]]:
    """What the model answers to train.sample_prompts now; a pure function of weights and step."""
    template, tokenizer = chat_template(state), state.tokenizer
    prompts = [
        template.encode_prompt([{"role": "user", "content": prompt}]) if template else [tokenizer.bos_id, *tokenizer.encode(prompt)]
        for prompt in state.cfg.train.sample_prompts
    ]
    # Weights that ranks hold between them are gathered in the dtype they are trained in.
    with state.precision.autocast() if state.dist.sharded else nullcontext():
        answers = generate(
            state.model,
            prompts,
            max_new_tokens=state.cfg.train.sample_tokens,
            temperature=0.7,
            top_k=0,
            top_p=0.9,
            repetition_penalty=1.0,
            stop_ids=[tokenizer.eos_id],
            generator=torch.Generator(state.dist.device).manual_seed(PROMPT_SEED + state.progress.step),
        )
    return [{"prompt": prompt, "answer": tokenizer.decode(ids)} for prompt, ids in zip(state.cfg.train.sample_prompts, answers, strict=True)]
