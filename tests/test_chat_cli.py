"""Chat in the terminal: typed, piped and -p input, commands, and the display of answers."""

import io
import sys

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from nanochat.chat_format import render_prompt
from nanochat.engine import Completion, Engine
from nanochat.tokenizer import Tokenizer
from scripts.chat_cli import LineBreaker
from tests.web_server import write_model


@pytest.fixture
def prompts(monkeypatch):
    """List of submitted prompts, with `{}` around user turns; every answer is empty."""
    found = []

    def submit(engine, prompt, settings):
        engine.check(prompt)
        text = engine.tokenizer.decode(prompt).removeprefix("<|bos|>")
        for name, letter in (("<|user_start|>", "{"), ("<|user_end|><|assistant_start|>", "}")):
            text = text.replace(name, letter)
        found.append(text)
        return [Completion(prompt, settings, 0, finish="stop")]

    monkeypatch.setattr(Engine, "submit", submit)
    return found


@pytest.fixture
def typed(monkeypatch, command):
    """Function that runs chat_cli in a terminal with the given key presses."""

    def run(keys, *flags):
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        with create_pipe_input() as pipe:
            pipe.send_text(keys)
            with create_app_session(input=pipe, output=DummyOutput()):
                return command.works("chat_cli", *flags)

    return run


def pipe(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_base_model_continues_text_without_chat_tokens(command, prompts, typed):
    write_model("base:tiny")
    command.works("chat_cli", "-i", "base", "-p", " Once upon")
    assert "it continues your text" in typed("a time \r/quit\r", "--source=base")
    assert prompts == [" Once upon", "a time "]


def test_piped_text_is_one_question_and_keeps_its_whitespace(command, prompts, monkeypatch):
    write_model(context=64)
    pipe(monkeypatch, "  def f():\n\treturn \u00e9\n\n".encode())
    assert command.works("chat_cli") == "\n"
    assert prompts == ["{  def f():\n\treturn \u00e9\n}"]
    wrong = {b" \n": "standard input is empty", b"\xff\xfe": "not UTF-8", b"x" * 64: "1 to 63"}
    for data, message in wrong.items():
        pipe(monkeypatch, data)
        assert message in command.rejects("chat_cli")


def test_commands_line_breaks_and_system_prompt_work(typed, prompts):
    write_model()
    keys = "/system Be kind.\rone\x1b\rtwo\nthree\r/clear\r/system\rfour\r/usr/bin\r/what\r/help\r"
    shown = typed(keys + "\x04", "--system=ignored")
    assert prompts[:2] == ["{Be kind.\n\none\ntwo\nthree}", "{four}"]
    assert prompts[2].startswith("{four}") and prompts[2].endswith("{/usr/bin}")
    for text in ("unknown command /what", "Alt-Enter", "/system"):
        assert text in shown


def test_history_is_kept_and_too_long_questions_are_not(base, typed, prompts):
    write_model(context=64)
    assert "use a shorter prompt" in typed("x" * 64 + "\rremember me\r/quit\r")
    typed("\x1b[A\x1b[A\r/quit\r")  # the Up key, twice
    assert prompts == ["{remember me}"] * 2
    assert "+remember me" in (base / "chat_history").read_text()


def test_answer_stopped_by_ctrl_c_stays_in_the_conversation(typed, monkeypatch):
    write_model()
    prompts = []

    def step(engine):
        [completion] = engine.waiting
        if completion.ids:
            raise KeyboardInterrupt
        prompts.append(completion.prompt)
        completion.ids += engine.tokenizer.encode("as far as")

    monkeypatch.setattr(Engine, "step", step)
    assert typed("one\rtwo\r/quit\r").count("as far as (stopped)\n") == 2
    roles = {"one": "user", "as far as": "assistant", "two": "user"}
    messages = [{"role": role, "content": text} for text, role in roles.items()]
    assert prompts[1] == render_prompt(Tokenizer.train([], 265), messages)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_break_between_words(size):
    text = "one two  three\nfour-five " + "x" * 25 + " \u6f22\u5b57\u6f22\u5b57 \tend"
    lines = LineBreaker(10)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    wrapped = "".join(map(lines.add, pieces)) + lines.end()
    long = "x" * 25
    assert wrapped == f"one two  \nthree\nfour-five \n{long} \u6f22\u5b57\n\u6f22\u5b57 \t\nend"


def test_console_that_is_not_utf8_shows_what_it_can(command, monkeypatch):
    write_model()
    ids = iter([*Tokenizer.train([], 265).encode("caf\u00e9 \U0001f600"), 260])
    monkeypatch.setattr("nanochat.engine.sample", lambda *_: [next(ids)])
    console = io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1")
    monkeypatch.setattr(sys, "stdout", console)
    command.works("chat_cli", "-p", "?")
    assert console.buffer.getvalue().startswith(b"caf\xe9 ")  # type: ignore
