"""Encoded rows, counts of what happened to the rows of a file, and what data.max_length cuts off."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from data.schemas.registry import ChatExample, PreferencePair

SAMPLED_ROWS = 64  # from the beginning of a file
SHOWN_CHARACTERS = 40  # of an answer
# What begins a turn in the chat templates in use: text that has it was rendered already
MARKERS = {
    "<|im_start|>": "ChatML",
    "<|start_header_id|>": "Llama 3",
    "<|header_start|>": "Llama 4",
    "[INST]": "Llama 2 and Mistral",
    "<start_of_turn>": "Gemma",
    "<|start_of_role|>": "Granite",
    "<|assistant|>": "Phi, Zephyr and GLM",
    "<\uff5cAssistant\uff5c>": "DeepSeek",
    "### Response:": "Alpaca",
    "ASSISTANT:": "Vicuna",
}
LossSpan = tuple[int, int, float]  # [start, stop) within a sequence, and the weight of its tokens in the loss
LabelledIds = tuple[np.ndarray, list[LossSpan]]  # (ids: int32, spans of tokens with loss) of one sequence
# (position in its file: line number or index, weight, ids as bytes of int32 and spans of its one or two sequences)
LabelledRow = tuple[int, float, list[tuple[bytes, list[LossSpan]]]]
WARN_ABOVE = 0.05  # share of the tokens with loss
KEPT_SHARE = 0.99  # of the tokens with loss, with the limit that the warning names
# times the given limit, from which on the named limit gets its price, and a lower one of at most half of it is named,
# too
LONG = 4
MAXIMA = ("longest_conversation", "most_answers")  # counts of RowStats of which the stats of a whole have the largest


@dataclass
class RowStats:
    """Counts of the rows of a source, by what happened to them. Stats of parts add up, except MAXIMA."""

    read: int = 0
    kept: int = 0
    split: int = 0  # texts cut into several encoded rows
    truncated: int = 0  # conversations without their end
    tokens: int = 0
    loss_tokens: int = 0  # tokens with loss
    lost_loss_tokens: int = 0  # tokens that would have loss if no row were truncated or dropped for its length
    longest_conversation: int = 0  # tokens
    most_answers: int = 0  # of the assistant in one conversation; 0: not counted, because not every answer has loss
    # these tokens, by the data.max_length (see round_up_length) that keeps them
    lost_by_length: Counter[int] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)  # rows left out because of a setting, by reason
    bad: Counter[str] = field(default_factory=Counter)  # rows that cannot be used, by reason
    # rows in which a field that training ignores is not null, by field
    unused: Counter[str] = field(default_factory=Counter)
    first_seen: dict[str, str] = field(default_factory=dict)  # file:line of the first row of each reason
    sampled: Counter[str] = field(default_factory=Counter)  # see `count_sample`: the first rows of a file
    common_answers: Counter[str] = field(default_factory=Counter)  # their most common answer, shortened

    @property
    def left_out(self) -> str:
        """How many rows were left out and why, e.g. `3 bad JSON (first: a.jsonl:7)`; empty for none."""
        counts = (self.bad + self.dropped).most_common()
        return ", ".join(f"{count} {reason} (first: {self.first_seen[reason]})" for reason, count in counts)

    def __iadd__(self, other: RowStats) -> RowStats:
        for part in dataclasses.fields(self):
            mine, added = getattr(self, part.name), getattr(other, part.name)
            setattr(
                self,
                part.name,
                {**added, **mine}
                if part.name == "first_seen"
                else max(mine, added)
                if part.name in MAXIMA
                else mine + added,
            )
        return self

    def count_lost(self, first: int, last: int) -> None:
        """Count lost tokens with loss, of which the n-th needs data.max_length >= first + n."""
        self.lost_loss_tokens += last - first
        while first < last:
            limit = round_up_length(first + 1)
            self.lost_by_length[limit] += min(limit, last) - first
            first = min(limit, last)

    def count_lost_answer(self, tokens: int, max_length: int) -> None:
        """Count lost tokens with loss that all need this `max_length`."""
        self.lost_loss_tokens += tokens
        self.lost_by_length[round_up_length(max_length)] += tokens

    def count_dropped(self, kind: str, reason: str, where: str) -> None:
        """Count a row that is left out; `kind` is dropped or bad."""
        getattr(self, kind)[reason] += 1
        self.first_seen.setdefault(reason, where)


def round_up_length(length: int) -> int:
    """Return the length, or at most 1/32 more: few different values however long the rows are."""
    step = 1 << max(length.bit_length() - 6, 0)
    return -(-length // step) * step


@dataclass
class EncodedBlock:
    """Some encoded rows of a source."""

    rows: list[LabelledRow]
    stats: RowStats


def count_sample(examples: list[ChatExample | PreferencePair]) -> tuple[Counter[str], Counter[str]]:
    """Return counts of the examples, and the most common answer with its count.

    Counted are `rows`, `answers` (to a question), `echoes` (answers that are their question), different `questions`,
    and by marker the rows with it.
    """
    counts = Counter({"rows": len(examples)})
    for example in examples:
        text = "\0".join(str(message.get("content", "")) for chat in example.chats for message in chat.messages)
        counts.update(marker for marker in MARKERS if marker in text)
    pairs = [pair for example in examples if (pair := _question_and_answer(example)) is not None]
    counts["answers"] = len(pairs)
    counts["echoes"] = sum(question == answer for question, answer in pairs)
    counts["questions"] = len({question for question, _ in pairs})
    common = Counter(answer for _, answer in pairs).most_common(1)
    return counts, Counter({answer[:SHOWN_CHARACTERS]: count for answer, count in common})


def _question_and_answer(example: ChatExample | PreferencePair) -> tuple[str, str] | None:
    """Return the last question of a conversation and the answer to it."""
    if isinstance(example, PreferencePair):
        return None
    turns = [(message["role"], str(message.get("content", "")).strip()) for message in example.messages]
    for (asker, question), (role, answer) in reversed(list(itertools.pairwise(turns))):
        if asker == "user" and role == "assistant" and answer:
            return question, answer
    return None


@dataclass(frozen=True)
class Truncation:
    lost: int  # tokens with loss that are cut off
    total: int  # tokens with loss, the lost ones included
    rows: int  # rows that are cut off or dropped
    limit: int  # the data.max_length that keeps KEPT_SHARE of them; the given one if that keeps as many
    # one of at most half of it, above which a token costs more length than before it: few rows need it; 0: there is
    # none
    lower_limit: int = 0
    lower_kept: float = 0.0  # share of the tokens with loss that it keeps

    @property
    def share(self) -> float:
        return self.lost / max(1, self.total)


def measure_truncation(stats: Iterable[RowStats], max_length: int) -> Truncation:
    """Return what `max_length` costs in files with these `stats`."""
    stats = list(stats)
    lost, kept = sum(part.lost_loss_tokens for part in stats), sum(part.loss_tokens for part in stats)
    total, limit = lost + kept, max_length
    needed: Counter[int] = sum((part.lost_by_length for part in stats), Counter())
    steps = [(max_length, kept)]  # (data.max_length, tokens with loss that it keeps)
    for longer in sorted(needed):
        if kept >= KEPT_SHARE * total:
            break
        kept, limit = kept + needed[longer], longer
        steps.append((limit, kept))
    lower, lower_kept = _lower_limit(steps)
    rows = sum(part.truncated + sum(part.dropped.values()) for part in stats)
    return Truncation(lost, total, rows, limit, lower, lower_kept / max(1, total))


def _lower_limit(steps: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the (limit, kept tokens) that is farthest above the straight line from the first to the last of `steps`:
    the knee of the curve.
    """
    (shortest, least), (longest, most) = steps[0], steps[-1]
    candidates = [step for step in steps[1:] if 2 * step[0] <= longest and longest >= LONG * shortest]
    above = [(kept - least) * (longest - shortest) - (most - least) * (limit - shortest) for limit, kept in candidates]
    return candidates[above.index(max(above))] if above and max(above) > 0 else (0, 0)


def truncation_warning(stats: Iterable[RowStats], max_length: int, max_positions: int) -> str | None:
    """Return a warning, with the limits that keep more, if more than WARN_ABOVE of the tokens with loss are lost;
    `max_positions`: model.max_position_embeddings.
    """
    cut = measure_truncation(stats, max_length)
    if cut.share <= WARN_ABOVE:
        return None

    def overrides(limit: int) -> str:
        return f"data.max_length={limit}" + (f" model.max_position_embeddings={limit}" if limit > max_positions else "")

    # of a much longer limit: a single long row may need it
    price = f", {cut.limit / max_length:.0f} times as long," if cut.limit >= LONG * max_length else ""
    lower = f"{overrides(cut.lower_limit)} keeps {cut.lower_kept:.0%}, " if cut.lower_limit else ""
    found = f"data.max_length={max_length} cuts off {cut.share:.1%} of the tokens with loss ({cut.lost:,}, in {cut.rows:,} rows)"
    return f"{found}; {lower}{overrides(cut.limit)}{price} keeps {KEPT_SHARE:.0%}"
