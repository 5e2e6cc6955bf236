"""Chat with a trained model: one answer, or a conversation with streamed answers."""

from __future__ import annotations

import json
import re
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from common.errors import UserError, did_you_mean, print_note, print_safely, strip_control
from common.settings import CheckedSettings, at_least, one_of, settings_class, within
from runner.inference.load import LoadedModel, load_trained
from runner.run_dir.metadata import RunMetadata

if TYPE_CHECKING:
    import torch

MAX_STAGES = 32  # that are followed: init_from of a damaged run.json may lead in a circle
CHAT_HELP = (
    "Type a message and press Enter; a line that ends with \\ goes on, pasted lines are one message. /new starts a new "
    "conversation, /save FILE.jsonl appends it as a row, /exit or Ctrl-D quits, Ctrl-C stops an answer."
)
COMMANDS = ("/new", "/save", "/exit", "/help")
PASTE_SECONDS = 0.05  # lines that are there so soon after another were pasted with it


@settings_class
class ChatConfig(CheckedSettings):
    run: str  # run directory, Hugging Face or PEFT folder, or last: the newest finished run
    prompt: Optional[str]  # print one answer to it; null: a conversation on standard input
    # chat (messages), text (continue the prompt) or auto (as the model was trained)
    mode: str = one_of("auto", "chat", "text")
    system: Optional[str]  # system message
    temperature: float = at_least(0, 0.7)  # of sampling; 0: greedy
    top_k: int = at_least(0)  # sample from the k most likely tokens; 0: from all
    # sample from the most likely tokens with this probability together
    top_p: float = within("(0, 1]", 1)
    # above 1: tokens of the conversation become less likely
    repetition_penalty: float = within("[1e-5, inf)", 1)
    max_new_tokens: int = at_least(1, 256)  # length limit of an answer (tokens)
    seed: int = within("[-9e18, 9e18]", 42)  # of sampling
    device: str  # auto (a GPU if there is one), cpu, cuda, cuda:<number> or mps (GPU of a Mac)
    # auto (bf16 on a GPU that computes it, else fp32), fp32, bf16 or fp16: the model is rounded to it
    dtype: str = one_of("auto", "fp32", "bf16", "fp16")


def chat(cfg: ChatConfig, folder: Path) -> None:
    """Print one answer to `cfg.prompt`, or hold a conversation on standard input."""
    session = ChatSession(load_trained(folder, cfg.device).compute_in(cfg.dtype), cfg)
    if cfg.prompt is not None:
        session.answer(cfg.prompt, _write_out)
        _write_out("\n")
    else:
        repl(session)


def repl(session: ChatSession) -> None:
    """Answer each message of standard input. If it is a file or a pipe, only answers are printed."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):  # with it `input` edits lines, and returns pasted ones together
            import readline

            readline.set_auto_history(True)
        print(CHAT_HELP if session.is_chat else f"This model continues text. {CHAT_HELP}")
    while True:
        try:
            text = _read_message() if is_terminal else input()
            if text.strip() == "/exit":
                return
            try:
                _respond(session, text, is_terminal)
            except UserError as error:  # e.g. the message is too long for the model
                print_safely(f"error: {error.message}; {error.fix}")
            except OSError as error:
                print_safely(f"error: {error}")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            fix = "convert the text to UTF-8, e.g. with iconv"
            raise UserError(f"a message cannot be read: {error}", "standard input", fix) from error
        except KeyboardInterrupt:  # ends the answer or the line, not the conversation
            if not is_terminal:
                raise
            print()


def _read_message() -> str:
    text = input("> ")
    while text.endswith("\\") or select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
        text = text.removesuffix("\\") + "\n" + input("... ")
    return text


def _respond(session: ChatSession, text: str, is_terminal: bool) -> None:
    """Answer a message, or obey a command: of a pipe, whose text may be of unknown origin, /new alone."""
    command, _, argument = text.strip().partition(" ")
    if command == "/new" and not argument:
        session.clear()
    elif not is_terminal or not re.match(r"/[a-z]*(\s|$)", text):
        if command:
            session.answer(text.strip(), _write_out)
            print()
    elif command == "/save" and argument:
        session.save(Path(argument).expanduser())
    elif command in COMMANDS:
        print(CHAT_HELP)
    else:
        hint = did_you_mean(command, COMMANDS, "begin a message with a space")
        print(f"unknown command {command}: {hint}\n{CHAT_HELP}")


class ChatSession:
    """A model and the messages of a conversation with it."""

    def __init__(self, trained: LoadedModel, cfg: ChatConfig) -> None:
        import torch

        self.trained, self.cfg = trained, cfg
        self.is_chat = trained.is_chat_model if cfg.mode == "auto" else cfg.mode == "chat"
        if cfg.system and not self.is_chat:
            raise UserError(
                "mode=text has no system message: the model continues the prompt",
                f"system={cfg.system}",
                "omit system=, or set mode=chat",
            )
        self._stop_ids = trained.stop_ids(self.is_chat)  # refuses a model without a chat template
        self._trained_length = trained_length(trained.run_dir) if self.is_chat else None
        self._generator: torch.Generator = torch.Generator(trained.device).manual_seed(cfg.seed)
        self.clear()

    def clear(self) -> None:
        """Start a new conversation."""
        self.messages: list[dict[str, Any]] = (
            [{"role": "system", "content": self.cfg.system}] if self.cfg.system else []
        )
        self._first, self._dropped = (
            len(self.messages),
            0,
        )  # turns that no longer fit the model follow the system message
        self._is_note_printed = False

    def save(self, file: Path) -> None:
        """Append the conversation, without questions that have no answer, as a row for training.

        Raises UserError if there is none, and for a file of another kind.
        """
        turns = zip(self.messages[self._first :: 2], self.messages[self._first + 1 :: 2], strict=False)
        answered = [message for turn in turns if turn[1]["content"] for message in turn]
        if not answered or file.suffix != ".jsonl":
            problem = "there is no answer to save" if not answered else f"{file} is no JSON Lines file"
            raise UserError(problem, f"/save {file}", "type /save FILE.jsonl after an answer")
        with file.open("a", encoding="utf-8") as lines:
            row = {"messages": [*self.messages[: self._first], *answered]}
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        print_safely(f"appended {len(row['messages'])} messages to {file}")

    def answer(self, text: str, write: Callable[[str], object]) -> str:
        """Return the answer to `text`; `write` gets each character as soon as it is complete."""
        from models.generate import Sampler, generate_rows
        from runner.inference.generation import Answer

        cfg = self.cfg
        answer = Answer(
            prompt=[],
            limit=cfg.max_new_tokens,
            sampler=Sampler(cfg.temperature, cfg.top_k, cfg.top_p, cfg.repetition_penalty, self._generator),
            stop_ids=self._stop_ids,
            tokenizer=self.trained.tokenizer,
            on_text=write,
        )
        dropped = self._dropped
        self.messages.append({"role": "user", "content": text})
        try:
            answer.prompt = self._encode_prompt(text)
        except BaseException:
            self.messages.pop()
            self._dropped = dropped
            raise
        answer.before = [] if self.is_chat else answer.prompt[-1:]
        try:
            self._note_untrained_length(len(answer.prompt))
            generate_rows(self.trained.model, [answer])
        finally:
            # An interrupted answer stays in the conversation as far as it was printed.
            answer.end()
            self.messages.append({"role": "assistant", "content": answer.text})
        return answer.text

    def _encode_prompt(self, text: str) -> list[int]:
        """Return the token ids to continue; the oldest turns are dropped if the conversation does not fit the model."""
        trained, max_positions = self.trained, self.trained.model.cfg.max_position_embeddings
        limit = max_positions - self.cfg.max_new_tokens
        while True:
            shown = [*self.messages[: self._first], *self.messages[self._first + self._dropped :]]
            ids = trained.template.encode_prompt(shown) if self.is_chat else trained.encode_text(text)
            if not self.is_chat or len(ids) <= limit or len(shown) <= self._first + 2:
                break
            self._dropped += 2
        if len(ids) > limit:
            raise UserError(
                f"the prompt has {len(ids)} tokens; with max_new_tokens={self.cfg.max_new_tokens} the model of {max_positions} positions takes {max(limit, 0)}",
                f"max_new_tokens={self.cfg.max_new_tokens}",
                "shorten the prompt, or lower max_new_tokens",
            )
        return ids

    def _note_untrained_length(self, tokens: int) -> None:
        """Print one line on standard error when the conversation becomes longer than every conversation that the model
        was trained on.
        """
        if self._trained_length is None or self._is_note_printed:
            return
        trained_tokens, trained_answers = self._trained_length
        answers = sum(message["role"] == "assistant" for message in self.messages) + 1
        if trained_answers and answers > trained_answers:
            found = f"answer {answers} of this conversation, those of the training have at most {trained_answers}"
        elif tokens > trained_tokens:
            found = f"this conversation has {tokens} tokens, those of the training have at most {trained_tokens}"
        else:
            return
        self._is_note_printed = True
        print_note(
            f"note: {found}: answers may be wrong{'' if self.cfg.prompt else '; /new starts a new conversation'}"
        )


def trained_length(run_dir: Path) -> tuple[int, int] | None:
    """Return (tokens, answers) of the longest conversations that a model was trained on, over the stages of its run and
    of the runs that it started from; answers are 0 if not known (data.loss_on is not assistant).

    None where they are not known: weights that no run trained from scratch, a deleted or an older run.
    """
    tokens = answers = 0
    for _ in range(MAX_STAGES):
        fields = RunMetadata.read(run_dir)
        files, start = fields.get("data"), str(fields.get("init_from"))
        if not isinstance(files, list) or not all(
            isinstance(file, dict) and isinstance(file.get("longest_conversation"), int) for file in files
        ):
            return None
        tokens = max([tokens, *(file["longest_conversation"] for file in files)])
        answers = max([answers, *(count for file in files if isinstance(count := file.get("most_answers"), int))])
        if start == "scratch":
            return (tokens, answers) if tokens else None
        run_dir = Path(start)
    return None


def _write_out(text: str) -> None:
    sys.stdout.write(strip_control(text))
    sys.stdout.flush()
