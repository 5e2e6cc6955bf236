"""Chat templates as rows are encoded with them, where the stock template is made for inference only.

Stock templates of reasoning models drop or rewrite earlier answers, so the text before an answer depends on what
follows it. A few edits keep every answer as it was generated: the text of a conversation with one answer, and of the
last answer of any, stays that of the stock template. A stock template is known by its sha256, and edited in memory:
chat and export keep the template of the tokenizer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from data.tokenize.jinja_sandbox import END
from data.types import BadRowError

CLOSING_TAG = re.compile(r"</\w{2,}>")
MAX_TOKEN_CHARACTERS = 200  # of a control token with white space behind it
Edit = tuple[str, str]  # (expression of the stock template, replacement)


class TrainingVersion(NamedTuple):
    name: str  # models that have the stock template
    stock: tuple[str, ...]  # sha256 of stock templates, see `template_sha256`
    edits: tuple[Edit, ...]


# The generation prompt opens a think block, which an answer without reasoning does not have: ChatTemplate tries
# thinking=false for it.
OPTIONAL_THINK = "('' if thinking is false else '<think>\\n')"
WITH_REASONING = "('<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' if message.reasoning_content else '') + (message.content or '')"
TRAINING_VERSIONS = (
    TrainingVersion(
        "Qwen3, Qwen3-Thinking-2507",
        (
            "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5",
            "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
            "3802169b2a02b81e6adb7ab4f64f91ff02db753c8c3a64a01c35192d3a61d8d7",
        ),
        (("loop.index0 > ns.last_query_index", "true"), ("loop.last or (not loop.last and reasoning_content)", "true")),
    ),
    TrainingVersion(
        "Qwen3.5, Qwen3.6",
        (
            "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
            "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80",
            "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",
        ),
        (("loop.index0 > ns.last_query_index", "true"),),
    ),
    TrainingVersion(
        "QwQ-32B",
        ("3487c45e3264dacd700300db2d9c63f97dc7fb68057c8cb805fb5dd5c6366811",),
        (
            ("message.content.split('</think>')[-1].lstrip('\\n')", WITH_REASONING),
            ("'<|im_start|>assistant\\n<think>\\n'", f"'<|im_start|>assistant\\n' + {OPTIONAL_THINK}"),
        ),
    ),
    TrainingVersion(
        "DeepSeek-R1",
        (
            "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f",
            "563b1ce7d61d50a9b4c7439a912a1116f095b712df5b5e4d3e1116049874eb64",
        ),
        (
            ("{% set content = message['content'] %}", f"{{% set content = {WITH_REASONING} %}}"),
            ("content.split('</think>')[-1]", "content"),
            ("'<｜Assistant｜><think>\\n'", f"'<｜Assistant｜>' + {OPTIONAL_THINK}"),
        ),
    ),
    TrainingVersion(
        "GLM-4.5, GLM-4.7-Flash, GLM-5",
        (
            "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3",
            "d63ad536c3c81880043e22ec7fd08db42b4d8fb7c89c7138bc562bfa25281375",
        ),
        (("loop.index0 > ns.last_user_index", "true"),),
    ),
    TrainingVersion(
        "Nemotron 3",
        (
            "43a92aacc2e169bb37055e4d8b0df31edfdc8657d8c387fcf98254cb246e626a",
            "3b74d76d8b903752e764cae114ae8ae2f24cd260466cf672570c745219573d28",
            "82753bef5cedc4932c1ed509b5c9a12be680fd86d1adb65bc3f7398d11c8eebc",
        ),
        (("truncate_history_thinking and loop.index0 < ns.last_user_idx", "false"),),
    ),
)


def template_sha256(template: str) -> str:
    """Return the sha256 (hex) of a template; line ends and the one at the end of the file, which Jinja ignores, make no
    difference.
    """
    return hashlib.sha256(
        template.replace("\r\n", "\n").removesuffix("\n").encode("utf-8", "surrogatepass")
    ).hexdigest()


def training_version(template: str) -> TrainingVersion | None:
    """Return the training version of a stock template, None if it is unknown or needs none."""
    sha256 = template_sha256(template)
    return next((version for version in TRAINING_VERSIONS if sha256 in version.stock), None)


def apply_edits(template: str, version: TrainingVersion) -> str:
    for expression, replacement in version.edits:
        template = template.replace(expression, replacement)
    return template


class TurnEnd(NamedTuple):
    """How the template ends an assistant turn, as a short conversation shows it."""

    token: str  # ends an answer: inference stops there
    is_trained: bool = True  # every turn ends with such a token inside the text of the assistant
    added_after: str = "none"  # answers that it is added to, because nothing like it follows: none, last or every
    note: str | None = None  # warning for a template that leaves it out


def find_turn_end(
    answer_and_rest: Callable[[list[dict]], tuple[str, str]], end_tokens: tuple[str, ...], eos_token: str, where: str
) -> TurnEnd:
    """Return how an assistant turn ends, with and without a message behind it.

    `answer_and_rest` renders a conversation with one answer, and returns the text of the answer, as far as it has loss,
    and the text after it.
    """
    question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
    try:
        inside, after = answer_and_rest([question, answer])
    except BadRowError:  # the template refuses such a conversation, or does not show where the answer is
        return TurnEnd(eos_token)
    try:
        inside_followed, after_followed = answer_and_rest([question, answer, question])
    except BadRowError:
        inside_followed, after_followed = inside, ""
    if ends_with_token(inside, end_tokens):
        rest = inside.partition("answer")[2]
        first = min((token for token in end_tokens if token in rest), key=rest.index, default=eos_token)
        return TurnEnd(first, is_trained=ends_with_token(inside_followed, end_tokens))
    if unmarked := leading_token(after, end_tokens):
        return TurnEnd(
            unmarked,
            False,
            "none",
            f"the marks of the chat template leave out {unmarked}, which ends an answer: it has loss, too ({where})",
        )
    problem = f"the chat template writes no end token after an answer ({where})"
    if following := leading_token(after_followed, end_tokens):
        note = f"{problem}: {following}, with which the next message begins, ends it, has loss, and is added after the last answer"
        return TurnEnd(following, False, "last", note)
    return TurnEnd(eos_token, False, "every", f"{problem}: {eos_token} is added and has loss")


def close_turns(marked: str, end_tokens: tuple[str, ...], last: str, between: str | None) -> str:
    """Put an end token into each marked span without one: the one that follows it, else `last` at the end and `between`
    before text.

    `between` is None where the spans are the template's own marks: one that text follows is not the end of a turn.
    """

    def close(span_end: re.Match[str]) -> str:
        if ends_with_token(marked[: span_end.start()], end_tokens):
            return span_end[0]
        if span_end[1]:
            return span_end[1] + END
        is_last = not marked[span_end.end() :].strip()
        return (last if is_last else between or "") + END

    return re.sub(rf"{END}(\s*(?:{'|'.join(map(re.escape, end_tokens))}))?", close, marked)


def ends_with_token(text: str, end_tokens: tuple[str, ...]) -> bool:
    return text[-MAX_TOKEN_CHARACTERS:].rstrip().endswith(end_tokens)


def leading_token(text: str, end_tokens: tuple[str, ...]) -> str | None:
    return next((token for token in end_tokens if text.lstrip().startswith(token)), None)


def possible_end_tokens(control_tokens: Iterable[str]) -> tuple[str, ...]:
    """Return the control tokens that may end a turn: not the closing tags of a part of it, such as </think> and
    </tool_call>.
    """
    return tuple(
        sorted(
            (token for token in control_tokens if len(token) > 1 and not CLOSING_TAG.fullmatch(token)),
            key=len,
            reverse=True,
        )
    )
