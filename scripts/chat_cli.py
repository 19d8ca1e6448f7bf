"""
Talk to a model in the terminal.

    python -m scripts.chat_cli                             # the last stage there is
    python -m scripts.chat_cli -i sft -p "Where does Mira live?"    # one question, one answer

An answer appears as it is written; Ctrl-C stops it, and only it. /clear begins a new conversation,
/quit or Ctrl-D ends the program.

Reads   the checkpoint of a stage (base, mid, sft, rl)
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from rich.console import Console

from nanochat.chat_format import render_fitting
from nanochat.checkpoint import Checkpoint, find_checkpoint, load_model, newest_stage
from nanochat.common import printable
from nanochat.config import short, start
from nanochat.engine import Engine
from nanochat.gpt import for_inference
from nanochat.kernels import choose_fused_engine
from nanochat.machine import MachineConfig, init_machine
from nanochat.sampling import Sampling
from nanochat.tokenizer import Tokenizer
from nanochat.tools import Tools
from nanochat.transcript import Transcript

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
    prompt: str = short("p", "")
    """Ask this, print the answer and end."""
    temperature: float = short("t", 0.6)
    """How freely the model speaks; 0 always takes the likeliest token."""
    top_k: int | None = short("k", 50)
    """Only among so many of the likeliest tokens. Default: all."""
    top_p: float = 1.0
    """Only among the likeliest tokens that together reach this probability."""
    max_new_tokens: int = short("m", 256)
    """Longest answer, in tokens."""
    seed: int = 0
    """Of what is left to chance."""
    python: bool = False
    """Run python that the model calls, in the sandbox; without it, it only has a calculator."""
    unsafe_exec: bool = False
    """Run what the model wrote with all your rights where this machine has no sandbox."""
    compile_engine: bool | None = None
    """Fuse the step that writes a token: faster answers, a slower start. Default: on a GPU,
    for more than one question."""
    machine: MachineConfig = field(default_factory=MachineConfig)


def main(cfg: ChatCli) -> None:
    machine = init_machine(cfg.machine, cfg.seed)
    console = Console(highlight=False, soft_wrap=True)
    source = cfg.source or newest_stage()
    checkpoint = find_checkpoint(source, cfg.model_tag, cfg.step)
    tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
    model = for_inference(load_model(checkpoint, machine))
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)
    wanted = False if cfg.prompt and cfg.compile_engine is None else cfg.compile_engine
    fused = choose_fused_engine(wanted, machine, most_tokens=0)
    engine = Engine(model, tokenizer, slots=1, tool=tool, compiled=fused)
    chat = Chat(engine, cfg, console)
    if cfg.prompt:
        chat.ask(cfg.prompt)
        return
    opened = printable(f"{source}, {name(checkpoint)}")
    console.print(f"{opened}. /clear begins anew, /quit ends, Ctrl-C stops.", markup=False)
    session: PromptSession = PromptSession("> ", history=InMemoryHistory())
    while True:
        try:
            question = session.prompt().strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if question == "/quit":
            return
        if question == "/clear":
            chat.messages.clear()
        elif question:
            chat.ask(question)


def name(checkpoint: Checkpoint) -> str:
    """Tag and step."""
    return f"{checkpoint.folder.parent.name} step {checkpoint.step}"


class Chat:
    """A conversation, and how its answers are shown."""

    def __init__(self, engine: Engine, cfg: ChatCli, console: Console):
        self.engine, self.cfg, self.console = engine, cfg, console
        self.messages: list[dict[str, Any]] = []

    def ask(self, question: str) -> None:
        """
        Print the answer as it comes; Ctrl-C ends it, what was said stays in the conversation. Of a
        long conversation the oldest turns are forgotten.
        """
        self.messages.append({"role": "user", "content": question})
        tokenizer, capacity = self.engine.tokenizer, self.engine.cache.capacity
        prompt = render_fitting(tokenizer, self.messages, capacity * 3 // 4)
        if len(prompt) >= capacity:
            self.messages.pop()
            self.console.print(f"(too long: the model's context has {capacity} tokens)")
            return
        transcript = Transcript(tokenizer)
        stream = self.engine.stream(prompt, self.sampling())
        shown = "text"
        try:
            for token in stream:
                for kind, text in transcript.add(token):
                    shown = self.show(shown, kind, text)
            for kind, text in transcript.close():
                shown = self.show(shown, kind, text)
        except KeyboardInterrupt:
            self.console.print(" (stopped)", style="dim", end="")
        finally:
            stream.close()
        self.console.print("]" if shown != "text" else "")
        self.messages.append({"role": "assistant", "content": transcript.parts})

    def show(self, before: str, kind: str, text: str) -> str:
        """Print a piece; a call of the tool and its answer stand in brackets. Returns its kind."""
        if kind != before:
            opening = "] " if kind == "text" else MARKS[kind]
            self.console.print(opening, style="dim", end="", markup=False)
        self.console.print(printable(text), style=STYLES[kind], end="", markup=False)
        self.console.file.flush()
        return kind

    def sampling(self) -> Sampling:
        """The settings; every turn draws other numbers."""
        cfg = self.cfg
        seed = cfg.seed + len(self.messages)
        return Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, seed=seed)


if __name__ == "__main__":
    start(main, ChatCli(), __doc__)
