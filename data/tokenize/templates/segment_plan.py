"""Segments of a conversation without rendering it: one rendering per shape (its roles), in which the contents are exchanged afterwards.

Only for templates that write each content as it is and test nothing but whether it is empty: those that this program ships (`shipped_templates`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from data.errors import BadRowError
from data.tokenize.templates.jinja_sandbox import PRIVATE_USE
from data.tokenize.templates.renderer import MAX_KNOWN_CHARACTERS
from data.tokenize.templates.turn_marks import TemplateSegment, any_of

MAX_SHAPES, MAX_MESSAGES = 256, 32  # shapes that are remembered; messages of a conversation
PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")  # private characters: a content that has them is exchanged like any other
Shape = tuple[tuple[str, int | None], ...]  # of each message: (role, weight)
Part = TemplateSegment | tuple[str, int, str, float]  # as it is; or (text before a content, number of its message, text after it, loss_weight)


class SegmentPlans:
    """Segments of conversations by their shape, with one value of loss_on."""

    def __init__(self, control_tokens: Iterable[str], render: Callable[[list[dict]], list[TemplateSegment]]) -> None:
        """`render` renders a conversation without tools and splits it. It may raise BadRowError."""
        self._control_tokens, self._render = list(control_tokens), render
        self._changed = any_of([*PRIVATE_USE, *self._control_tokens])  # what is masked or refused in contents, or splits them
        self._plans: dict[Shape, list[Part] | None] = {}

    def segments(self, messages: list[dict]) -> list[TemplateSegment] | None:
        """Return what `render` returns for the conversation; None if it has to be rendered."""
        shape, size = [], 0
        for message in messages:
            content = message["content"]
            if not content or message.get("reasoning_content") or message.get("tool_calls") or self._changed.search(content):
                return None
            if (weight := message.get("weight")) not in (None, 0, 1):  # one shape per weight would be too many
                return None
            shape.append((message["role"], weight))
            size += len(content)
        if size > MAX_KNOWN_CHARACTERS or len(shape) > MAX_MESSAGES or (plan := self._plan(tuple(shape))) is None:
            return None
        segments = []
        for part in plan:
            if not isinstance(part, TemplateSegment):
                before, number, after, loss_weight = part
                part = TemplateSegment(before + messages[number]["content"] + after, False, loss_weight)
            segments.append(part)
        return segments

    def _plan(self, shape: Shape) -> list[Part] | None:
        if shape in self._plans:
            return self._plans[shape]
        if len(self._plans) == MAX_SHAPES:
            self._plans.clear()
        plan = self._plans[shape] = self._trace(shape)
        return plan

    def _trace(self, shape: Shape) -> list[Part] | None:
        """Render placeholders in place of contents; None if the template refuses the shape, or does not write each of them once, in its own segment."""
        messages: list[dict] = [{"role": role, "content": f"\ue000{number}\ue001"} for number, (role, _) in enumerate(shape)]
        for message, (_, weight) in zip(messages, shape, strict=True):
            if weight is not None:
                message["weight"] = weight
        try:
            rendered = self._render(messages)
        except BadRowError:  # raised again, with the position of the row, by the rendering of its contents
            return None
        plan: list[Part] = []
        for segment in rendered:
            before, *rest = PLACEHOLDER.split(segment.text)
            plan.append((before, int(rest[0]), rest[1], segment.loss_weight) if len(rest) == 2 and not segment.is_control else segment)
        numbers = [part[1] for part in plan if not isinstance(part, TemplateSegment)]
        return plan if numbers == list(range(len(shape))) and not self._may_join(rendered) else None

    def _may_join(self, rendered: list[TemplateSegment]) -> bool:
        """Return whether a content and the text around it may make a control token together, where the text would then be split."""
        texts = PLACEHOLDER.split("".join(segment.text for segment in rendered))[::2]
        cuts = [(token[:k], token[k:]) for token in self._control_tokens for k in range(1, len(token))]
        return any(before.endswith(start) or after.startswith(end) for before, after in zip(texts[:-1], texts[1:], strict=True) for start, end in cuts)
