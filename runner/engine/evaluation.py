"""Evaluation on held-out rows and generated samples: due between steps, without an effect on the training. The weights
of the best evaluation are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress

import torch

from common.errors import StopRequested, UserError
from data.tokenize.chat_template import ChatTemplate
from data.tokenize.tokenizer import Tokenizer
from data.types import TokenSequence
from models.generate import generate
from models.layers.ops import widest_float
from runner.diagnostics.symptoms import tiny_validation
from runner.engine.config import Config
from runner.engine.device.heartbeat import enter
from runner.engine.device.rng import allow_varying_kernels
from runner.engine.objectives.objective import mask_dummy_batch
from runner.engine.state import TrainState, finite_or_none, propagate_failure

# of train.sample_prompts=auto: the shortest ones, of rows from all parts of the held-out ones; tokens of a text
NUM_PROMPTS, PROMPT_ROWS, TEXT_PROMPT_TOKENS = 3, 32, 12
MATCHED_ROWS = 64  # of each validation set, for train.eval_metrics
SAMPLE_SEED = 0x5A3D  # samples have a generator of their own, so that the run's random state does not change


def evaluate_if_due(state: TrainState) -> None:
    """Evaluate and generate samples if that is due at this step.

    Raises StopRequested between two batches or tokens; then nothing of it is recorded, and a resumed run does all of
    it.
    """
    progress, train = state.progress, state.cfg.train
    means = evaluate_loss(state) if state.is_evaluation_due else None
    samples = generate_samples(state) if train.sample_prompts and state.is_due(train.sample_every) else None
    loss = None if means is None else finite_or_none(means["loss"])
    is_best = loss is not None and (progress.best_loss is None or loss < progress.best_loss)
    if loss is not None and is_best:
        state.checkpoints.save_best(progress.step, loss, state)
    # Nothing below raises: all of the evaluation is recorded, or nothing.
    if means is not None:
        progress.eval_loss = loss
        since = {"rows_since": progress.rows_since} if progress.rows_since else {}
        tokens = {"loss_tokens": progress.loss_tokens, "tokens": progress.tokens}
        state.logger.log("eval", progress.step, **tokens, **means, **since)
        if is_best:
            progress.best_loss, progress.best_step, progress.evals_since_best = loss, progress.step, 0
        else:
            progress.evals_since_best += 1
    if samples is not None:
        state.logger.samples(progress.step, samples)
    progress.evaluated_step = progress.step


@torch.no_grad()
def evaluate_loss(state: TrainState) -> dict[str, float]:
    """Return the means of the objective over the rows of the first validation set, and its evaluation metrics; then
    those of each named set, as `loss/law`.
    """
    means: dict[str, float] = {}
    for name in state.val_loaders:
        own = evaluate_set(state, name)
        means = (means or own) | ({f"{field}/{name}": value for field, value in own.items()} if name else {})
    return means


def evaluate_set(state: TrainState, name: str) -> dict[str, float]:
    """Return the numbers of one validation set."""
    with ending_together(state, "after this evaluation batch, then saving"):
        count, sums, per_batch = sum_losses(state, name)
    total, *values = state.dist.all_reduce_sum([count, *(value.item() for value in sums.values())])
    means = {name: value / total for name, value in zip(sums, values, strict=True)}
    means["loss"] -= means.pop("aux_loss", 0.0)  # the load-balancing loss of experts is a means of training
    # one that was not finite counts
    is_first = state.progress.best_loss is None and not state.progress.evals_since_best
    if is_first and not state.pipeline.evaluates_training_rows:
        warn_of_tiny_validation(state, len(state.pipeline.val[name].rows), per_batch)
    return means | state.objective.eval_metrics(means) | generated_metrics(state, name)


def generated_metrics(state: TrainState, name: str) -> dict[str, float]:
    """Return the numbers of train.eval_metrics: the share of last answers that the model generates exactly, ignoring
    white space at both ends, of at most MATCHED_ROWS rows from all parts of a validation set; none of answers that
    data.max_length has cut off.
    """
    if not state.cfg.train.eval_metrics:
        return {}
    rows, size, decode = state.pipeline.val[name].rows, state.cfg.train.batch_size, state.tokenizer.decode
    right, ends = 0, stop_ids(state)
    numbers = range(0, len(rows), -(-len(rows) // MATCHED_ROWS))
    pairs = [split_last_answer(rows[number].sequences[0]) for number in numbers]
    pairs = [pair for pair in pairs if pair[1][-1] in ends]
    with generating(state):
        for start in range(0, len(pairs), size):
            prompts, expected = zip(*pairs[start : start + size], strict=True)
            limit = max(map(len, expected))  # with the token that ends an answer, which `generate_ids` leaves out
            answers = generate_ids(state, "answers", prompts, limit, temperature=0)
            right += sum(
                len(ids) < limit and decode(ids).strip() == decode(own).strip()
                for ids, own in zip(answers, expected, strict=True)
            )
    return {"exact_match": right / len(pairs)} if pairs else {}


def split_last_answer(sequence: TokenSequence) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation before its last answer with loss, and those of the answer."""
    has_loss = sequence.loss_mask != 0
    begin = int((has_loss[1:] > has_loss[:-1]).nonzero()[0][-1]) + 1
    return sequence.ids[:begin].tolist(), sequence.ids[begin:][has_loss[begin:]].tolist()


@contextmanager
def generating(state: TrainState) -> Iterator[None]:
    """Generate in the block. A stop request ends it, and then raises StopRequested on every rank."""
    # Sharded weights are gathered in the dtype of the computation, so the inputs need it too.
    autocast = state.precision.autocast() if state.dist.sharded else nullcontext()
    with (
        ending_together(state, "after this token, then saving"),
        autocast,
        allow_varying_kernels(),
        suppress(StopRequested),
    ):
        enter("while it generates samples", state.progress.step)
        yield


def warn_of_tiny_validation(state: TrainState, rows: int, per_batch: list[tuple[float, torch.Tensor]]) -> None:
    """Warn if the loss over the validation rows, `rows` of them, is uncertain.

    `per_batch`: of this rank; every rank must call it.
    """
    losses = torch.stack([loss for _, loss in per_batch]).tolist() if per_batch else []
    ranks = state.dist.gather([[items for items, _ in per_batch], losses])
    items, losses = ([number for rank in ranks for number in rank[column]] for column in (0, 1))
    if symptom := tiny_validation(losses, items, rows):
        state.logger.warning(symptom.message)


def sum_losses(state: TrainState, name: str) -> tuple[float, dict[str, torch.Tensor], list[tuple[float, torch.Tensor]]]:
    """Return (items, sums of the objective, and (items, loss) of each batch) over this rank's share of the rows of a
    validation set.
    """
    loader, activity = state.val_loaders[name], f"validation {name}".strip()
    state.model.eval()
    count = 0.0
    sums: dict[str, torch.Tensor] = {}
    per_batch: list[tuple[float, torch.Tensor]] = []
    total = loader.steps_per_epoch
    with closing(loader.iter_epoch(0, stop_requested=state.stop)) as steps:
        for done, batches in enumerate(propagate_failure(steps, state.check_stop)):
            state.logger.show_activity(activity, done, total, "batches")
            for batch in batches:
                state.check_stop()
                enter("in an evaluation", state.progress.step)
                state.dist.arm_watchdog()
                with state.precision.autocast():
                    parts = mask_dummy_batch(batch, state.objective.loss(state.model, batch.to(state.dist.device)))
                count += (items := state.objective.count(batch))
                if items:  # not of a dummy batch
                    per_batch.append((items, parts["loss"].detach()))
                for key, part in parts.items():
                    wide = part.to(widest_float(part.device))
                    sums[key] = sums[key] + wide if key in sums else wide  # fetched once, at the end
    state.logger.show_activity(activity, total, total, "batches")
    return count, sums, per_batch


@contextmanager
def ending_together(state: TrainState, pending_work: str) -> Iterator[None]:
    """Let all ranks leave the block together: if it fails on this one, or some rank is asked to stop, all end.
    `pending_work`: what a stop request waits for.

    A failure under fsdp ends this rank alone: the others may wait in a forward pass.
    """
    try:
        with state.stop.working_on(pending_work):
            yield
    except Exception:  # of any kind: the other ranks have to end, too; it is raised again below
        if not state.has_joined and not state.dist.sharded:
            state.check_stop(has_failed=True)
        raise
    state.check_stop()


def generate_samples(state: TrainState) -> list[dict[str, str]]:
    """Return the model's answers to the prompts of `sample_prompts`, as a function of weights and step.

    Raises StopRequested on every rank if some rank is stopped.
    """
    prompts: list[tuple[str, list[int]]] = []
    answers: list[list[int]] = []
    with generating(state):
        prompts = sample_prompts(state)
        answers = generate_ids(
            state, "samples", [ids for _, ids in prompts], state.cfg.train.sample_tokens, temperature=0.7
        )
    return [
        {"prompt": prompt, "answer": state.tokenizer.decode(ids)}
        for (prompt, _), ids in zip(prompts, answers, strict=True)
    ]


def sample_prompts(state: TrainState) -> list[tuple[str, list[int]]]:
    """Return (text, token ids) of each prompt of train.sample_prompts; auto: of the beginnings of held-out rows."""
    tokenizer = state.tokenizer
    if state.cfg.train.sample_prompts == "auto":
        rows = next(iter(state.pipeline.val.values()), state.pipeline.train).rows
        numbers = range(0, len(rows), -(-len(rows) // PROMPT_ROWS))
        prompts = filter(None, (prompt_of_row(rows[number].sequences[0]) for number in numbers))
        return [(tokenizer.decode(ids), ids) for ids in sorted(prompts, key=len)[:NUM_PROMPTS]]
    return encode_sample_prompts(state.cfg, tokenizer)


def encode_sample_prompts(cfg: Config, tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """Return (text, token ids) of each prompt that train.sample_prompts lists.

    Raises UserError if the model has fewer positions.
    """
    chosen, positions = map(str, cfg.train.sample_prompts), cfg.model.max_position_embeddings
    if cfg.stage.data_format == "text":  # the model continues text
        prompts = [(prompt, [*tokenizer.bos_ids, *tokenizer.encode(prompt)]) for prompt in chosen]
    else:
        template = ChatTemplate(tokenizer)
        prompts = [(prompt, template.encode_prompt([{"role": "user", "content": prompt}])) for prompt in chosen]
    if (longest := max((len(ids) for _, ids in prompts), default=0)) > positions:
        message = f"a prompt has {longest:,} tokens, the model has {positions:,} positions"
        raise UserError(message, "train.sample_prompts", "shorten it")
    return prompts


def prompt_of_row(sequence: TokenSequence) -> list[int]:
    """Return the tokens of a row before the first one with loss; if all have loss, as in a text, the first tokens, and
    none if none has.
    """
    has_loss = sequence.loss_mask != 0
    begin = int(has_loss.argmax())
    if begin <= 1 and has_loss.any():
        begin = min(TEXT_PROMPT_TOKENS, len(has_loss) // 2)
    return sequence.ids[:begin].tolist()


def stop_ids(state: TrainState) -> list[int]:
    """Return the ids that end an answer, or a text."""
    is_text = state.cfg.stage.data_format == "text"
    return list(state.tokenizer.stop_ids) if is_text else ChatTemplate(state.tokenizer).stop_ids


def generate_ids(
    state: TrainState,
    activity: str,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float,
) -> list[list[int]]:
    """Return the token ids of the answers. Raises StopRequested before a token."""
    tokens = itertools.count()

    def before_token() -> None:
        # Only ranks that share every forward pass certainly generate the same number of tokens; the others agree at the
        # end.
        if state.dist.sharded:
            state.check_stop()
        elif state.stop():
            raise StopRequested
        state.logger.show_activity(activity, next(tokens), max_new_tokens * len(prompts), "tokens at most")

    answers = generate(
        state.model,
        list(prompts),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=0,
        top_p=0.9,
        repetition_penalty=1.0,
        stop_ids=stop_ids(state),
        generator=torch.Generator(state.dist.device).manual_seed(SAMPLE_SEED + state.progress.step),
        before_token=before_token,
    )
    state.logger.show_activity(activity, 1, 1, "")
    return answers
