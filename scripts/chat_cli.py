"""
Chat with a model in the terminal.

    python -m scripts.chat_cli                             # the last stage there is
    python -m scripts.chat_cli -i sft -p "Where does Mira live?"    # one question, one answer
    python -m scripts.chat_cli < question.txt              # the same from standard input

A base model has not learned to chat: it continues each text, as on the chat page. Ctrl-C stops an
answer, and only it; /help lists the commands and keys.

Reads   the checkpoint of a stage (base, mid, sft, rl)
Writes  chat_history under the base directory: what was typed, for the arrow keys
"""

import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from rich.cells import cell_len
from rich.console import Console

from nanochat.checkpoint import find_checkpoint, load_model, newest_stage
from nanochat.common import base_dir, printable
from nanochat.config import short, start
from nanochat.distributed import DistConfig, init_distributed
from nanochat.engine import Engine, Sampling
from nanochat.gpt import for_inference
from nanochat.preflight import choose_fused_engine
from nanochat.sandbox import Tools
from nanochat.serve.transcript import Transcript, render_fitting
from nanochat.tokenizer import Tokenizer

HELP = """\
/help            this list
/system <text>   set the system prompt of this conversation; without a text, remove it
/clear           start a new conversation
/quit, Ctrl-D    leave
Enter           send; Alt-Enter or Ctrl-J: new line; Up: earlier input; Ctrl-C: stop an answer"""
COMMAND = re.compile(r"/[a-z]+(?=\s|$)")
STYLES = {"text": "", "python": "cyan", "python_output": "green"}
MARKS = {"python": "[", "python_output": " = "}


@dataclass(frozen=True)
class ChatCli:
    source: Literal["base", "mid", "sft", "rl"] | None = short("i", None)
    """Whose checkpoint to talk to. Default: the last stage that has one."""
    model_tag: str | None = short("g", None)
    """Folder of the checkpoint. Default: the one written last."""
    step: int | None = short("s", None)
    """Step of the checkpoint. Default: the last good one."""
    prompt: str | None = short("p", None)
    """Ask this, print the answer and exit. Default: ask what comes from standard input."""
    system: str = ""
    """System prompt, put in front of the first message."""
    temperature: float = short("t", 0.6)
    """Sampling temperature; 0 is greedy."""
    top_k: int | None = short("k", 50)
    """Sample from the k most likely tokens. Default: all."""
    top_p: float = 1.0
    """Only among the likeliest tokens that together reach this probability."""
    max_new_tokens: int = short("m", 256)
    """Longest answer, in tokens."""
    seed: int = 0
    """Seed of the sampling."""
    python: bool = False
    """Run python that the model calls, in the sandbox; without it, it only has a calculator."""
    unsafe_exec: bool = False
    """Run what the model wrote with all your rights where this machine has no sandbox."""
    compile_engine: bool | None = None
    """Fuse the step that writes a token: faster answers, a slower start. Default: on a GPU,
    for more than one question."""
    machine: DistConfig = field(default_factory=DistConfig)


def main(cfg: ChatCli) -> None:
    prompt = cfg.prompt if cfg.prompt is not None or sys.stdin.isatty() else piped_text()
    machine = init_distributed(cfg.machine, cfg.seed)
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    source = cfg.source or newest_stage()
    checkpoint = find_checkpoint(source, cfg.model_tag, cfg.step)
    tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
    model = for_inference(load_model(checkpoint, machine))
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)
    wanted = cfg.compile_engine if prompt is None or cfg.compile_engine is not None else False
    fused = choose_fused_engine(wanted, machine, most_tokens=0)
    engine = Engine(model, tokenizer, slots=1, tool=tool, compiled=fused)
    chat = Chat(engine, cfg, console, is_base=source == "base")
    if prompt is not None:
        return chat.ask(prompt)
    where = f"{source}, {checkpoint.folder.parent.name} step {checkpoint.step}"
    console.print(f"{printable(where)}. /help lists commands, Ctrl-D leaves.", markup=False)
    if chat.is_base:
        console.print("A base model continues what you write.", style="dim")
    session: PromptSession = PromptSession(
        "> ", history=history(), multiline=True, key_bindings=enter_sends()
    )
    going = True
    while going:
        try:
            text = session.prompt()
            going = not text.strip() or chat.command(text)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def piped_text() -> str:
    """Standard input as it is, but for its last line break. Raises ValueError where it is empty."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text ({error}); convert it") from error
    if not text.strip():
        raise ValueError("standard input is empty; pipe a question in, or ask it with -p")
    return text.removesuffix("\n").removesuffix("\r")


def history() -> History:
    """What was typed in earlier sessions; of this one alone where it cannot be kept."""
    file = base_dir() / "chat_history"
    writable = os.access(file if file.exists() else base_dir(), os.R_OK | os.W_OK)
    return FileHistory(str(file)) if writable else InMemoryHistory()


def enter_sends() -> KeyBindings:
    """Enter sends; Alt-Enter and Ctrl-J start a new line."""
    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    for new_line in (("escape", "enter"), ("c-j",)):
        keys.add(*new_line)(lambda event: event.current_buffer.insert_text("\n"))
    return keys


class Chat:
    """A conversation, and how its answers are shown. A base model continues each text instead."""

    def __init__(self, engine: Engine, cfg: ChatCli, console: Console, is_base: bool = False):
        self.engine, self.cfg, self.console, self.is_base = engine, cfg, console, is_base
        self.system = cfg.system
        self.messages: list[dict[str, Any]] = []
        self.lines = LineBreaker(console.width if console.is_terminal else None)

    def command(self, text: str) -> bool:
        """Do what was typed: a command, or a question. Returns False where that is to leave."""
        found = COMMAND.match(text)
        rest = text[found.end() :].strip() if found else ""
        match found[0] if found else None:
            case "/quit":
                return False
            case "/help":
                self.console.print(HELP, markup=False)
            case "/clear":
                self.messages.clear()
            case "/system":
                self.system = rest
            case None:
                try:
                    self.ask(text)
                except ValueError as error:
                    self.console.print(printable(str(error)), style="red", markup=False)
            case unknown:
                self.console.print(f"there is no {unknown}; /help lists the commands", markup=False)
        return True

    def ask(self, question: str) -> None:
        """
        Print the answer as it comes; Ctrl-C ends it, and what was generated stays in the
        conversation. Of a long conversation the oldest turns are left out.

        Raises ValueError, and forgets the question, where it does not fit the context.
        """
        tokenizer = self.engine.tokenizer
        asked = {"role": "user", "content": question}
        if self.is_base:
            prompt = [tokenizer.bos_id, *tokenizer.encode(question)]
        else:
            system = [{"role": "system", "content": self.system}] if self.system else []
            messages = [*system, *self.messages, asked]
            prompt = render_fitting(tokenizer, messages, self.engine.cache.capacity * 3 // 4)
        transcript = Transcript(tokenizer)
        cfg, seed = self.cfg, self.cfg.seed + len(self.messages)  # other numbers for every turn
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, seed=seed)
        [completion] = self.engine.submit(prompt, sampling)
        shown, seen, stopped = "text", 0, ""
        try:
            while completion.finish is None:
                self.engine.step()
                new, seen = completion.ids[seen:], len(completion.ids)
                for kind, text in (piece for token in new for piece in transcript.add(token)):
                    shown = self.show(shown, kind, text)
            for kind, text in transcript.close():
                shown = self.show(shown, kind, text)
        except KeyboardInterrupt:
            stopped = " (stopped)"
        finally:
            self.engine.cancel(completion)
        self.write(self.lines.end(), STYLES[shown])
        self.write(stopped, "dim")
        self.write("]\n" if shown != "text" else "\n")
        self.lines.column = 0
        self.messages += [asked, {"role": "assistant", "content": transcript.parts}]

    def show(self, before: str, kind: str, text: str) -> str:
        """Print a piece; a tool call and its result stand in brackets. Returns its kind."""
        if kind != before:
            self.write(self.lines.end(), STYLES[before])
            self.write(self.lines.add("] " if kind == "text" else MARKS[kind]), "dim")
        self.write(self.lines.add(printable(text)), STYLES[kind])
        return kind

    def write(self, text: str, style: str = "") -> None:
        """To the terminal in a style, to a file or pipe as it is."""
        if self.console.is_terminal:
            self.console.print(text, style=style, end="", markup=False)
        else:
            self.console.file.write(text)
        self.console.file.flush()


class LineBreaker:
    """
    Breaks text that comes in pieces into lines of `width` columns, between words. None: changes
    nothing. A word is held back until it is whole.
    """

    def __init__(self, width: int | None):
        self.width = width
        self.column, self.word = 0, ""

    def add(self, text: str) -> str:
        """What can be printed now, given more text."""
        if self.width is None:
            return text
        out = ""
        for char in text:
            if not char.isspace():
                self.word += char
                if cell_len(char) > 1:  # lines of Chinese or Japanese break anywhere
                    out += self.end()
                continue
            out += self.end()
            if char == "\n":
                out, self.column = out + char, 0
            elif self.column < self.width:
                columns = 8 if char == "\t" else cell_len(char)
                out, self.column = out + char, self.column + columns
        return out

    def end(self) -> str:
        """What was held back, on the next line where this one has no room for it."""
        word, self.word = self.word, ""
        columns = cell_len(word)
        if self.width is not None and self.column and self.column + columns > self.width:
            word, self.column = "\n" + word, 0
        self.column += columns
        if self.width is not None and self.column > self.width:  # longer than a line
            self.column %= self.width
        return word


if __name__ == "__main__":
    start(main, ChatCli(), __doc__)
