"""A model of this program as lm-evaluation-harness calls it.

Contexts, continuations, windows and stop texts are those of the harness's own class for models of transformers
(lm_eval.models.huggingface.HFLM), so the numbers are, too. Requests are computed in the order of the documents, sorted
by length within parts, so that what is done when the user stops is a beginning of the data, and has a result.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from common.errors import StopRequested, UserError
from models.generate import Sampler
from runner.inference.generation import Answer, Score, compute_batch
from runner.inference.load import LoadedModel
from runner.tracking.progress import EvaluationProgress

if TYPE_CHECKING:
    from lm_eval.api.task import Task

BATCHES_PER_PART = 4  # batches whose requests are sorted by length together
GENERATION_SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty")


class AnswerLog:
    def __init__(self) -> None:
        self.is_complete = False  # nothing is computed any more: requests get the answers that they have had
        self._answers: dict[tuple, deque[Any]] = defaultdict(deque)  # several of a request that a task repeats

    def add(self, request: Instance, answer: Any) -> None:
        self._answers[_key(request)].append(answer)

    def next_answer(self, request: Instance) -> Any:
        answers = self._answers[_key(request)]
        answers.rotate(-1)  # in turn, as often as they are asked for
        return answers[-1]

    def count_documents(self, task: Task) -> int:
        """Return the number of documents, from the first one on, all of whose requests were answered."""
        if not vars(task).get("_instances"):
            return 0  # stopped while the requests were built
        missing = [
            request.doc_id or 0
            for request in task.instances
            if len(self._answers[_key(request)]) < (request.repeats or 1)
        ]
        return min(missing, default=len({request.doc_id or 0 for request in task.instances}))


def _key(request: Instance) -> tuple:
    return request.task_name, request.doc_id, request.request_type, request.idx, repr(request.args)


def _length(works: list[Any]) -> int:
    return sum(len(work.ids if isinstance(work, Score) else work.prompt) for work in works)


def _log_prob(score: Score) -> float:
    return float(torch.tensor(score.own).sum())


def _is_greedy(score: Score) -> bool:
    """Return whether greedy decoding gives the same tokens."""
    return [best for [(best, _)] in score.best] == score.ids[score.first :]


class HarnessModel(TemplateLM):
    """`answers` has what was answered when StopRequested was raised, and answers those requests again."""

    def __init__(self, trained: LoadedModel, batch_size: int, progress: EvaluationProgress) -> None:
        super().__init__()
        self.trained, self.rows, self.progress = trained, batch_size, progress
        self.max_length = trained.model.cfg.max_position_embeddings
        self.answers = AnswerLog()
        self.shortened = 0  # requests whose context lost its beginning
        self.is_computing = False  # whether an exception is the model's, not the task's
        self._is_chat = False  # whether the chat template is used
        self._samplers: dict[tuple[float, ...], Sampler] = {}  # by the settings of the answers that share one

    @property
    def eot_token_id(self) -> int:
        return self.trained.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        bos_id = self.trained.tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.trained.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.trained.tokenizer.chat_template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        self._is_chat = True
        return self.trained.template.render_prompt(
            chat_history, "a document of the task", continues_answer=not add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text in which control tokens are meant as such, with the tokens that the tokenizer adds unless it
        begins with a bos_token.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(
                self.trained.tokenizer.decode([self.prefix_token_id], skip_special=False)
            )
        return self.trained.tokenizer.encode_rendered(string, add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return of each continuation its log-probability, and whether greedy decoding gives it.

        Contexts that are too long lose their beginning.
        """
        scores = [[self._encode_request(*request.args)] for request in requests]
        return self._answer("requests", requests, scores, lambda works: (_log_prob(*works), _is_greedy(*works)))

    def _encode_request(self, context: str, continuation: str) -> Score:
        if context:
            context_ids, ids = self._encode_pair(context, continuation)
        else:
            context_ids, ids = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
            if ids[:1] == context_ids:
                ids = ids[1:]
        if not ids or len(ids) > self.max_length:
            problem = (
                f"has {len(ids):,} tokens, the model takes {self.max_length:,}" if ids else "has no token of its own"
            )
            raise UserError(
                f"the continuation {continuation[:60]!r} {problem}",
                f"context {context[-60:]!r}",
                "leave the task out, or correct its rows",
            )
        self.shortened += len(context_ids) + len(ids) > self.max_length + 1
        return self._score(context_ids, ids)

    def _score(self, context_ids: list[int], ids: list[int]) -> Score:
        whole = (context_ids + ids)[-self.max_length - 1 :]
        return Score(ids=whole, first=len(whole) - len(ids))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, each token given as many of those before it as the model takes."""
        windows = [self._windows(self.tok_encode(request.args[0])) for request in requests]
        return self._answer("texts", requests, windows, lambda works: sum(map(_log_prob, works)))

    def _windows(self, ids: list[int]) -> list[Score]:
        windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
        return [self._score(list(context), list(tokens)) for context, tokens in map(make_disjoint_window, windows)]

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
        raise NotImplementedError("`loglikelihood` encodes and computes the requests")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context up to one of the task's stop texts."""
        answers = [[self._begin_answer(*request.args)] for request in requests]
        return self._answer("answers", requests, answers, lambda works: works[0].text)

    def _begin_answer(self, context: str, given: dict[str, Any]) -> Answer:
        settings, ids = self._settings(given), self.tok_encode(context)
        limit = self.max_length - settings["max_gen_toks"]
        self.shortened += len(ids) > limit
        chosen = (
            float(settings.get("temperature") or 0) if settings.get("do_sample") else 0.0,
            int(settings.get("top_k") or 0),
            float(settings.get("top_p") or 1),
            float(settings.get("repetition_penalty") or 1),
        )
        return Answer(
            prompt=ids[-limit:] or [self.prefix_token_id],
            limit=settings["max_gen_toks"],
            sampler=self._samplers.setdefault((settings["max_gen_toks"], *chosen), Sampler(*chosen)),
            stop_ids=self.trained.stop_ids(self._is_chat),
            tokenizer=self.trained.tokenizer,
            stops=tuple(stop for stop in settings["until"] if stop),
        )

    def _settings(self, given: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = dict(normalize_gen_kwargs(given))
        if unknown := sorted(
            name
            for name, value in settings.items()
            if name not in GENERATION_SETTINGS and (name, value) != ("num_beams", 1)
        ):
            message = f"the task generates with {unknown[0]}={settings[unknown[0]]}, which is not supported"
            raise UserError(message, "generation_kwargs of the task", f"it may have {', '.join(GENERATION_SETTINGS)}")
        if settings["max_gen_toks"] >= self.max_length:
            message = f"the task generates up to {settings['max_gen_toks']:,} tokens, the model takes {self.max_length:,} with the question"
            raise UserError(
                message,
                "generation_kwargs of the task",
                "a copy of the task with a smaller max_gen_toks in tasks_path=FOLDER",
            )
        return settings

    def _answer(
        self, unit: str, requests: list[Instance], works: list[list[Any]], read: Callable[[list[Any]], Any]
    ) -> list[Any]:
        """Return what `read` gives of the works of each request, which are computed in batches."""
        if not self.answers.is_complete:
            self.is_computing = True
            self.progress.begin(unit, len(requests))
            size = self.rows * BATCHES_PER_PART
            order = sorted(range(len(requests)), key=lambda i: (i // size, -_length(works[i])))
            for start in range(0, len(order), self.rows):
                self._check_stop()
                batch = order[start : start + self.rows]
                for sampler in self._samplers.values():
                    sampler.generator = None  # each batch draws from a new one
                compute_batch(self.trained, [work for i in batch for work in works[i]], self.rows, self._check_stop)
                for i in batch:
                    self.answers.add(requests[i], read(works[i]))
                self.progress.advance(start + len(batch))
            self.is_computing = False
        return [self.answers.next_answer(request) for request in requests]

    def _check_stop(self) -> None:
        if self.progress.should_stop():
            raise StopRequested
