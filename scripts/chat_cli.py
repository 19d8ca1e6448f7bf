"""
Chat with a model in the terminal.

    python -m scripts.chat_cli                             # newest checkpoint of the last stage
    python -m scripts.chat_cli -i sft -p "Where does Mira live?"    # one question, one answer
    python -m scripts.chat_cli < question.txt              # the same from standard input

A base model is not trained to chat; it continues each text. Ctrl-C stops an answer but not the
program; /help lists commands and keys.

Reads   the checkpoint of a stage (base, mid, sft, dpo, rl)
Writes  chat_history under the base directory: input history for the arrow keys
"""

import os
import re
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from rich.cells import cell_len
from rich.console import Console

from nanochat.chat_format import Transcript, render_fitting
from nanochat.checkpoint import CheckpointChoice, load_inference
from nanochat.common import base_dir, printable
from nanochat.config import short, start
from nanochat.distributed import DistConfig, init_distributed
from nanochat.engine import Engine, Sampling, choose_engine_compile
from nanochat.sandbox import Tools

HELP = """\
/help            show this help
/system <text>   set the system prompt; without text, remove it
/clear           start a new conversation
/quit, Ctrl-D    quit
Enter            send; Alt-Enter or Ctrl-J: new line; Up: earlier input; Ctrl-C: stop an answer"""
COMMAND = re.compile(r"/[a-z]+(?=\s|$)")
PART_STYLES = {"text": "", "python": "cyan", "python_output": "green"}
MARKS = {"python": "[", "python_output": " = "}


@dataclass(frozen=True)
class ChatCli(CheckpointChoice):
    prompt: Annotated[str | None, short("p")] = None
    """Answer this question and exit. Default: the question piped to standard input, else chat."""
    system: str = ""
    """System prompt."""
    sampling: Sampling = Sampling(temperature=0.6, top_k=50)
    python: bool = False
    """Let the model run Python in the sandbox; otherwise it has only a calculator."""
    unsafe_exec: bool = False
    """If no sandbox works, run the model's code unsandboxed, with your permissions."""
    compile_engine: bool | None = None
    """Compile the decode step: faster answers, slower start. Default: on a GPU, unless there is
    only one question."""
    machine: DistConfig = field(default_factory=DistConfig)


def main(cfg: ChatCli) -> None:
    prompt = cfg.prompt if cfg.prompt is not None or sys.stdin.isatty() else piped_text()
    machine = init_distributed(cfg.machine, cfg.sampling.seed)
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    source, checkpoint = cfg.find()
    model, tokenizer = load_inference(checkpoint, machine)
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)
    wanted = cfg.compile_engine if prompt is None or cfg.compile_engine is not None else False
    compiled = choose_engine_compile(wanted, machine.device, most_tokens=0)
    engine = Engine(model, tokenizer, slots=1, tool=tool, compiled=compiled)
    chat = Chat(engine, cfg, console, is_base=source == "base")
    if prompt is not None:
        return chat.ask(prompt)
    where = f"{source}, {checkpoint.folder.parent.name} step {checkpoint.step}"
    console.print(f"{printable(where)}. /help lists commands, Ctrl-D quits.", markup=False)
    if chat.is_base:
        console.print("This is a base model: it continues your text.", style="dim")
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
    """Standard input without its final line break. Raises ValueError if empty or not UTF-8."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 ({error}); convert it to UTF-8") from error
    if not text.strip():
        raise ValueError("standard input is empty; pipe a question in, or pass it with -p")
    return text.removesuffix("\n").removesuffix("\r")


def history() -> History:
    """Input history, kept across sessions, or just in memory if the file is not writable."""
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
    """A conversation in the terminal. A base model continues each text instead."""

    def __init__(self, engine: Engine, cfg: ChatCli, console: Console, is_base: bool = False):
        self.engine, self.cfg, self.console, self.is_base = engine, cfg, console, is_base
        self.system = cfg.system
        self.messages: list[dict[str, Any]] = []
        self.lines = LineBreaker(console.width if console.is_terminal else None)

    def command(self, text: str) -> bool:
        """Run a command or answer a question. Returns False to quit."""
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
                except (ValueError, RuntimeError, OSError) as error:  # or a tool that cannot start
                    self.console.print(printable(str(error)), style="red", markup=False)
            case unknown:
                self.console.print(f"unknown command {unknown}; try /help", markup=False)
        return True

    def ask(self, question: str) -> None:
        """
        Stream the answer to the terminal; Ctrl-C stops it and keeps the partial answer. The oldest
        turns of a long conversation are dropped from the prompt.

        Raises ValueError, and drops the question, if it does not fit the context.
        """
        tokenizer = self.engine.tokenizer
        message = {"role": "user", "content": question}
        if self.is_base:
            prompt = [tokenizer.bos_id, *tokenizer.encode(question)]
        else:
            system = [{"role": "system", "content": self.system}] if self.system else []
            messages = [*system, *self.messages, message]
            prompt = render_fitting(tokenizer, messages, self.engine.cache.capacity * 3 // 4)
        transcript = Transcript(tokenizer)
        seed = self.cfg.sampling.seed + len(self.messages)  # differs per turn
        [completion] = self.engine.submit(prompt, replace(self.cfg.sampling, seed=seed))
        current, seen, stopped = "text", 0, ""
        try:
            while completion.finish is None:
                self.engine.step()
                new, seen = completion.ids[seen:], len(completion.ids)
                for kind, text in (piece for token in new for piece in transcript.add(token)):
                    current = self.show(current, kind, text)
            for kind, text in transcript.close():
                current = self.show(current, kind, text)
        except KeyboardInterrupt:
            stopped = " (stopped)"
        finally:
            self.engine.cancel(completion)
        self.write(self.lines.end(), PART_STYLES[current])
        self.write(stopped, "dim")
        self.write("]\n" if current != "text" else "\n")
        self.lines.column = 0
        self.messages += [message, {"role": "assistant", "content": transcript.parts}]

    def show(self, before: str, kind: str, text: str) -> str:
        """Print a piece of text; tool calls and results are in brackets. Returns its kind."""
        if kind != before:
            self.write(self.lines.end(), PART_STYLES[before])
            self.write(self.lines.add("] " if kind == "text" else MARKS[kind]), "dim")
        self.write(self.lines.add(printable(text)), PART_STYLES[kind])
        return kind

    def write(self, text: str, style: str = "") -> None:
        """Print text; the style applies only in a terminal."""
        if self.console.is_terminal:
            self.console.print(text, style=style, end="", markup=False)
        else:
            self.console.file.write(text)
        self.console.file.flush()


class LineBreaker:
    """
    Wraps streamed text at `width` columns, between words; None = no wrapping. The last word is
    buffered until it is complete.
    """

    def __init__(self, width: int | None):
        self.width = width
        self.column, self.word = 0, ""

    def add(self, text: str) -> str:
        """Add text and return the part that can be printed now."""
        if self.width is None:
            return text
        out = ""
        for char in text:
            if not char.isspace():
                self.word += char
                if cell_len(char) > 1:  # East Asian text can break after any wide character
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
        """Return the buffered word, after a line break if it does not fit on the line."""
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
