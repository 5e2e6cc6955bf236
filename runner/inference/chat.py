"""Talking to a trained model: one answer, or a conversation that streams."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from common.errors import UserError
from runner.inference.load import LoadedModel, load_trained
from runner.tracking.console import strip_control

if TYPE_CHECKING:
    import torch

    from data.tokenize.tokenizer import Tokenizer

CHAT_MODES = ("auto", "chat", "text")
CHAT_HELP = "Write, and press Enter. /new forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."


@dataclass
class ChatConfig:
    run: str  # a run, a Hugging Face or PEFT folder, or last
    prompt: Optional[str]  # one answer to this; null: a conversation
    mode: str  # auto: in turns where the model was trained so, otherwise it continues the text
    system: Optional[str]
    temperature: float  # 0: always the likeliest token
    top_k: int  # 0: no limit
    top_p: float
    repetition_penalty: float
    max_new_tokens: int
    seed: int
    device: str

    def __post_init__(self) -> None:
        if self.mode not in CHAT_MODES:
            raise UserError("unknown mode", f"mode={self.mode}", f"choose one of {', '.join(CHAT_MODES)}")
        if self.temperature < 0:
            raise UserError("a temperature cannot be negative", f"temperature={self.temperature}", "choose 0 (always the likeliest token) or more")
        if self.top_k < 0:
            raise UserError("a count cannot be negative", f"top_k={self.top_k}", "choose 0 (no limit) or more")
        if not 0 < self.top_p <= 1:
            raise UserError("top_p is a share of the probability in (0, 1]", f"top_p={self.top_p}", "1 keeps every token")
        if self.repetition_penalty <= 0:
            raise UserError("a penalty is a positive factor", f"repetition_penalty={self.repetition_penalty}", "1 is no penalty")
        if self.max_new_tokens < 1:
            raise UserError("an answer needs a token", f"max_new_tokens={self.max_new_tokens}", "choose at least 1")


def chat(cfg: ChatConfig, folder: Path) -> None:
    """Print one answer to `cfg.prompt`, or hold a conversation on standard input."""
    speaker = ChatSession(load_trained(folder, cfg.device), cfg)
    if cfg.prompt is not None:
        speaker.answer(cfg.prompt, _write_out)
        _write_out("\n")
    else:
        repl(speaker)


def repl(speaker: ChatSession) -> None:
    shown = sys.stdin.isatty()  # a file or a pipe as input gets answers alone
    if shown:
        print(CHAT_HELP if speaker.chats else f"This model continues text. {CHAT_HELP}")
    while True:
        try:
            said = input("> " if shown else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if said == "/exit":
            return
        if said == "/new":
            speaker.forget()
        elif said:
            _print_answer(speaker, said)


def _print_answer(speaker: ChatSession, said: str) -> None:
    try:
        speaker.answer(said, _write_out)
    except KeyboardInterrupt:
        pass  # the answer ends here; the conversation goes on
    except ValueError as refusal:  # too long for this model: said, and asked again
        _write_out(": ".join(map(str, refusal.args)))
    _write_out("\n")


class ChatSession:
    """A model with what has been said so far."""

    def __init__(self, trained: LoadedModel, cfg: ChatConfig) -> None:
        import torch

        from data.tokenize.chat_template import ChatTemplate

        self.trained, self.cfg = trained, cfg
        self.chats = trained.chats if cfg.mode == "auto" else cfg.mode == "chat"
        if cfg.system and not self.chats:
            raise UserError("a model that continues text has no system message", f"system={cfg.system}", "drop system=, or set mode=chat")
        self._template = ChatTemplate(trained.tokenizer) if self.chats else None
        self._generator: torch.Generator = torch.Generator(trained.device).manual_seed(cfg.seed)
        self.forget()

    def forget(self) -> None:
        self._turns: list[dict[str, Any]] = [{"role": "system", "content": self.cfg.system}] if self.cfg.system else []

    def answer(self, said: str, write: Callable[[str], None]) -> str:
        """The whole answer to `said`; its characters reach `write` as they are complete."""
        from models.generate import generate

        cfg, tokenizer = self.cfg, self.trained.tokenizer
        self._turns.append({"role": "user", "content": said})
        voice = TokenStreamer(tokenizer, write)
        try:
            generate(
                self.trained.model,
                [self._prompt(said)],
                max_new_tokens=cfg.max_new_tokens,
                temperature=cfg.temperature,
                top_k=cfg.top_k,
                top_p=cfg.top_p,
                repetition_penalty=cfg.repetition_penalty,
                stop_ids=[tokenizer.eos_id],
                generator=self._generator,
                on_token=lambda row, token: voice.hear(token),
            )
        finally:
            # An answer that was cut short has still been said.
            self._turns.append({"role": "assistant", "content": voice.end()})
        return self._turns[-1]["content"]

    def _prompt(self, said: str) -> list[int]:
        """Ids the model continues; the oldest turns are left out where the conversation outgrows the model."""
        room = self.trained.model.cfg.max_position_embeddings - self.cfg.max_new_tokens
        if self._template is None:
            ids = [self.trained.tokenizer.bos_id, *self.trained.tokenizer.encode(said)]
        else:
            ids = self._template.prompt(self._turns)
            first = 1 if self.cfg.system else 0
            while len(ids) > room and len(self._turns) > first + 2:
                del self._turns[first : first + 2]
                ids = self._template.prompt(self._turns)
        if len(ids) > room:
            raise UserError(
                f"the text of {len(ids)} tokens leaves no room for an answer",
                f"max_new_tokens={self.cfg.max_new_tokens}",
                f"say less: the model holds {room + self.cfg.max_new_tokens} tokens, both together",
            )
        return ids


class TokenStreamer:
    """Tokens in, whole characters out: one character may be spread over several tokens."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._ids: list[int] = []
        self._said = ""

    def hear(self, token: int) -> None:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\ufffd"):  # the sign of a character whose bytes are not all there
            self._speak(text)

    def end(self) -> str:
        text = self._tokenizer.decode(self._ids)
        self._speak(text)
        return text

    def _speak(self, text: str) -> None:
        self._write(strip_control(text[len(self._said) :]))
        self._said = text


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
