"""Chat in the terminal: typed, piped and -p input, commands, and the display of answers."""

import io
import readline
import sys
from contextlib import suppress

import pytest

from nanochat.chat_format import render_prompt
from nanochat.engine import Completion, Engine
from nanochat.tokenizer import Tokenizer
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
    """Function that runs chat_cli in a terminal where these lines are typed, then Ctrl-D."""

    def run(lines, *flags):
        rest = iter(lines)

        def read(prompt):
            with suppress(StopIteration):
                return next(rest)
            raise EOFError

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", read)
        return command.works("chat_cli", *flags)

    return run


def pipe(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_base_model_continues_text_without_chat_tokens(command, prompts, typed):
    write_model("base:tiny")
    command.works("chat_cli", "-i", "base", "-p", " Once upon")
    assert "it continues your text" in typed(["a time ", "/quit", "never"], "--source=base")
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
    lines = ["/system Be kind.", "one\\", "two\\", "three", "/clear", "/system", "four", "/usr/bin"]
    shown = typed([*lines, "/what", "/help"], "--system=ignored")
    assert prompts[:2] == ["{Be kind.\n\none\ntwo\nthree}", "{four}"]
    assert prompts[2].startswith("{four}") and prompts[2].endswith("{/usr/bin}")
    for text in ("unknown command /what", "new line", "/system"):
        assert text in shown


def test_history_is_kept_and_too_long_questions_are_not(base, typed, prompts):
    write_model(context=64)
    readline.clear_history()
    readline.add_history("asked before")  # as `input` would
    assert "use a shorter prompt" in typed(["x" * 64, "remember me"])
    assert prompts == ["{remember me}"]
    assert "asked before" in (base / "chat_history").read_text()
    readline.clear_history()
    typed([])
    assert readline.get_history_item(1) == "asked before"


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
    assert typed(["one", "two"]).count("as far as (stopped)\n") == 2
    roles = {"one": "user", "as far as": "assistant", "two": "user"}
    messages = [{"role": role, "content": text} for text, role in roles.items()]
    assert prompts[1] == render_prompt(Tokenizer.train([], 265), messages)


def test_console_that_is_not_utf8_shows_what_it_can(command, monkeypatch):
    write_model()
    ids = iter([*Tokenizer.train([], 265).encode("caf\u00e9 \U0001f600"), 260])
    monkeypatch.setattr("nanochat.engine.sample", lambda *_: [next(ids)])
    console = io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1")
    monkeypatch.setattr(sys, "stdout", console)
    command.works("chat_cli", "-p", "?")
    assert console.buffer.getvalue().startswith(b"caf\xe9 ")  # type: ignore
