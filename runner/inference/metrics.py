"""Metrics of evaluate.py on data files, found by `metric=NAME`."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, print_safely
from common.guarded_files import MAX_TOKENIZER_BYTES, read_source_file
from common.limits import parse_json
from data.schemas.registry import ChatExample
from data.types import BadRowError
from runner.inference.evaluate import EvaluateConfig, MetricResults, register_metric
from runner.inference.evaluation_data import EvaluationSet
from runner.inference.load import LoadedModel, load_trained
from runner.run_dir.metadata import RunMetadata

if TYPE_CHECKING:
    from data.batching.batch import Batch
    from data.tokenize.tokenizer import Tokenizer

SPACE = "\u2581"  # how tokenizers without byte-level pre-tokenization write a space
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # byte fallback: one byte of a character that is not in the vocabulary


@register_metric("perplexity", reads=("text", "chat"))
def perplexity(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Mean loss per token with a label, in nats, exp(loss), and the loss in bits per byte of these tokens, which does
    not depend on the tokenizer.

    As in an evaluation of a run, a row counts once, and a message with a weight as in training, in the loss and in the
    bytes. Special tokens with a label (the end of a text) have no bytes.
    """
    loss, weight, tokens, num_bytes = 0.0, 0.0, 0, 0.0
    bytes_of = TokenBytes(trained.tokenizer)
    for batch in examples.batches(trained, cfg.batch_size):
        weights = (batch.labels >= 0 if batch.loss_weights is None else batch.loss_weights).double()
        loss += (trained.model(**batch.inputs).nll.double() * weights).sum().item()
        weight += weights.sum().item()
        tokens += int((batch.labels >= 0).sum())
        num_bytes += bytes_of.count(batch)
    if not tokens:
        raise UserError(
            "no token of the data has a label, so there is no loss",
            f"data.path={examples.cfg.path}",
            "choose a file with texts or answers",
        )
    results: MetricResults = {
        "loss": loss / weight,
        "perplexity": math.exp(min(loss / weight, 700.0)),
        "loss_tokens": tokens,
    }
    return results | ({"bits_per_byte": loss / math.log(2) / num_bytes} if num_bytes else {})


class TokenBytes:
    """Counts the UTF-8 bytes of the tokens with a label: losses of different tokenizers are comparable per byte.

    Special tokens, also the end of a text, have none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        import numpy as np

        stored = parse_json(read_source_file(tokenizer.folder / "tokenizer.json", MAX_TOKENIZER_BYTES))
        is_byte_level = _has_type(stored["pre_tokenizer"], "ByteLevel")  # one character of a token per byte
        has_byte_tokens = bool(stored["model"].get("byte_fallback"))
        self._bos_id = tokenizer.bos_id
        token_ids = tokenizer.token_ids()
        self._counts = np.zeros(max(token_ids.values()) + 1, np.int64)  # (V,) bytes of each token
        self._starts_with_space = np.zeros(len(self._counts), bool)
        for token, i in token_ids.items():
            if token in tokenizer.control_ids:
                size = 0 if token in tokenizer.special_tokens else len(token.encode())
            elif is_byte_level:
                size = len(token)
            else:
                size = 1 if has_byte_tokens and BYTE_TOKEN.fullmatch(token) else len(token.replace(SPACE, " ").encode())
                self._starts_with_space[i] = token.startswith(SPACE)
            self._counts[i] = size
        unknown = stored["model"].get("unk_token") or stored["model"].get("unk_id") is not None
        # tokens without the spaces between them, or a token for text of any length
        if stored["model"]["type"] in ("WordPiece", "WordLevel") or (
            unknown and not (is_byte_level or has_byte_tokens)
        ):
            self._counts[:] = 0
        # SentencePiece's tokenizers put a space before a text, which is no byte of it.
        self._adds_space = _has_type(stored["normalizer"], "Prepend") or _prepends(stored["pre_tokenizer"])

    def count(self, batch: Batch) -> float:
        """Return the number of bytes of the tokens with a label, each times its weight in the loss."""
        labels, inputs = batch.labels.cpu().numpy(), batch.input_ids.cpu().numpy()
        has_label = labels >= 0
        sizes = self._counts[labels[has_label]]
        if self._adds_space and self._bos_id is not None:
            sizes = sizes - self._starts_with_space[labels[has_label]] * (inputs[has_label] == self._bos_id)
        if batch.loss_weights is None:
            return float(sizes.sum())
        return float(sizes @ batch.loss_weights.cpu().numpy()[has_label].astype(float))


def _has_type(part: Any, name: str) -> bool:
    """Return whether a component of tokenizer.json, or one inside of it, has this type."""
    return f'"type": "{name}"' in json.dumps(part)


def _prepends(pre_tokenizer: Any) -> bool:
    return _has_type(pre_tokenizer, "Metaspace") and '"prepend_scheme": "never"' not in json.dumps(pre_tokenizer)


@register_metric("preference", reads=("preference",))
def preference(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of pairs whose implicit reward (https://arxiv.org/abs/2305.18290) is larger for chosen than for
    rejected, and the mean margin.

    The reward is the log-ratio of model and reference in nats: beta is 1.
    """
    from models.language_model import stored_tensors
    from runner.checkpoint.compatibility import has_other_frozen_weights
    from runner.engine.objectives.dpo import Dpo
    from runner.engine.objectives.objective import Reference

    name = cfg.reference or _reference_of(trained.run_dir)
    reference = load_trained(Path(name), cfg.device, "reference")
    if reference.tokenizer.tokens_fingerprint != trained.tokenizer.tokens_fingerprint:
        raise UserError(
            "the reference has another tokenizer: its probabilities are those of other tokens",
            f"reference={name}",
            "name the model that the run started from",
        )
    # under adapters the checkpoint names the base, perhaps in 4 bits or merged
    is_known = not (cfg.reference or trained.has_adapter or reference.has_adapter)
    if is_known and has_other_frozen_weights(trained.run_dir, stored_tensors(reference.model)):
        raise UserError(
            "the weights that the run started from have changed since",
            name,
            f"reference=DIR names a copy of them, or a checkpoint {name}@step-N; reference={name} takes the changed ones",
        )
    objective = Dpo(1.0, Reference(reference.compute_in(cfg.dtype).model))
    pairs, totals = 0, {"reward_accuracy": 0.0, "reward_margin": 0.0}
    for batch in examples.batches(trained, cfg.batch_size):
        sums = objective.loss(trained.model, batch)
        pairs += objective.count(batch)
        totals = {name: total + sums[name].item() for name, total in totals.items()}
    return {name: total / pairs for name, total in totals.items()} | {"rows": pairs}


def _reference_of(run_dir: Path) -> str:
    source = RunMetadata.read(run_dir).get("init_from")
    if not source or source == "scratch":
        raise UserError(
            "no reference model is recorded for this model",
            f"run={run_dir}",
            "give the model before DPO: reference=DIR",
        )
    return str(source)


@register_metric("exact_match", reads=("chat",))
def exact_match(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of conversations whose last answer the model generates exactly (see `hold_dialogues`)."""
    dialogues = hold_dialogues(trained, _dialogues(examples, cfg.batch_size, all_turns=False), cfg)
    right = sum(dialogue.right[0] for dialogue in dialogues)
    return {"exact_match": right / len(dialogues), "right": right, "rows": len(dialogues)}


@register_metric("conversation", reads=("chat",))
def conversation(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Fraction of answers that the model generates exactly, with its own earlier answers in the prompts: exact_match of
    all, first_turn and last_turn of each conversation.
    """
    done = hold_dialogues(trained, _dialogues(examples, cfg.batch_size, all_turns=True), cfg)
    answers = [right for dialogue in done for right in dialogue.right]
    return {
        "exact_match": sum(answers) / len(answers),
        "first_turn": sum(dialogue.right[0] for dialogue in done) / len(done),
        "last_turn": sum(dialogue.right[-1] for dialogue in done) / len(done),
        "right": sum(answers),
        "answers": len(answers),
        "rows": len(done),
    }


@dataclass
class Dialogue:
    """A conversation, in which answers of the model replace those of the data."""

    where: str  # file:line
    messages: list[dict[str, Any]]
    tools: list[dict] | None
    turns: list[int]  # positions of the answers that the model gives
    names_turns: bool  # in the description of a wrong answer
    right: list[bool] = field(default_factory=list)  # of each answer so far

    @property
    def is_done(self) -> bool:
        return len(self.right) == len(self.turns)

    def encode_prompt(self, trained: LoadedModel, max_new_tokens: int) -> list[int]:
        """Return the prompt of the next answer."""
        prompt = trained.template.encode_prompt(self.messages[: self.turns[len(self.right)]], self.tools)
        limit = trained.model.cfg.max_position_embeddings - max_new_tokens
        if len(prompt) > limit:
            raise UserError(
                f"the question has {len(prompt)} tokens, the model takes {max(limit, 0)} with max_new_tokens={max_new_tokens}",
                self.where,
                "lower max_new_tokens, or delete the row",
            )
        return prompt

    def expected(self, trained: LoadedModel) -> str:
        """Return the answer in the data, with its reasoning and tool calls as the template renders them after a prompt."""
        *before, message = self.messages[: self.turns[len(self.right)] + 1]
        messages = [*before, {name: value for name, value in message.items() if name != "weight"}]
        if message.get("reasoning_content") or message.get("tool_calls"):
            with suppress(BadRowError):  # the template drops them
                prompt = trained.template.encode_prompt(before, self.tools)
                segments = trained.template.segments(messages, self.tools, self.where, "last_assistant")
                [(ids, spans)] = trained.template.encode_segments([segments])
                if ids[: len(prompt)].tolist() == prompt:
                    answer = [token for start, end, _ in spans for token in ids[start:end].tolist()]
                    return trained.tokenizer.decode(
                        [token for token in answer if token not in trained.template.stop_ids]
                    )
        return str(message["content"])

    def take(self, answer: str, expected: str) -> str | None:
        """Replace the expected answer; return a description if they differ beyond leading and trailing white space."""
        position = self.turns[len(self.right)]
        self.messages[position] = {"role": "assistant", "content": answer}
        self.right.append(answer.strip() == expected.strip())
        if self.right[-1]:
            return None
        question = self.messages[position - 1]["content"] if position else ""
        where = f"{self.where}: turn {len(self.right)}" if self.names_turns else self.where
        return f"{where}: {question!r}\n    expected {expected!r}\n    answered {answer!r}"


def hold_dialogues(trained: LoadedModel, dialogues: Iterator[Dialogue], cfg: EvaluateConfig) -> list[Dialogue]:
    """Let the model generate its answers greedily, in batches. Prints the first `cfg.show` wrong ones."""
    from models.generate import Sampler, generate_rows
    from runner.inference.generation import Answer

    greedy = Sampler(temperature=0, top_k=0, top_p=1, penalty=1)
    stop_ids = trained.stop_ids(is_chat=True)
    done, left_to_show = list[Dialogue](), cfg.show
    while batch := list(itertools.islice(dialogues, cfg.batch_size)):
        done += batch
        while waiting := [dialogue for dialogue in batch if not dialogue.is_done]:
            answers = [
                Answer(
                    prompt=dialogue.encode_prompt(trained, cfg.max_new_tokens),
                    limit=cfg.max_new_tokens,
                    sampler=greedy,
                    stop_ids=stop_ids,
                    tokenizer=trained.tokenizer,
                )
                for dialogue in waiting
            ]
            generate_rows(trained.model, answers)
            for dialogue, answer in zip(waiting, answers, strict=True):
                if (wrong := dialogue.take(answer.text, dialogue.expected(trained))) and left_to_show:
                    left_to_show -= 1
                    print_safely(wrong)
    return done


def _dialogues(examples: EvaluationSet, batch_size: int, *, all_turns: bool) -> Iterator[Dialogue]:
    for where, chat in examples.examples(batch_size):
        assert isinstance(chat, ChatExample)
        roles = [message["role"] for message in chat.messages]
        # an assistant that begins (data.turns=merge) answers nothing
        turns = [i for i, role in enumerate(roles) if role == "assistant" and "user" in roles[:i]]
        if not all_turns:
            if roles[-1] != "assistant":
                raise UserError(
                    f"the conversation ends with a message of the {roles[-1]}", where, "end it with the expected answer"
                )
            turns = [len(roles) - 1]
        elif not turns:
            raise UserError(
                "the conversation has no answer of the assistant", where, "add the expected answers, or delete the row"
            )
        elif any(message.get("tool_calls") for message in chat.messages):
            raise UserError(
                "a tool call of the model's own would have no result to continue with",
                where,
                "metric=exact_match measures the last answer",
            )
        yield Dialogue(where, list(chat.messages), chat.tools, turns, names_turns=all_turns)
