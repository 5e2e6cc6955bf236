"""Encodes conversations with a Jinja chat template: token ids, and which of them the assistant wrote.

The template may produce control tokens; the texts of messages may not. To distinguish the two in the rendered text,
control tokens inside texts are masked with a private character before rendering, and unmasked before that text is
encoded as plain text.

segment_plan.py finds the assistant's text in it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from common.errors import UserError
from data.schemas.messages import check_chat, drop_empty_system
from data.tokenize.block import LabelledIds, LossSpan
from data.tokenize.jinja_sandbox import BEGIN, END, appears_in, mask_control_tokens, unmask_control_tokens
from data.tokenize.pieces import ID_BYTES, BytesEncoder, bytes_of_ids
from data.tokenize.renderer import Conversation, Rendering, Template, is_shipped
from data.tokenize.segment_plan import (
    MARKS_HINT,
    SegmentPlans,
    TemplateSegment,
    TurnMarks,
    any_of,
    assistant_turns,
)
from data.tokenize.tokenizer import Tokenizer
from data.tokenize.training_version import (
    TurnEnd,
    apply_edits,
    close_turns,
    find_turn_end,
    leading_token,
    possible_end_tokens,
    training_version,
)
from data.types import BadRowError

CHATML = Path(__file__).with_name("chatml.jinja")
MAX_TEMPLATE_CHARACTERS = 1 << 18  # the longest in public use has 20,000
MAX_EXPECTED_TURNS = 16  # of a conversation whose renderings are requested together


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
        stock = default_template(tokenizer.chat_template, self._where)
        if len(stock) > MAX_TEMPLATE_CHARACTERS:
            message = f"the chat template has {len(stock):,} characters, allowed are {MAX_TEMPLATE_CHARACTERS:,}"
            raise UserError(message, self._where, f"replace it, e.g. by a copy of data/tokenize/{CHATML.name}")
        self.training_version = training_version(stock)
        source = apply_edits(stock, self.training_version) if self.training_version else stock
        is_known = self.training_version is not None or is_shipped(stock)
        self._stock_template, self._template = (Template(each, self._where, is_known) for each in (stock, source))
        self._identifiers = set(re.findall(r"\w+", re.sub(r"{#.*?(#}|\Z)", "", source, flags=re.DOTALL)))
        self._turns = TurnMarks(self._template, tokenizer.control_ids, tokenizer.named_tokens["eos_token"])
        # A single character (the line break of Gemma) means the same as text and as a token.
        self._control, self._special = (
            any_of(token for token in tokens if len(token) > 1)
            for tokens in (tokenizer.control_ids, tokenizer.special_tokens)
        )
        self._rendered_ahead: dict[int, Conversation] = {}  # by the id of the messages
        # None: the contents may decide how the template renders
        self._plans = SegmentPlans(tokenizer.control_ids, self._render_segments) if is_shipped(source) else None
        self._end_tokens = possible_end_tokens(tokenizer.control_ids)
        try:
            self._stock_template.check()
            self._template.check()
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
        if self._plans and not tools and (segments := self._plans.segments(messages, loss_on)):
            return segments
        return self._render_segments(messages, tools, where, loss_on)

    def _render_segments(
        self, messages: list[dict], tools: list[dict] | None, where: str, loss_on: str
    ) -> list[TemplateSegment]:
        """Render a conversation and split it into segments, see `segments`: what becomes the loss mask of a row is decided
        here, from data.loss_on and the weights of its messages.
        """
        _check_weights(messages, loss_on, where)
        conversation = self._rendered_ahead.pop(id(messages), None)
        conversation = conversation or self._conversation(messages, tools, where)
        self._check_contents(conversation.text, conversation)
        turns = assistant_turns(messages)
        weighted = [turn for turn in turns if messages[turn].get("weight") != 0]
        if loss_on == "all":
            self._check_reasoning(conversation, weighted)
            marked = [turn for turn in turns if messages[turn].get("weight", 1) != 1]
            return self._split_turns(conversation, marked, others=1)
        if turns and not weighted:
            raise BadRowError(
                "no turn with a weight", "every assistant turn has weight 0: no token has loss", where, "delete the row"
            )
        weighted = weighted[-1:] if loss_on == "last_assistant" else weighted
        segments = self._split_turns(conversation, weighted)
        self._check_reasoning(conversation, weighted)
        if turns and not any(segment.loss_weight for segment in segments):
            message = "the chat template marks no text of this conversation as the assistant's"
            raise BadRowError("no text marked by the template", message, where, f"{self._where}: put {MARKS_HINT}")
        return segments

    def render_ahead(self, chats: list[tuple[list[dict], list[dict] | None, str]], loss_on: str) -> None:
        """Render conversations (messages, tools, where) for the calls of `segments` that follow: faster together if the
        template is not known.
        """
        self._rendered_ahead.clear()
        if self._template.is_known:
            return
        for messages, tools, where in chats:
            with suppress(BadRowError):  # raised again by `segments`
                self._rendered_ahead[id(messages)] = self._conversation(messages, tools, where)
        conversations = list(self._rendered_ahead.values())
        Conversation.render_together(
            conversations, [self._expected_renderings(each.messages, loss_on) for each in conversations]
        )

    def _expected_renderings(self, messages: list[dict], loss_on: str) -> list[Rendering]:
        """Return the renderings that mark the assistant's turns: the whole, and the prefixes that are compared with it."""
        expected: list[Rendering] = [(len(messages), False)]
        turns = assistant_turns(messages)[-1 if loss_on == "last_assistant" else 0 :]
        if not self._turns.has_marks and len(turns) <= MAX_EXPECTED_TURNS:
            expected += [(turn, True) for turn in turns]
            expected += [(turn + 1, False) for turn in turns if turn + 1 < len(messages)]
        return expected

    def encode_segments(
        self, chats: list[list[TemplateSegment]], encode_texts: BytesEncoder | None = None
    ) -> list[LabelledIds]:
        """Return (ids, spans with loss) of each conversation, with one call of the tokenizer.

        Token 0 is in no span: nothing predicts it.
        """
        tokenizer = self.tokenizer
        if tokenizer.inner or tokenizer.stripping:
            chats = [self._in_context(segments) for segments in chats]
        keys = [(2 * each.is_control + each.is_inner, each.text) for segments in chats for each in segments]
        distinct = dict.fromkeys(keys)  # "user\n" occurs often
        encoders = (
            encode_texts or tokenizer.encode_to_bytes,
            (tokenizer.inner or tokenizer).encode_to_bytes,
            lambda tokens: bytes_of_ids([tokenizer.control_ids[token]] for token in tokens),
        )
        ids_of: dict[tuple[int, str], bytes] = {}
        for kind, encode in enumerate(encoders):
            of_kind = [key for key in distinct if key[0] == kind]
            ids_of |= zip(of_kind, encode([text for _, text in of_kind]), strict=True)
        result: list[LabelledIds] = []
        encoded = map(ids_of.__getitem__, keys)
        for segments in chats:
            ids, spans, length = [], list[LossSpan](), 0
            for segment, part in zip(segments, encoded, strict=False):
                ids.append(part)
                start, length = max(length, 1), length + len(part) // ID_BYTES
                weight = float(np.float32(segment.loss_weight))  # as stored: 1.0000000001 is 1
                if weight and start < length:
                    if spans and spans[-1][1:] == (start, weight):
                        start, _, _ = spans.pop()
                    spans.append((start, length, weight))
            result.append((np.frombuffer(b"".join(ids), np.int32), spans))
        return result

    def _in_context(self, segments: list[TemplateSegment]) -> list[TemplateSegment]:
        """Return the segments as transformers encodes them, which are parts of one text there: without the white space
        that a control token takes, and without a space before each.
        """
        result: list[TemplateSegment] = []
        for segment in segments:
            if result and not segment.is_control:
                before, text = result[-1], segment.text
                text = text.lstrip() if before.text in self.tokenizer.stripping and before.is_control else text
                is_inner = not (before.is_control and self.tokenizer.adds_space_after_control)
                segment = segment._replace(text=text, is_inner=is_inner)
            if segment.text:
                result.append(segment)
        return result

    def encode_prompt(self, messages: Any, tools: Any = None) -> list[int]:
        """Check a conversation and encode it with the generation prompt: the ids after which the assistant's next
        answer begins.
        """
        return self.encode_segments([self._turns.split(self._prompt(messages, tools, "messages"))])[0][0].tolist()

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
        # with the template of the tokenizer, also where rows are encoded with a training version of it
        conversation = self._conversation(drop_empty_system(messages), tools, where, template=self._stock_template)
        messages = conversation.messages
        whole = conversation.render(len(messages), prompt=has_generation_prompt)
        self._check_contents(whole, conversation)
        if not self._turns.has_marks and messages[-1]["role"] != "assistant":
            with suppress(BadRowError):  # earlier answers are split, and end, as they do in training
                marked = self._turns.insert(whole, conversation, assistant_turns(messages))
                whole = marked if self.turn_end.is_trained else self._close_turns(marked, conversation)
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
        marked, _ = self._turns.mark(self._conversation(messages, None, "messages"), [1])
        start, end = marked.rfind(BEGIN), marked.rfind(END)
        return marked[start + 1 : end], marked[end + 1 :]

    def _close_turns(self, marked: str, conversation: Conversation) -> str:
        """Return marked text with an end token in every turn, for a template that leaves it out."""
        last, eos_token = self.turn_end.token, self.tokenizer.named_tokens["eos_token"]
        if conversation.messages[-1].get("tool_calls"):  # another token may end a turn with calls
            text = marked.replace(BEGIN, "").replace(END, "")
            messages = [*conversation.messages, {"role": "tool", "content": "result"}]
            with suppress(BadRowError):
                followed = self._conversation(messages, conversation.tools, "messages").text
                if followed.startswith(text) and (token := leading_token(followed[len(text) :], self._end_tokens)):
                    last = token
        return close_turns(marked, self._end_tokens, last, None if self._turns.has_marks else eos_token)

    def turn_ends(self, messages: list[dict], tools: list[dict] | None, where: str) -> list[tuple[int, str]]:
        """Return (number of characters, role): where each message ends in the rendered conversation, for display.

        Messages whose texts cannot be separated are one entry with an empty role.
        """
        conversation = self._conversation(messages, tools, where)
        whole, ends, is_merged, added = conversation.text, [], False, 0
        for count, message in enumerate(messages, 1):
            if message["role"] == "assistant" and (
                self.turn_end.added_after == "every" or (self.turn_end.added_after == "last" and count == len(messages))
            ):
                added += len(self.turn_end.token)
            try:
                end = self._turns.prefix_length(whole, conversation.render(count))
            except BadRowError:  # the template rejects a conversation that ends here
                end = None
            if end is not None:
                ends.append((len(unmask_control_tokens(whole[:end])) + added, "" if is_merged else message["role"]))
            is_merged = end is None
        return ends

    def _conversation(
        self, messages: list[dict], tools: list[dict] | None, where: str, template: Template | None = None
    ) -> Conversation:
        """Return the conversation as the template gets it."""
        for field, values in {
            "tools": [tools],
            "tool_calls": [message.get("tool_calls") for message in messages],
        }.items():
            if field not in self._template.source and any(values):
                raise self._dropped_error(field, where)
        masked = []
        for message in messages:
            # Many templates treat an empty field as a field that is set.
            present = {key: value for key, value in message.items() if key != "weight" and (value or key == "content")}
            # The assistant may write its own tags (<think>), but no message may open or end a turn.
            control = self._special if message["role"] == "assistant" else self._control
            masked.append(mask_control_tokens(present, control, where))
        variables = {
            "messages": masked,
            "tools": mask_control_tokens(tools, self._control, where),
            "documents": None,
            **self.tokenizer.named_tokens,
        }
        return Conversation(template or self._template, messages, tools, variables, where)

    def _check_contents(self, text: str, conversation: Conversation) -> None:
        """Require that the content of every message is in the rendered text.

        Earlier reasoning may be missing: many templates drop it on purpose.
        """
        for index, message in enumerate(conversation.variables["messages"]):
            content, role = message["content"], message["role"]
            if content.strip() not in text and not appears_in(content, text, with_reasoning=role != "assistant"):
                raise self._dropped_error(f"the content of {role} messages", f"{conversation.where} message {index}")

    def _check_reasoning(self, conversation: Conversation, turns: list[int]) -> None:
        """Require that the reasoning of `turns`, which have loss, is in the rendered text."""
        for turn in turns:
            message = conversation.variables["messages"][turn]
            parts = [message.get("reasoning_content"), "think>" in message["content"] and message["content"]]
            if any(part and not appears_in(part, conversation.text) for part in parts):
                alternative = "" if turn == turns[-1] else "data.loss_on=last_assistant; or "
                raise self._dropped_error("reasoning_content", conversation.where, alternative)

    def _dropped_error(self, part: str, where: str, alternative: str = "") -> BadRowError:
        fix = (
            f"{alternative}use a tokenizer whose template reads {part} (data/tokenize/{CHATML.name} does), or remove it"
        )
        return BadRowError(f"{part} dropped by the chat template", f"the chat template drops {part}", where, fix)

    def _split_turns(self, conversation: Conversation, turns: list[int], others: float = 0) -> list[TemplateSegment]:
        """Split a conversation into segments; those of `turns` have the weight of their message, the others `others`."""
        marked, marks = self._turns.mark(conversation, turns)
        if self.turn_end.is_trained:
            return self._turns.split(marked, marks, others)
        all_turns = assistant_turns(conversation.messages)
        # end tokens are added to other turns, too: the choice of turns changes no token
        if not self._turns.has_marks and turns != all_turns:
            with suppress(BadRowError):
                marked = self._turns.insert(conversation.text, conversation, all_turns)
                marks = {all_turns.index(turn): marks[number] for number, turn in enumerate(turns)}
        return self._turns.split(self._close_turns(marked, conversation), marks, others)


def template_messages(tokenizer: Tokenizer, data_format: str) -> dict[str, list[str]]:
    """Return the notes and the warnings of what rows have otherwise than the chat template says; none for texts."""
    template = None if data_format == "text" else ChatTemplate(tokenizer)
    note, warning = (template.version_note, template.turn_end.note) if template else (None, None)
    return {"notes": [note] if note else [], "warnings": [warning] if warning else []}


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


def default_template(template: Any, where: str) -> str:
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
