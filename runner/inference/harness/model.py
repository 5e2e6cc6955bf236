"""A model of this program as lm-evaluation-harness calls it.

Contexts, continuations, windows and stop texts are those of the harness's own class for models of transformers
(lm_eval.models.huggingface.HFLM), so the numbers are, too. Requests are computed in the order of the documents, sorted
by length within parts, so that what is done when the user stops is a beginning of the data, and has a result.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from common.errors import StopRequested, UserError
from data.tokenize.chat_template import ChatTemplate
from models.generate import generate
from runner.inference.load import LoadedModel
from runner.tracking.progress import EvaluationProgress

if TYPE_CHECKING:
    from lm_eval.api.task import Task


class AnswerLog:
    def __init__(self) -> None:
        self.is_complete = False  # nothing is computed any more: requests get the answers that they have had
        self._answers: dict[tuple, list[Any]] = defaultdict(list)  # several of a request that a task repeats

    def add(self, request: Instance, answer: Any) -> None:
        self._answers[_key(request)].append(answer)

    def next_answer(self, request: Instance) -> Any:
        answers = self._answers[_key(request)]
        answers.append(answers.pop(0))  # in turn, as often as they are asked for
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
        documents = {request.doc_id or 0 for request in task.instances}
        return min(missing, default=len(documents))


def _key(request: Instance) -> tuple:
    return request.task_name, request.doc_id, request.request_type, request.idx, repr(request.args)


class _AllStopped(Exception):
    """No row needs another token."""


def generate_until_stop(
    trained: LoadedModel,
    prompts: list[list[int]],
    settings: dict[str, Any],
    stop_ids: list[int],
    check_stop: Callable[[], None],
) -> list[str]:
    """Return the continuation of each prompt up to the first of `settings["until"]`, which may be texts of control
    tokens.

    `settings`: those of lm_eval.models.utils.normalize_gen_kwargs; `check_stop` is called before each token and may
    raise.
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


MAX_LOGITS = 1 << 28  # of a batch: fewer rows than batch_size where the vocabulary is large
BATCHES_PER_PART = 4  # batches whose requests are sorted by length together
GENERATION_SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty")

Scored = tuple[Any, list[int], list[int]]  # (texts, tokens of the context, tokens of the continuation)
LogProb = tuple[float, bool]  # (log-probability, whether greedy decoding gives the same tokens)


class HarnessModel(TemplateLM):
    """`answers` has what was answered when StopRequested was raised, and answers those requests again."""

    def __init__(self, trained: LoadedModel, batch_size: int, progress: EvaluationProgress) -> None:
        super().__init__()
        self.trained, self.rows, self.progress = trained, batch_size, progress
        self.max_length = trained.model.cfg.max_position_embeddings
        self.answers = AnswerLog()
        self.shortened = 0  # requests whose context lost its beginning
        self.is_computing = False  # whether an exception is the model's, not the task's
        self._template = ChatTemplate(trained.tokenizer) if trained.tokenizer.chat_template is not None else None
        self._is_chat = False  # whether the template is used

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
        assert self._template is not None, "refused by `run_tasks`"
        self._is_chat = True
        return self._template.render_prompt(
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

    # --- log-probabilities
    # --------------------------------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[LogProb]:
        """Return of each continuation its log-probability. Contexts that are too long lose their beginning."""
        scored = [self._encode_request(*request.args) for request in requests]
        return self._answer(
            "requests", requests, scored, lambda each: ("", -len(each[1]) - len(each[2])), self._loglikelihood_tokens
        )

    def _encode_request(self, context: str, continuation: str) -> Scored:
        if context:
            context_ids, ids = self._encode_pair(context, continuation)
        else:
            context_ids, ids = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
            if ids[:1] == context_ids:
                ids = ids[1:]
        if not ids or len(ids) > self.max_length:
            problem = (
                "has no token of its own"
                if not ids
                else f"has {len(ids):,} tokens, the model takes {self.max_length:,}"
            )
            raise UserError(
                f"the continuation {continuation[:60]!r} {problem}",
                f"context {context[-60:]!r}",
                "leave the task out, or correct its rows",
            )
        self.shortened += len(context_ids) + len(ids) > self.max_length + 1
        return (context, continuation), context_ids, ids

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, each token given as many of those before it as the model takes."""
        windows = [self._windows(self.tok_encode(request.args[0])) for request in requests]
        return self._answer("texts", requests, windows, lambda each: ("", -len(each)), self._sums)

    def _windows(self, ids: list[int]) -> list[Scored]:
        windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
        return [(None, list(context), list(tokens)) for context, tokens in map(make_disjoint_window, windows)]

    def _sums(self, texts: list[list[Scored]]) -> list[float]:
        scores = self._loglikelihood_tokens([window for windows in texts for window in windows])
        ends = accumulate(map(len, texts), initial=0)
        return [sum(score for score, _ in scores[start:end]) for start, end in pairwise(ends)]

    def _loglikelihood_tokens(self, requests: list[Scored], **_: Any) -> list[LogProb]:
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        results: dict[int, LogProb] = {}
        while len(results) < len(order):
            self._check_stop()
            rest = order[len(results) :]
            _, context, continuation = requests[rest[0]]
            length = min(self.max_length, len(context) + len(continuation))
            batch = rest[: max(1, min(self.rows, MAX_LOGITS // (length * self.trained.model.cfg.vocab_size)))]
            results |= zip(batch, self._score([requests[i] for i in batch]), strict=True)
        return [results[i] for i in range(len(requests))]

    @torch.inference_mode()
    def _score(self, requests: list[Scored]) -> list[LogProb]:
        whole = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        rows = [torch.tensor(ids[:-1]) for ids in whole]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.trained.device)
        logits = self.trained.model(ids).logits  # (B, T, V)
        assert isinstance(logits, Tensor)
        results = []
        for row, tokens, (_, _, continuation) in zip(logits, whole, requests, strict=True):
            count = len(continuation)
            log_probs = row[len(tokens) - 1 - count : len(tokens) - 1].float().log_softmax(-1)  # (count, V)
            targets = torch.tensor(tokens[-count:], device=row.device)
            results.append(
                (
                    float(log_probs.gather(-1, targets.unsqueeze(-1)).sum()),
                    bool((log_probs.argmax(-1) == targets).all()),
                )
            )
        return results

    # --- generation
    # ---------------------------------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context up to one of the task's stop texts.

        Requests of one setting are generated in batches.
        """
        pairs = [
            (self.tok_encode(context), self._settings(settings))
            for context, settings in (request.args for request in requests)
        ]
        self.shortened += sum(len(ids) > self._max_prompt(settings) for ids, settings in pairs)
        return self._answer("answers", requests, pairs, lambda each: (repr(each[1]), -len(each[0])), self._generate)

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

    def _max_prompt(self, settings: dict[str, Any]) -> int:
        return int(self.max_length - settings["max_gen_toks"])

    def _generate(self, requests: list[tuple[list[int], dict[str, Any]]]) -> list[str]:
        """All `requests` have the same settings."""
        settings = requests[0][1]
        prompts = [ids[-self._max_prompt(settings) :] or [self.prefix_token_id] for ids, _ in requests]
        stop_ids = (
            self._template.stop_ids if self._template and self._is_chat else list(self.trained.tokenizer.stop_ids)
        )
        return generate_until_stop(self.trained, prompts, settings, stop_ids, self._check_stop)

    # --- batches
    # ------------------------------------------------------------------------------------------------------------------------------------

    def _answer(
        self,
        unit: str,
        requests: list[Instance],
        inputs: list,
        key: Callable[[Any], tuple[str, int]],
        compute: Callable[[list], list],
    ) -> list:
        """Return the answers that `compute` gives for batches of `inputs`, whose order is that of `key`: (what a batch
        shares, minus the length).
        """
        if self.answers.is_complete:
            return [self.answers.next_answer(request) for request in requests]
        answers: dict[int, Any] = {}
        self.is_computing = True
        self.progress.begin(unit, len(inputs))
        for start in range(0, len(inputs), self.rows * BATCHES_PER_PART):
            part = range(start, min(start + self.rows * BATCHES_PER_PART, len(inputs)))
            keys = {i: key(inputs[i]) for i in part}
            order = sorted(part, key=keys.__getitem__)
            while order:
                self._check_stop()
                batch = [i for i in order[: self.rows] if keys[i][0] == keys[order[0]][0]]
                order = order[len(batch) :]
                answers |= zip(batch, compute([inputs[i] for i in batch]), strict=True)
                for i in batch:
                    self.answers.add(requests[i], answers[i])
                self.progress.advance(len(answers))
        self.is_computing = False
        return [answers[i] for i in range(len(inputs))]

    def _check_stop(self) -> None:
        if self.progress.should_stop():
            raise StopRequested
