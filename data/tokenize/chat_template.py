"""Encodes conversations with a Jinja chat template: token ids, and which of them the assistant wrote.

The template may produce control tokens; the texts of messages may not. To distinguish the two in the rendered text,
control tokens inside texts are masked with a private character before rendering, and unmasked before that text is
encoded as plain text.

templates/segment_plan.py finds the assistant's text in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from common.errors import UserError
from data.errors import BadRowError
from data.schemas.messages import check_chat, drop_empty_system
from data.tokenize.block import LossSpan
from data.tokenize.pieces import FlatEncoder, gather
from data.tokenize.templates.jinja_sandbox import BEGIN, END, appears_in, mask_control_tokens, unmask_control_tokens
from data.tokenize.templates.renderer import ConversationRenderer, KnownTemplate, Rendering, is_shipped, open_template
from data.tokenize.templates.segment_plan import (
    MARKS_HINT,
    Render,
    SegmentPlans,
    TemplateSegment,
    TurnMarks,
    any_of,
    assistant_turns,
    expected_renderings,
)
from data.tokenize.templates.training_version import (
    TurnEnd,
    apply_edits,
    close_turns,
    find_turn_end,
    leading_token,
    possible_end_tokens,
    training_version,
)
from data.tokenize.tokenizer import Tokenizer

CHATML = Path(__file__).with_name("chatml.jinja")
MAX_TEMPLATE_CHARACTERS = 1 << 18  # the longest in public use has 20,000
MAX_EXPECTED_TURNS = 16  # of a conversation whose renderings are requested together
EncodedChat = tuple[np.ndarray, list[LossSpan]]  # (ids: int32, spans of tokens with loss)


class ChatTemplate:
    """Chat template of a tokenizer.

    Messages are those of data.schemas.messages: checked, with roles and fields as in OpenAI's API.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._where = f"{tokenizer.folder}/chat_template.jinja"
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template",
                self._where,
                f"add one, e.g. a copy of data/tokenize/{CHATML.name}",
            )
        self.tokenizer = tokenizer
        stock = _default_template(tokenizer.chat_template, self._where)
        if len(stock) > MAX_TEMPLATE_CHARACTERS:
            message = f"the chat template has {len(stock):,} characters, allowed are {MAX_TEMPLATE_CHARACTERS:,}"
            raise UserError(message, self._where, f"replace it, e.g. by a copy of data/tokenize/{CHATML.name}")
        self.training_version = training_version(stock)
        self._source = apply_edits(stock, self.training_version) if self.training_version else stock
        self._identifiers = set(re.findall(r"\w+", re.sub(r"{#.*?(#}|\Z)", "", self._source, flags=re.DOTALL)))
        self._turns = TurnMarks(self._source, tokenizer.control_ids, tokenizer.named_tokens["eos_token"], self._where)
        self._control, self._special = (
            any_of(_maskable(tokenizer.control_ids)),
            any_of(_maskable(tokenizer.special_tokens)),
        )
        # by the id of the messages
        self._ahead: dict[int, tuple[list[dict], tuple[ConversationRenderer, list[dict]]]] = {}
        self._is_shipped, self._plans_of = is_shipped(self._source), dict[str, SegmentPlans]()  # by loss_on
        self._end_tokens = possible_end_tokens(tokenizer.control_ids)
        try:
            is_known = self.training_version is not None
            self._stock_template, self._template = open_template(stock, is_known), open_template(self._source, is_known)
        except TemplateError as error:
            raise UserError(
                f"the chat template does not compile: {error}", self._where, "correct the template of the tokenizer"
            ) from error

    def names(self, field: str) -> bool:
        """Return whether the template mentions a field of messages; one that it does not mention has no effect."""
        return field in self._identifiers

    def segments(
        self, messages: list[dict], tools: list[dict] | None, where: str, loss_on: str = "assistant"
    ) -> list[TemplateSegment]:
        """Return the segments of a conversation, rendered by the template.

        loss_on: assistant, last_assistant (its last turn only), or all. A turn of weight 0 never has loss and never
        counts as the last; another weight is that of its tokens in the loss. A turn includes its end token, but not the
        white space behind it. Raises BadRowError if the template rejects the conversation, drops a part of it, or does
        not show which text is the assistant's. A conversation without assistant has no loss; the caller decides what to
        do with it.
        """
        if not tools and (plans := self._plans(loss_on)) and (segments := plans.segments(messages)):
            return segments
        return self._render_segments(messages, tools, where, loss_on)

    def _plans(self, loss_on: str) -> SegmentPlans | None:
        """Return the segments of conversations by shape; None if the contents may decide how the template renders."""
        if not self._is_shipped:
            return None
        if loss_on not in self._plans_of:
            self._plans_of[loss_on] = SegmentPlans(
                self.tokenizer.control_ids, lambda messages: self._render_segments(messages, None, "messages", loss_on)
            )
        return self._plans_of[loss_on]

    def _render_segments(
        self, messages: list[dict], tools: list[dict] | None, where: str, loss_on: str
    ) -> list[TemplateSegment]:
        """Render a conversation and split it into segments, see `segments`."""
        turns = assistant_turns(messages)
        _check_weights(messages, loss_on, where)
        render, masked = self._renderer(messages, tools, where, turns=self._marked_turns(messages, loss_on))
        whole = render(len(messages))
        self._check_contents(whole, masked, where)
        unweighted = [turn for turn in turns if messages[turn].get("weight") == 0]
        weighted = [turn for turn in turns if turn not in unweighted]
        if loss_on == "all":
            self._check_reasoning(whole, masked, weighted, where)
            marked = [turn for turn in turns if messages[turn].get("weight", 1) != 1]
            return self._split_turns(whole, messages, tools, marked, render, where, others=1)
        if unweighted and not weighted:
            raise BadRowError(
                "no turn with a weight", "every assistant turn has weight 0: no token has loss", where, "delete the row"
            )
        weighted = weighted[-1:] if loss_on == "last_assistant" else weighted
        segments = self._split_turns(whole, messages, tools, weighted, render, where)
        self._check_reasoning(whole, masked, weighted, where)
        if turns and not any(segment.loss_weight for segment in segments):
            message = "the chat template marks no text of this conversation as the assistant's"
            raise BadRowError("no text marked by the template", message, where, f"{self._where}: put {MARKS_HINT}")
        return segments

    def render_ahead(self, chats: list[tuple[list[dict], list[dict] | None, str]], loss_on: str) -> None:
        """Render conversations (messages, tools, where) for the calls of `segments` that follow: faster together if the
        template is not known.
        """
        self._ahead.clear()
        if isinstance(self._template, KnownTemplate):
            return
        for messages, tools, where in chats:
            with suppress(BadRowError):  # raised again by `segments`
                self._ahead[id(messages)] = (
                    messages,
                    self._conversation(messages, tools, where, turns=self._marked_turns(messages, loss_on)),
                )
        ConversationRenderer.render_together([conversation for _, (conversation, _) in self._ahead.values()])

    def encode_segments(
        self, chats: list[list[TemplateSegment]], encode_flat: FlatEncoder | None = None
    ) -> list[EncodedChat]:
        """Return (ids, spans with loss) of each conversation, with one call of the tokenizer.

        Token 0 is in no span: nothing predicts it.
        """
        # "user\n" occurs often
        texts = list(
            dict.fromkeys(segment.text for segments in chats for segment in segments if not segment.is_control)
        )
        numbers = {(text, False): number for number, text in enumerate(texts)}
        for token in self.tokenizer.control_ids:
            numbers[token, True] = len(numbers)
        text_ids, text_lengths = (encode_flat or self.tokenizer.encode_flat)(texts)
        control_ids = np.array(list(self.tokenizer.control_ids.values()), np.int32)
        lengths = np.concatenate([text_lengths, np.ones(len(control_ids), np.int64)])
        used = np.array([numbers[segment[:2]] for segments in chats for segment in segments], np.int64)
        ids = gather(np.concatenate([text_ids, control_ids]), np.cumsum(lengths) - lengths, lengths, used)
        weights = np.repeat(
            np.array([segment.loss_weight for segments in chats for segment in segments], np.float32), lengths[used]
        )
        ends = np.concatenate([[0], np.cumsum(lengths[used])])[np.cumsum([0, *map(len, chats)])]
        weights[ends[:-1][np.diff(ends) > 0]] = 0  # a span ends before the first token of the next conversation
        edges = np.flatnonzero(np.diff(weights, prepend=0, append=0))
        # adjacent turns may have different weights
        edges = np.stack([edges[:-1], edges[1:]], axis=1)[weights[edges[:-1]] > 0]
        first_spans, span_weights = np.searchsorted(edges[:, 0], ends).tolist(), weights[edges[:, 0]].tolist()
        edges -= np.repeat(ends[:-1], np.diff(first_spans))[:, None]
        spans = list(zip(edges[:, 0].tolist(), edges[:, 1].tolist(), span_weights, strict=True))
        bounds = ends.tolist()
        return [(ids[bounds[i] : bounds[i + 1]], spans[first_spans[i] : first_spans[i + 1]]) for i in range(len(chats))]

    def encode(
        self, messages: Any, tools: Any = None, where: str = "messages", loss_on: str = "assistant"
    ) -> tuple[list[int], list[bool]]:
        """Check and encode one conversation: (ids, loss_mask)."""
        messages, tools = check_chat(messages, tools, where)
        [(ids, spans)] = self.encode_segments([self.segments(drop_empty_system(messages), tools, where, loss_on)])
        loss_mask = np.zeros(len(ids), bool)
        for start, stop, _ in spans:
            loss_mask[start:stop] = True
        return ids.tolist(), loss_mask.tolist()

    def encode_prompt(self, messages: Any, tools: Any = None, where: str = "messages") -> list[int]:
        """Check a conversation and encode it with the generation prompt: the ids after which the assistant's next
        answer begins.
        """
        return self.encode_segments([self._turns.split(self._prompt(messages, tools, where))])[0][0].tolist()

    def render_prompt(self, messages: Any, where: str = "messages", continues_answer: bool = False) -> str:
        """Return the text that `encode_prompt` encodes; `continues_answer`: up to the end of the last message, which
        the assistant continues.
        """
        segments = self._turns.split(self._prompt(messages, None, where, not continues_answer))
        text = unmask_control_tokens("".join(segment.text for segment in segments))
        if not continues_answer:
            return text
        content = str(messages[-1]["content"])
        content = content if content in text else content.strip()
        return text[: text.rindex(content) + len(content)]

    def _prompt(self, messages: Any, tools: Any, where: str, has_generation_prompt: bool = True) -> str:
        messages, tools = check_chat(messages, tools, where, allows_empty_answers=True)
        messages = drop_empty_system(messages)
        render, masked = self._renderer(messages, tools, where, stock=True)
        whole = render(len(messages), prompt=has_generation_prompt)
        self._check_contents(whole, masked, where)
        if not self.turn_end.is_trained and not self._turns.has_marks and messages[-1]["role"] != "assistant":
            with suppress(BadRowError):  # earlier answers end as they do in training
                whole = self._close_turns(
                    self._turns.insert(whole, messages, assistant_turns(messages), render, where), messages, tools
                )
        return whole

    @cached_property
    def turn_end(self) -> TurnEnd:
        return find_turn_end(
            self._answer_and_rest, self._end_tokens, self.tokenizer.named_tokens["eos_token"], self._where
        )

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end an answer."""
        return sorted(
            {*self.tokenizer.stop_ids, self.tokenizer.control_ids.get(self.turn_end.token, self.tokenizer.eos_id)}
        )

    @property
    def version_note(self) -> str | None:
        """What rows have otherwise than the template of the tokenizer."""
        version = self.training_version
        return (
            f"the chat template is that of {version.name}, which rewrites earlier answers: rows keep them as they were generated"
            if version
            else None
        )

    def _answer_and_rest(self, messages: list[dict]) -> tuple[str, str]:
        """Return the text of the only answer of a conversation, and the text after it."""
        render, _ = self._renderer(messages, None, "messages")
        marked, _ = self._turns.mark(render(len(messages)), messages, [1], render, "messages")
        start, end = marked.rfind(BEGIN), marked.rfind(END)
        return marked[start + 1 : end], marked[end + 1 :]

    def _close_turns(self, marked: str, messages: list[dict], tools: list[dict] | None) -> str:
        """Return marked text with an end token in every turn, for a template that leaves it out."""
        last, eos_token = self.turn_end.token, self.tokenizer.named_tokens["eos_token"]
        if messages[-1].get("tool_calls"):  # another token may end a turn with calls
            render, _ = self._renderer([*messages, {"role": "tool", "content": "result"}], tools, "messages")
            text = marked.replace(BEGIN, "").replace(END, "")
            with suppress(BadRowError):
                followed = render(len(messages) + 1)
                if followed.startswith(text) and (token := leading_token(followed[len(text) :], self._end_tokens)):
                    last = token
        return close_turns(marked, self._end_tokens, last, None if self._turns.has_marks else eos_token)

    def turn_ends(self, messages: list[dict], tools: list[dict] | None, where: str) -> list[tuple[int, str]]:
        """Return (number of characters, role): where each message ends in the rendered conversation, for display.

        Messages whose texts cannot be separated are one entry with an empty role.
        """
        render, _ = self._renderer(messages, tools, where)
        whole, ends, is_merged, added = render(len(messages)), [], False, 0
        for count, message in enumerate(messages, 1):
            if message["role"] == "assistant" and (
                self.turn_end.added_after == "every" or (self.turn_end.added_after == "last" and count == len(messages))
            ):
                added += len(self.turn_end.token)
            try:
                end = self._turns.prefix_length(whole, render(count))
            except BadRowError:  # the template rejects a conversation that ends here
                end = None
            if end is not None:
                ends.append((len(unmask_control_tokens(whole[:end])) + added, "" if is_merged else message["role"]))
            is_merged = end is None
        return ends

    def _renderer(
        self, messages: list[dict], tools: list[dict] | None, where: str, stock: bool = False, turns: Sequence[int] = ()
    ) -> tuple[Render, list[dict]]:
        """Return a function that renders prefixes of the conversation, and the masked messages that the template gets.

        `stock`: with the template of the tokenizer, also where rows are encoded with a training version of it. `turns`:
        those to be marked.
        """
        known, prepared = self._ahead.pop(id(messages), (None, None))
        if prepared is None or known is not messages or stock:
            prepared = self._conversation(messages, tools, where, stock, turns)
        conversation, masked = prepared

        def render(count: int, prompt: bool = False, **options: bool) -> str:
            try:
                return conversation.render(count, add_generation_prompt=prompt, **options)
            except TemplateError as error:
                part = "" if count == len(messages) else f" when it gets the first {count} of {len(messages)} messages"
                message = f"the chat template rejects the conversation{part}: {error}"
                raise BadRowError(
                    "rejected by the chat template", message, where, f"change the conversation, or {self._where}"
                ) from error

        return render, masked

    def _conversation(
        self, messages: list[dict], tools: list[dict] | None, where: str, stock: bool = False, turns: Sequence[int] = ()
    ) -> tuple[ConversationRenderer, list[dict]]:
        for field in ("tools", "tool_calls"):
            if field not in self._source and (
                tools if field == "tools" else any(message.get(field) for message in messages)
            ):
                raise self._dropped_error(field, where)
        # Many templates treat an empty field as a field that is set.
        present = [
            {key: value for key, value in message.items() if key != "weight" and (value or key == "content")}
            for message in messages
        ]
        # The assistant may write its own tags (<think>), but no message may open or end a turn.
        masked = [
            mask_control_tokens(message, self._special if message["role"] == "assistant" else self._control, where)
            for message in present
        ]
        variables = {
            "messages": masked,
            "tools": mask_control_tokens(tools, self._control, where),
            "documents": None,
            **self.tokenizer.named_tokens,
        }
        expected: list[Rendering] = [(len(messages), {"add_generation_prompt": False})]
        if not self._turns.has_marks and len(turns) <= MAX_EXPECTED_TURNS:
            expected += expected_renderings(turns, len(messages))
        return ConversationRenderer(self._stock_template if stock else self._template, variables, expected), masked

    @staticmethod
    def _marked_turns(messages: list[dict], loss_on: str) -> list[int]:
        turns = assistant_turns(messages)
        return turns[-1:] if loss_on == "last_assistant" else turns

    def _check_contents(self, whole: str, messages: list[dict], where: str) -> None:
        """Require that the content of every message is in the rendered text.

        Earlier reasoning may be missing: many templates drop it on purpose.
        """
        for index, message in enumerate(messages):
            content = message["content"]
            if content.strip() not in whole and not appears_in(
                content, whole, with_reasoning=message["role"] != "assistant"
            ):
                raise self._dropped_error(f"the content of {message['role']} messages", f"{where} message {index}")

    def _check_reasoning(self, whole: str, messages: list[dict], turns: list[int], where: str) -> None:
        """Require that the reasoning of `turns`, which have loss, is in the rendered text."""
        for turn in turns:
            reasoning, content = messages[turn].get("reasoning_content"), messages[turn]["content"]
            if (reasoning and not appears_in(reasoning, whole)) or (
                "think>" in content and not appears_in(content, whole)
            ):
                raise self._dropped_error(
                    "reasoning_content", where, "" if turn == turns[-1] else "data.loss_on=last_assistant; or "
                )

    def _dropped_error(self, part: str, where: str, alternative: str = "") -> BadRowError:
        fix = (
            f"{alternative}use a tokenizer whose template reads {part} (data/tokenize/{CHATML.name} does), or remove it"
        )
        return BadRowError(f"{part} dropped by the chat template", f"the chat template drops {part}", where, fix)

    def _split_turns(
        self,
        whole: str,
        messages: list[dict],
        tools: list[dict] | None,
        turns: list[int],
        render: Render,
        where: str,
        others: float = 0,
    ) -> list[TemplateSegment]:
        """Split `whole` into segments; those of `turns` have the weight of their message, the others `others`."""
        marked, marks = self._turns.mark(whole, messages, turns, render, where)
        if self.turn_end.is_trained:
            return self._turns.split(marked, marks, others)
        all_turns = assistant_turns(messages)
        # end tokens are added to other turns, too: the choice of turns changes no token
        if not self._turns.has_marks and turns != all_turns:
            with suppress(BadRowError):
                marked, marks = (
                    self._turns.insert(whole, messages, all_turns, render, where),
                    {all_turns.index(turn): marks[number] for number, turn in enumerate(turns)},
                )
        return self._turns.split(self._close_turns(marked, messages, tools), marks, others)


def _check_weights(messages: list[dict], loss_on: str, where: str) -> None:
    """Require that no message of another role than the assistant's says otherwise than data.loss_on whether it has
    loss.
    """
    expected = int(loss_on == "all")
    for message in messages:
        if message["role"] != "assistant" and (weight := message.get("weight", expected)) != expected:
            problem = f"a {message['role']} message has weight {weight}, and data.loss_on={loss_on} {'trains on every message' if expected else 'trains on answers only'}"
            setting = f"data.loss_on={'assistant' if expected else 'all'}, or " if weight in (0, 1) else ""
            fix = f"{setting}remove the field of this message"
            raise BadRowError("weight that differs from data.loss_on", problem, where, fix)


def _default_template(template: Any, where: str) -> str:
    """Return the template; of a list of named templates, the one named default, else the first."""
    entries = template if isinstance(template, list) else [{"name": "default", "template": template}]
    named = {each.get("name"): each.get("template") for each in entries if isinstance(each, dict)}
    chosen = named.get("default", next(iter(named.values()), None))
    if not isinstance(chosen, str):
        raise UserError(
            "the chat template is neither a text nor a list of named texts",
            where,
            f"replace it, e.g. by a copy of data/tokenize/{CHATML.name}",
        )
    return chosen


def _maskable(tokens: Iterable[str]) -> list[str]:
    """Return the tokens of two characters or more: a single character (the line break of Gemma) means the same as text
    and as a token.
    """
    return [token for token in tokens if len(token) > 1]
