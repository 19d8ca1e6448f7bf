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

import re
import readline
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from nanochat.chat_format import Transcript, render_fitting
from nanochat.checkpoint import CheckpointChoice, load_inference
from nanochat.common import base_dir, printable
from nanochat.config import short, start
from nanochat.dist import DistConfig, init_dist
from nanochat.engine import Engine, Sampling, choose_engine_compile
from nanochat.sandbox import Tools

HELP = """\
/help            show this help
/system <text>   set the system prompt; without text, remove it
/clear           start a new conversation
/quit, Ctrl-D    quit
Enter            send; after a \\ at the end of a line: new line; Ctrl-C: stop an answer"""
COMMAND = re.compile(r"/[a-z]+(?=\s|$)")
COLORS = {"text": "", "python": "\033[36m", "python_output": "\033[32m"}  # in a terminal
PLAIN = "\033[0m"
MARKS = {"text": "] ", "python": "[", "python_output": " = "}


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
    dist: DistConfig = field(default_factory=DistConfig)


def main(cfg: ChatCli) -> None:
    if cfg.prompt is None and sys.stdin is None:
        raise ValueError("standard input is closed; pass the question with -p")
    prompt = cfg.prompt if cfg.prompt is not None or sys.stdin.isatty() else piped_text()
    dist = init_dist(cfg.dist, cfg.sampling.seed)
    source, checkpoint = cfg.find()
    model, tokenizer = load_inference(checkpoint, dist)
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)
    compiled = prompt is None and choose_engine_compile(dist.device)  # not for one question
    engine = Engine(model, tokenizer, slots=1, tool=tool, compiled=compiled)
    chat = Chat(engine, cfg, is_base=source == "base")
    if prompt is not None:
        return chat.ask(prompt)
    where = f"{source}, {checkpoint.folder.parent.name} step {checkpoint.step}"
    print(printable(f"{where}. /help lists commands, Ctrl-D quits."))
    if chat.is_base:
        print("This is a base model: it continues your text.")
    history = base_dir() / "chat_history"
    with suppress(OSError):  # none yet, or not readable
        readline.read_history_file(history)
    going = True
    while going:
        try:
            text = read_text()
            going = not text.strip() or chat.command(text)
        except KeyboardInterrupt:
            print()
        except EOFError:
            going = False
    with suppress(OSError):
        readline.write_history_file(history)


def read_text() -> str:
    """Read a line from the terminal; a line that ends in a backslash continues on the next one."""
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". "))
    return "\n".join(lines)


def piped_text() -> str:
    """Standard input without its final line break. Raises ValueError if empty or not UTF-8."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 ({error}); convert it to UTF-8") from error
    if not text.strip():
        raise ValueError("standard input is empty; pipe a question in, or pass it with -p")
    return text.removesuffix("\n").removesuffix("\r")


class Chat:
    """A conversation in the terminal. A base model continues each text instead."""

    def __init__(self, engine: Engine, cfg: ChatCli, is_base: bool = False):
        self.engine, self.cfg, self.is_base = engine, cfg, is_base
        self.system = cfg.system
        self.messages: list[dict[str, Any]] = []

    def command(self, text: str) -> bool:
        """Run a command or answer a question. Returns False to quit."""
        found = COMMAND.match(text)
        rest = text[found.end() :].strip() if found else ""
        match found[0] if found else None:
            case "/quit":
                return False
            case "/help":
                print(HELP)
            case "/clear":
                self.messages.clear()
            case "/system":
                self.system = rest
            case None:
                try:
                    self.ask(text)
                except (ValueError, RuntimeError, OSError) as error:  # or a tool that cannot start
                    print(printable(error))
            case unknown:
                print(f"unknown command {printable(unknown)}; try /help")
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
            for kind, text in transcript.close() if completion.finish == "stop" else ():
                current = self.show(current, kind, text)
            cut = completion.finish == "length" and not self.is_base and sys.stdout.isatty()
            stopped = " (reached the token limit)" if cut else ""
        except KeyboardInterrupt:
            stopped = " (stopped)"
        finally:
            self.engine.cancel(completion)
        self.write(stopped + ("]\n" if current != "text" else "\n"))
        self.messages += [message, {"role": "assistant", "content": transcript.parts}]

    def show(self, before: str, kind: str, text: str) -> str:
        """Print a piece of text; tool calls and results are in brackets. Returns its kind."""
        repeated = "][" if not text else ""  # another call, after one without a result
        self.write(MARKS[kind] if kind != before else repeated)
        self.write(printable(text), COLORS[kind])
        return kind

    def write(self, text: str, color: str = "") -> None:
        """Print text at once; the color applies only in a terminal."""
        colored = color and sys.stdout.isatty()
        print(f"{color}{text}{PLAIN}" if colored else text, end="", flush=True)


if __name__ == "__main__":
    start(main, ChatCli(), __doc__)
