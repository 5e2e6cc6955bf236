"""Turns of the assistant in a rendered conversation, and its segments without rendering it.

`TurnMarks` finds the turns and splits the text into control tokens and plain text. The assistant's text is found by the
`{% generation %}` marks of the template. Without marks, a turn is the text between two renderings that are both
prefixes of the whole: all messages before the turn plus the generation prompt, and all messages up to its end.

`SegmentPlans` has one rendering per shape of a conversation (its roles), in which the contents are exchanged. Only for
templates that write each content as it is and test nothing but whether it is empty: those that this program ships
(`shipped_templates`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from data.tokenize.jinja_sandbox import BEGIN, BREAK, END, PRIVATE_USE
from data.tokenize.renderer import MAX_KNOWN_CHARACTERS, Conversation, Template
from data.types import BadRowError

MARKS_HINT = "{% generation %} ... {% endgeneration %} around the assistant's text and its end token"
# Variables with which templates switch thinking (Qwen, DeepSeek, MiniMind); they change the generation prompt.
THINKING_KWARGS: list[dict[str, bool]] = [
    {},
    *(dict.fromkeys(("enable_thinking", "thinking", "open_thinking"), is_on) for is_on in (True, False)),
]


class TemplateSegment(NamedTuple):
    """Part of a rendered conversation: one control token, or plain text."""

    text: str
    is_control: bool
    loss_weight: float  # 0: no loss
    is_inner: bool = False  # the tokenizer puts no space before it (Tokenizer.inner)


class TurnMarks:
    """Marks around the assistant's turns, as one template renders them."""

    def __init__(self, template: Template, control_tokens: Iterable[str], eos_token: str) -> None:
        self._template, self._eos_token = template, eos_token
        self.has_marks = any(re.findall(r"(?s){#.*?#}|({%[-+]?\s*generation\b)", template.source))  # not in comments
        self._control_tokens = set(control_tokens)
        self._boundaries = re.compile(f"({any_of([BEGIN, END, *self._control_tokens]).pattern})")

    def mark(self, conversation: Conversation, turns: list[int]) -> tuple[str, dict[int, float]]:
        """Return the text with marks, and the weight of each of the marked spans that belong to `turns`, by its number."""
        weights = [conversation.messages[turn].get("weight", 1) for turn in turns]
        if not self.has_marks:
            return self.insert(conversation.text, conversation, turns), dict(enumerate(weights))
        all_turns, whole = assistant_turns(conversation.messages), conversation.text
        if turns == all_turns and len(set(weights)) == 1:
            return whole, dict.fromkeys(range(whole.count(BEGIN)), weights[0])
        # The marks of a turn are those between its generation prompt and the generation prompt of the next turn.
        marks: dict[int, float] = {}
        for turn, weight in zip(turns, weights, strict=True):
            following = next((later for later in all_turns if later > turn), None)
            stop = whole if following is None else conversation.render(following, prompt=True)
            start = conversation.render(turn, prompt=True)
            marks |= dict.fromkeys(range(start.count(BEGIN), stop.count(BEGIN)), weight)
        return whole, marks

    def insert(self, whole: str, conversation: Conversation, turns: list[int]) -> str:
        """Return `whole`, which begins with the text of the conversation, with marks around each of `turns`.

        They are found by comparing prefixes.
        """
        text, end = "", 0
        for turn in turns:
            prompts = (
                self.prefix_length(whole, conversation.render(turn, prompt=True, **options))
                for options in THINKING_KWARGS
            )
            start = next((prompt for prompt in prompts if prompt is not None), None)
            is_last = turn + 1 == len(conversation.messages)
            stop = len(whole) if is_last else self.prefix_length(whole, conversation.render(turn + 1))
            if start is None or stop is None or start < end or not (answer := whole[start:stop].rstrip()):
                raise self._rewritten_error(turn, turns, start is None, conversation.where)
            self._check_header(answer, conversation.messages[turn], conversation.where)
            text += whole[end:start] + BEGIN + answer + END
            end = start + len(answer)
        return text + whole[end:]

    def _rewritten_error(self, turn: int, turns: list[int], is_before: bool, where: str) -> BadRowError:
        how = (
            f"with the generation prompt of message {turn}, the text before it differs"
            if is_before
            else f"message {turn} differs when no message follows"
        )
        message = f"the chat template changes earlier text ({how}), so the assistant's text cannot be found"
        alternative = "" if turn == turns[-1] or is_before else "data.loss_on=last_assistant; or "
        fix = f"{alternative}{self._template.path}: put {MARKS_HINT}"
        return BadRowError("turns rewritten by the chat template", message, where, fix)

    def prefix_length(self, whole: str, part: str) -> int | None:
        """Return the length of `part` if `whole` starts with it, else None."""
        if not whole.startswith(part):
            part = part.rstrip().removesuffix(self._eos_token)  # some templates write it once, after the last turn
        return len(part) if whole.startswith(part) else None

    def _check_header(self, answer: str, message: dict, where: str) -> None:
        """Reject templates without add_generation_prompt: they do not show where the header ends and the answer begins."""
        if "add_generation_prompt" in self._template.source or answer.replace(BREAK, "").lstrip().startswith(
            message["content"].strip()
        ):
            return
        problem = "the chat template does not use add_generation_prompt, so the start of an answer cannot be found"
        raise BadRowError("no add_generation_prompt", problem, where, f"{self._template.path}: put {MARKS_HINT}")

    def split(
        self, rendered: str, marks: Mapping[int, float] = MappingProxyType({}), others: float = 0
    ) -> list[TemplateSegment]:
        """Split marked text into segments.

        `marks`: weights of marked spans by their number; `others`: the weight of all other text.

        The text is split at the other marks, too, so that a conversation gives the same tokens whichever of its turns
        have loss.
        """
        segments, weight, count = [], others, 0
        for part in self._boundaries.split(rendered):
            if part in (BEGIN, END):
                weight = marks.get(count, others) if part == BEGIN else others
                count += part == BEGIN
            elif part in self._control_tokens:
                segments.append(TemplateSegment(part, True, weight))
            elif text := part.replace(BREAK, ""):
                segments.append(TemplateSegment(text, False, weight))
        return segments


def assistant_turns(messages: list[dict]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of `tokens`, the longest first; without tokens it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


MAX_SHAPES, MAX_MESSAGES = 256, 32  # shapes that are remembered; messages of a conversation
# private characters: a content that has them is exchanged like any other
PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")
Shape = tuple[str | tuple[str, int | None], ...]  # loss_on, and of each message: (role, weight)
# as it is; or (text before a content, number of its message, text after it, loss_weight)
Part = TemplateSegment | tuple[str, int, str, float]


class SegmentPlans:
    """Segments of conversations by their shape."""

    def __init__(
        self, control_tokens: Iterable[str], render: Callable[[list[dict], None, str, str], list[TemplateSegment]]
    ) -> None:
        """`render(messages, tools, where, loss_on)` renders a conversation and splits it. It may raise BadRowError."""
        self._control_tokens, self._render = list(control_tokens), render
        # what is masked or refused in contents, or splits them
        self._changed = any_of([*PRIVATE_USE, *self._control_tokens])
        self._plans: dict[Shape, list[Part] | None] = {}

    def segments(self, messages: list[dict], loss_on: str) -> list[TemplateSegment] | None:
        """Return what `render` returns for the conversation; None if it has to be rendered."""
        roles: list[tuple[str, int | None]] = []
        size = 0
        for message in messages:
            content, weight = message["content"], message.get("weight")
            if (
                not content
                or message.get("reasoning_content")
                or message.get("tool_calls")
                or weight not in (None, 0, 1)  # one shape per weight would be too many
                or self._changed.search(content)
            ):
                return None
            roles.append((message["role"], weight))
            size += len(content)
        if size > MAX_KNOWN_CHARACTERS or len(roles) > MAX_MESSAGES:
            return None
        shape: Shape = (loss_on, *roles)
        if shape not in self._plans:
            if len(self._plans) == MAX_SHAPES:
                self._plans.clear()
            self._plans[shape] = self._trace(roles, loss_on)
        if (plan := self._plans[shape]) is None:
            return None
        segments = []
        for part in plan:
            if not isinstance(part, TemplateSegment):
                before, number, after, loss_weight = part
                part = TemplateSegment(before + messages[number]["content"] + after, False, loss_weight)
            segments.append(part)
        return segments

    def _trace(self, roles: list[tuple[str, int | None]], loss_on: str) -> list[Part] | None:
        """Render placeholders in place of contents; None if the template refuses the shape, or does not write each of
        them once, in its own segment.
        """
        messages: list[dict] = [
            {"role": role, "content": f"\ue000{number}\ue001"} | ({} if weight is None else {"weight": weight})
            for number, (role, weight) in enumerate(roles)
        ]
        try:
            rendered = self._render(messages, None, "messages", loss_on)
        except BadRowError:  # raised again, with the position of the row, by the rendering of its contents
            return None
        plan: list[Part] = []
        for segment in rendered:
            before, *rest = PLACEHOLDER.split(segment.text)
            plan.append(
                (before, int(rest[0]), rest[1], segment.loss_weight)
                if len(rest) == 2 and not segment.is_control
                else segment
            )
        numbers = [part[1] for part in plan if not isinstance(part, TemplateSegment)]
        return plan if numbers == list(range(len(roles))) and not self._may_join(rendered) else None

    def _may_join(self, rendered: list[TemplateSegment]) -> bool:
        """Return whether a content and the text around it may make a control token together, where the text would then
        be split.
        """
        texts = PLACEHOLDER.split("".join(segment.text for segment in rendered))[::2]
        cuts = [(token[:k], token[k:]) for token in self._control_tokens for k in range(1, len(token))]
        return any(
            before.endswith(start) or after.startswith(end)
            for before, after in zip(texts[:-1], texts[1:], strict=True)
            for start, end in cuts
        )
