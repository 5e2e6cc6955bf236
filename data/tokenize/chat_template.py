"""Conversations through a Jinja chat template into token ids, and which of them the assistant wrote.

What the template writes may become control tokens; what people write never does. So that the two can be told apart
in the rendered text, control tokens inside contents are broken by a private character before rendering, and it is
taken out again before that text is encoded as plain text.

Which text is the assistant's is read off `{% generation %}` marks where the template has them. Where it has none, a
turn is what stands between two renderings that the whole one begins with: of all messages before it, up to where an
answer begins (what a model is given when it is asked), and of all messages up to and with it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from common.errors import UserError
from data.schemas.errors import BadRowError
from data.schemas.messages import check_chat, drop_empty_system
from data.tokenize.jinja_sandbox import BEGIN, BREAK, END, appears_in, compile_template, mask_control_tokens, unmask_control_tokens
from data.tokenize.tokenizer import Tokenizer

CHATML = Path(__file__).with_name("chatml.jinja")
PLACEHOLDERS = "{% generation %} ... {% endgeneration %} around the assistant's words and their end token"
Encoded = tuple[list[int], list[bool]]
# render(n) is the text of the first n messages; render(n, prompt=True) goes on to where the assistant's answer to them begins.
Render = Callable[..., str]
# How templates are asked to begin an answer: as they do by themselves, with thinking (Qwen, DeepSeek, MiniMind name it so), without.
THINKING_KWARGS: list[dict[str, bool]] = [{}, *({name: on for name in ("enable_thinking", "thinking", "open_thinking")} for on in (True, False))]


@dataclass(frozen=True)
class TemplateSegment:
    """A stretch of rendered conversation: one control token, or plain text."""

    text: str
    control: bool
    learn: bool


class ChatTemplate:
    """Any tokenizer's chat template. Messages are those of data.shapes: checked, with roles and fields as OpenAI names them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._where = f"{tokenizer.folder}/chat_template.jinja"
        if not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template", self._where, f"put one there, e.g. a copy of data/{CHATML.name}")
        self.tokenizer = tokenizer
        self._source = _default(tokenizer.chat_template)
        self._marked = re.search(r"{%[-+]?\s*generation\b", self._source) is not None
        self._seams = _any_of([BEGIN, END, *tokenizer.control_ids])
        self._control, self._special = _any_of(_breakable(tokenizer.control_ids)), _any_of(_breakable(tokenizer.special))
        try:
            self._template = compile_template(self._source)
        except TemplateError as error:
            raise UserError(f"the chat template does not compile: {error}", self._where, "mend the template of the tokenizer") from error

    def pieces(self, messages: list[dict], tools: list[dict] | None, where: str, train_on: str = "assistant") -> list[TemplateSegment]:
        """The rendered conversation in pieces, not yet tokens.

        train_on: assistant, last_assistant (of several turns the last alone), or all. A turn of weight 0 carries no loss under
        any of them, and is never the last. What the assistant writes includes the token that ends the turn, and not the white
        space behind it. Raises BadRow where the template refuses the conversation, loses a part of it, or does not show what
        is the assistant's. A conversation without an assistant has nothing to learn, and that is left to the caller to judge.
        """
        render, given = self._renderer(messages, tools, where)
        whole = render(len(messages))
        self._check_contents(whole, given, where)
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        silent = [turn for turn in turns if messages[turn].get("weight") == 0]
        learned = [turn for turn in turns if turn not in silent]
        if train_on == "all":
            self._check_reasoning(whole, given, learned, where)
            return [replace(piece, learn=not piece.learn) for piece in self._told(whole, messages, silent, render, where)]
        if silent and not learned:
            raise BadRowError("no turn with a weight", "every assistant turn has weight 0: nothing to learn", where, "delete the row")
        learned = learned[-1:] if train_on == "last_assistant" else learned
        pieces = self._told(whole, messages, learned, render, where)
        self._check_reasoning(whole, given, learned, where)
        if turns and not any(piece.learn for piece in pieces):
            what = "the chat template marks nothing of this conversation as the assistant's"
            raise BadRowError("nothing marked by the template", what, where, f"{self._where}: put {PLACEHOLDERS}")
        return pieces

    def assemble(self, chats: list[list[TemplateSegment]]) -> list[Encoded]:
        """(ids, learn) of each, in one call of the tokenizer: learn[t] where token t carries loss. The first never does: nothing predicts it."""
        texts = list({piece.text: None for pieces in chats for piece in pieces if not piece.control})  # each once: "user\n" comes often
        known = dict(zip(texts, self.tokenizer.encode_batch(texts), strict=True))
        encoded: list[Encoded] = []
        for pieces in chats:
            ids: list[int] = []
            learn: list[bool] = []
            for piece in pieces:
                piece_ids = [self.tokenizer.control_ids[piece.text]] if piece.control else known[piece.text]
                ids += piece_ids
                learn += [piece.learn] * len(piece_ids)
            learn[:1] = [False] * len(learn[:1])
            encoded.append((ids, learn))
        return encoded

    def encode(self, messages: Any, tools: Any = None, where: str = "messages", train_on: str = "assistant") -> Encoded:
        """`pieces` and `assemble` of one conversation that nobody has checked yet."""
        messages, tools = check_chat(messages, tools, where)
        return self.assemble([self.pieces(drop_empty_system(messages), tools, where, train_on)])[0]

    def prompt(self, messages: Any, tools: Any = None, where: str = "messages") -> list[int]:
        """A conversation that nobody has checked yet, up to where the assistant's next words begin."""
        messages, tools = check_chat(messages, tools, where)
        messages = drop_empty_system(messages)
        render, given = self._renderer(messages, tools, where)
        whole = render(len(messages), prompt=True)
        self._check_contents(whole, given, where)
        return self.assemble([self._cut(whole)])[0][0]

    def turns(self, messages: list[dict], tools: list[dict] | None, where: str) -> list[tuple[int, str]]:
        """(characters, role): after how many characters of the rendered conversation each message is over. For people to look at:
        messages whose texts cannot be told apart stand there as one, without a role."""
        render, _ = self._renderer(messages, tools, where)
        whole, ends, untold = render(len(messages)), [], False
        for count, message in enumerate(messages, 1):
            try:
                end = self._beginning(whole, render(count))
            except BadRowError:  # no conversation may end here
                end = None
            if end is not None:
                ends.append((len(unmask_control_tokens(whole[:end])), "" if untold else message["role"]))
            untold = end is None
        return ends

    def _renderer(self, messages: list[dict], tools: list[dict] | None, where: str) -> tuple[Render, list[dict]]:
        """How prefixes of the conversation are rendered, and the messages as the template sees them."""
        for field in ("tools", "tool_calls"):
            if field not in self._source and (tools if field == "tools" else any(message.get(field) for message in messages)):
                raise self._lost(field, where)
        # A field that is there but empty is, to many templates, a field that is there.
        given = [{key: value for key, value in message.items() if value or key == "content"} for message in messages]
        # The assistant may write its own tags (<think>), but nobody ends or opens a turn from inside one.
        shielded = [mask_control_tokens(message, self._special if message["role"] == "assistant" else self._control, where) for message in given]
        shielded_tools = mask_control_tokens(tools, self._control, where)

        def render(count: int, prompt: bool = False, **manner: bool) -> str:
            names = {"messages": shielded[:count], "tools": shielded_tools, "documents": None, "add_generation_prompt": prompt}
            try:
                return self._template(**names, **manner, **self.tokenizer.named)
            except TemplateError as error:
                part = "" if count == len(messages) else f" when it is asked for the first {count} of {len(messages)} messages"
                what = f"the chat template refuses the conversation{part}: {error}"
                raise BadRowError("refused by the chat template", what, where, f"change the conversation, or {self._where}") from error

        return render, shielded

    def _check_contents(self, whole: str, given: list[dict], where: str) -> None:
        """What anybody says stands in the rendered text. Earlier thoughts need not: many templates drop them on purpose."""
        for place, message in enumerate(given):
            words = message["content"]
            if words.strip() not in whole and not appears_in(words, whole, thoughts=message["role"] != "assistant"):
                raise self._lost(f"the content of {message['role']} messages", f"{where} message {place}")

    def _check_reasoning(self, whole: str, given: list[dict], learned: list[int], where: str) -> None:
        """Reasoning stands in the rendered text where it is to be learned."""
        for turn in learned:
            reasoning, words = given[turn].get("reasoning_content"), given[turn]["content"]
            if (reasoning and not appears_in(reasoning, whole)) or ("think>" in words and not appears_in(words, whole)):
                raise self._lost("reasoning_content", where, "" if turn == learned[-1] else "data.train_on=last_assistant; or ")

    def _lost(self, part: str, where: str, first: str = "") -> BadRowError:
        fix = f"{first}use a tokenizer whose template reads {part} (data/{CHATML.name} does), or take it out"
        return BadRowError(f"{part} lost by the chat template", f"the chat template leaves out {part}", where, fix)

    def _told(self, whole: str, messages: list[dict], learned: list[int], render: Render, where: str) -> list[TemplateSegment]:
        """`whole` in pieces, where those of the turns `learned` carry loss."""
        if not self._marked:
            return self._cut(self._mark(whole, messages, learned, render, where))
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if learned == turns:
            return self._cut(whole)
        # The marks of a turn are those between the prompt it answers and the prompt of the turn after it.
        marks: set[int] = set()
        for turn in learned:
            after = next((later for later in turns if later > turn), None)
            stop = whole if after is None else render(after, prompt=True)
            marks.update(range(render(turn, prompt=True).count(BEGIN), stop.count(BEGIN)))
        return self._cut(whole, marks)

    def _mark(self, whole: str, messages: list[dict], turns: list[int], render: Render, where: str) -> str:
        """`whole` with marks around each of the assistant's turns, found by comparing beginnings."""
        text, end = "", 0
        for turn in turns:
            prompts = (self._beginning(whole, render(turn, prompt=True, **manner)) for manner in THINKING_KWARGS)
            start = next((prompt for prompt in prompts if prompt is not None), None)
            stop = len(whole) if turn + 1 == len(messages) else self._beginning(whole, render(turn + 1))
            if start is None or stop is None or start < end or not (words := whole[start:stop].rstrip()):
                raise self._rewritten(turn, turns, start is None, where)
            self._check_header(words, messages[turn], where)
            text += whole[end:start] + BEGIN + words + END
            end = start + len(words)
        return text + whole[end:]

    def _rewritten(self, turn: int, turns: list[int], in_front: bool, where: str) -> BadRowError:
        how = f"asked for message {turn}, it begins otherwise" if in_front else f"it writes message {turn} otherwise when nothing follows"
        what = f"the chat template rewrites what stands already ({how}): which words are the assistant's cannot be told"
        fix = f"{self._where}: put {PLACEHOLDERS}"
        return BadRowError("turns rewritten by the chat template", what, where, fix if turn == turns[-1] else f"data.train_on=last_assistant; or {fix}")

    def _beginning(self, whole: str, part: str) -> int | None:
        """How much of `whole` is `part`; None where it does not begin with it."""
        if not whole.startswith(part):
            part = part.rstrip().removesuffix(self.tokenizer.named["eos_token"])  # some write it once, behind the last turn
        return len(part) if whole.startswith(part) else None

    def _check_header(self, words: str, message: dict, where: str) -> None:
        """A template that ignores add_generation_prompt does not show where the header ends and the answer begins."""
        if "add_generation_prompt" in self._source or words.replace(BREAK, "").lstrip().startswith(message["content"].strip()):
            return
        what = "the chat template does not show where an answer begins: it knows no add_generation_prompt"
        raise BadRowError("no add_generation_prompt", what, where, f"{self._where}: put {PLACEHOLDERS}")

    def _cut(self, rendered: str, marks: Container[int] = range(sys.maxsize)) -> list[TemplateSegment]:
        """`marks`: which of the marked stretches carry loss, by their number. The text is cut at the others all the same,
        so that a conversation becomes the same tokens whichever of its turns are learned."""
        pieces, learn, start, met = [], False, 0, 0
        for seam in [*self._seams.finditer(rendered), None]:
            stop = seam.start() if seam else len(rendered)
            if text := rendered[start:stop].replace(BREAK, ""):
                pieces.append(TemplateSegment(text, False, learn))
            if seam is None:
                break
            start = seam.end()
            if seam[0] in (BEGIN, END):
                learn = seam[0] == BEGIN and met in marks
                met += seam[0] == BEGIN
            else:
                pieces.append(TemplateSegment(seam[0], True, learn))
        return pieces


def _default(template: Any) -> str:
    """Some tokenizers keep several templates by name."""
    named = {each["name"]: each["template"] for each in template} if isinstance(template, list) else {"default": template}
    return named.get("default", next(iter(named.values())))


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """The longest of `tokens` that stands somewhere; of none at all, nothing."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _breakable(tokens: Iterable[str]) -> list[str]:
    """A token of one character (Gemma has the new line) is the same as text and as a token."""
    return [token for token in tokens if len(token) > 1]
