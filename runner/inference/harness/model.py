"""A model of this program as lm-evaluation-harness calls it. Shapes: B rows, T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import make_disjoint_window
from torch import Tensor

from data.tokenize.chat_template import ChatTemplate
from models.generate import generate
from runner.inference.load import LoadedModel

MAX_LOGITS = 1 << 28  # of a batch: fewer rows than batch_size where the vocabulary is large
DEFAULT_NEW_TOKENS = 256  # of an answer whose task gives no limit

Scored = tuple[Any, list[int], list[int]]  # (key of the request, tokens of the context, tokens of the continuation)


class HarnessModel(TemplateLM):
    """`progress(done, total)` is called after each batch of requests."""

    def __init__(self, trained: LoadedModel, batch_size: int, progress: Callable[[int, int], None]) -> None:
        super().__init__()
        self.trained, self.rows, self.progress = trained, batch_size, progress
        self.max_length = trained.model.cfg.max_position_embeddings
        self._template = ChatTemplate(trained.tokenizer) if trained.tokenizer.chat_template is not None else None

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
        return self.trained.tokenizer.decode(self._template.encode_prompt(chat_history), skip_special=False)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a context, in which a rendered chat template may have control tokens."""
        return self.trained.tokenizer.encode_rendered(string)

    def _loglikelihood_tokens(self, requests: list[Scored], **_: Any) -> list[tuple[float, bool]]:
        """Return of each continuation its log-probability, and whether greedy decoding gives it. Long contexts lose their beginning."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        results: dict[int, tuple[float, bool]] = {}
        for chunk in self._batches([requests[i] for i in order]):
            for scored in self._score(chunk):
                results[order[len(results)]] = scored
            self.progress(len(results), len(requests))
        return [results[i] for i in range(len(requests))]

    def _batches(self, requests: list[Scored]) -> Iterator[list[Scored]]:
        """Yield parts of `requests`, whose first is the longest."""
        start = 0
        while start < len(requests):
            length = min(self.max_length, len(requests[start][1]) + len(requests[start][2]))
            rows = max(1, min(self.rows, MAX_LOGITS // (length * self.trained.model.cfg.vocab_size)))
            yield requests[start : start + rows]
            start += rows

    @torch.inference_mode()
    def _score(self, requests: list[Scored]) -> list[tuple[float, bool]]:
        whole = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        rows = [torch.tensor(ids[:-1]) for ids in whole]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.trained.device)
        logits = self.trained.model(ids).logits  # (B, T, V)
        assert isinstance(logits, Tensor)
        results = []
        for row, tokens, (_, _, continuation) in zip(logits, whole, requests, strict=True):
            count = min(len(continuation), len(tokens) - 1)
            log_probs = row[len(tokens) - 1 - count : len(tokens) - 1].float().log_softmax(-1)  # (count, V)
            targets = torch.tensor(tokens[-count:], device=row.device)
            results.append((float(log_probs.gather(-1, targets.unsqueeze(-1)).sum()), bool((log_probs.argmax(-1) == targets).all())))
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, each token given as many of those before it as the model takes."""
        from lm_eval.utils import get_rolling_token_windows

        sums = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = map(make_disjoint_window, get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1))
            sums.append(sum(score for score, _ in self._loglikelihood_tokens([(None, list(context), list(tokens)) for context, tokens in windows])))
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context up to one of the task's stop texts. Requests of one setting are generated in batches."""
        order = sorted(range(len(requests)), key=lambda i: (str(requests[i].args[1]), -len(requests[i].args[0])))
        answers: dict[int, str] = {}
        while len(answers) < len(requests):
            rest = order[len(answers) :]
            settings: dict[str, Any] = requests[rest[0]].args[1]
            batch = [i for i in rest[: self.rows] if requests[i].args[1] == settings]
            for i, text in zip(batch, self._continue([requests[i].args[0] for i in batch], settings), strict=True):
                answers[i] = text
            self.progress(len(answers), len(requests))
        return [answers[i] for i in range(len(requests))]

    def _continue(self, contexts: list[str], settings: dict[str, Any]) -> list[str]:
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        limit = int(settings.get("max_gen_toks") or DEFAULT_NEW_TOKENS)
        prompts = [self.tok_encode(context)[-max(1, self.max_length - limit) :] or [self.prefix_token_id] for context in contexts]
        is_sampled = bool(settings.get("do_sample"))
        answers = generate(
            self.trained.model,
            prompts,
            max_new_tokens=min(limit, self.max_length - 1),
            temperature=float(settings.get("temperature") or 0) if is_sampled else 0.0,
            top_k=int(settings.get("top_k") or 0),
            top_p=float(settings.get("top_p") or 1),
            repetition_penalty=1.0,
            stop_ids=self._template.stop_ids if self._template else list(self.trained.tokenizer.stop_ids),
        )
        texts = [self.trained.tokenizer.decode(answer) for answer in answers]
        return [min((text.split(stop)[0] for stop in stops if stop), key=len, default=text) for text in texts]
