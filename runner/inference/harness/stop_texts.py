"""Generation that ends at texts, in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from models.generate import generate

if TYPE_CHECKING:
    from runner.inference.load import LoadedModel


class _AllStopped(Exception):
    """No row needs another token."""


def generate_until_stop(
    trained: LoadedModel, prompts: list[list[int]], settings: dict[str, Any], stop_ids: list[int], check_stop: Callable[[], None]
) -> list[str]:
    """Return the continuation of each prompt up to the first of `settings["until"]`, which may be texts of control tokens.

    `settings`: those of lm_eval.models.utils.normalize_gen_kwargs; `check_stop` is called before each token and may raise.
    """
    stops = [stop for stop in settings["until"] if stop]
    lookback = max((len(stop.encode()) for stop in stops), default=0) + 1  # tokens; one is at least a byte
    answers: list[list[int]] = [[] for _ in prompts]
    stopped: set[int] = set()  # rows with a stop text
    continued: set[int] | None = None  # rows that the last step has given a token

    def on_token(row: int, token: int) -> None:
        if continued is not None:
            continued.add(row)
        if row in stopped:
            return
        answers[row].append(token)
        text = trained.tokenizer.decode(answers[row][-lookback:], skip_special=False)
        if any(stop in text for stop in stops):
            stopped.add(row)

    def before_token() -> None:
        nonlocal continued
        check_stop()
        if continued is not None and continued <= stopped:
            raise _AllStopped
        continued = set()

    is_greedy = not settings.get("do_sample") or not settings.get("temperature")
    try:
        generate(
            trained.model,
            prompts,
            max_new_tokens=settings["max_gen_toks"],
            temperature=0.0 if is_greedy else float(settings["temperature"]),
            top_k=int(settings.get("top_k") or 0),
            top_p=float(settings.get("top_p") or 1),
            repetition_penalty=float(settings.get("repetition_penalty") or 1),
            stop_ids=stop_ids,
            on_token=on_token,
            before_token=before_token,
        )
    except _AllStopped:
        pass
    texts = [trained.tokenizer.decode(answer) for answer in answers]
    return [min((text.split(stop)[0] for stop in stops), key=len, default=text) for text in texts]
