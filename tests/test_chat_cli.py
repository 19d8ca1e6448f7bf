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
    """List of submitted prompts, decoded to text; every answer is empty."""
    found = []

    def submit(engine, prompt, settings):
        engine.check(prompt)
        found.append(engine.tokenizer.decode(prompt))
        return [Completion(prompt, settings, 0, finish="stop")]

    monkeypatch.setattr(Engine, "submit", submit)
    return found


@pytest.fixture
def typed(base, monkeypatch, command):
    """Function that runs chat_cli in a terminal with the given key presses."""

    def run(keys, *flags):
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        with create_pipe_input() as pipe:
            pipe.send_text(keys)
            with create_app_session(input=pipe, output=DummyOutput()):
                return command("chat_cli", *flags)

    return run


def piped(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


TURN = "<|user_start|>{}<|user_end|><|assistant_start|>"


def test_base_model_continues_text_without_chat_tokens(base, command, prompts, typed):
    write_model("base:tiny")
    command.works("chat_cli", "-i", "base", "-p", " Once upon")
    done = typed("a time \r/quit\r", "--source=base")
    assert done.status == 0 and "it continues your text" in done.text
    assert prompts == ["<|bos|> Once upon", "<|bos|>a time "]


def test_piped_text_is_one_question_and_keeps_its_whitespace(base, command, prompts, monkeypatch):
    write_model()
    piped(monkeypatch, "  def f():\n\treturn é\n\n".encode())
    assert command.works("chat_cli") == "\n"
    assert prompts == ["<|bos|>" + TURN.format("  def f():\n\treturn é\n")]
    for data, message in ((b" \n", "standard input is empty"), (b"\xff\xfe", "not UTF-8")):
        piped(monkeypatch, data)
        assert message in command.rejects("chat_cli")


@pytest.mark.parametrize("source", ["base", "sft"])
def test_prompt_longer_than_the_context_exits_with_2(base, command, capfd, monkeypatch, source):
    write_model(f"{source}:tiny", context=64)
    text = command.rejects("chat_cli", "-p", "x" * 64)
    assert "error: the prompt has 6" in text and "1 to 63" in text
    piped(monkeypatch, b"x" * 64)
    assert "1 to 63" in command.rejects("chat_cli")


def test_line_breaks_commands_and_system_prompt_work(base, typed, prompts):
    write_model()
    keys = "/system Be kind.\rone\x1b\rtwo\nthree\r/clear\r/system\rfour\r/usr/bin\r/what\r/help\r"
    done = typed(keys + "\x04", "--system=ignored")
    assert done.status == 0
    first, second, third = prompts
    assert first == "<|bos|>" + TURN.format("Be kind.\n\none\ntwo\nthree")
    assert second == "<|bos|>" + TURN.format("four")
    assert third.endswith(TURN.format("/usr/bin")) and "four" in third
    assert "unknown command /what" in done.text and "Alt-Enter" in done.text
    assert "/system" in done.text


def test_history_is_kept_for_the_next_session(base, typed, prompts):
    write_model()
    typed("remember me\r/quit\r")
    typed("\x1b[A\x1b[A\r/quit\r")  # the Up key, twice
    assert len(prompts) == 2 and prompts[0] == prompts[1]
    assert "+remember me" in (base / "chat_history").read_text()


def test_answer_stopped_by_ctrl_c_stays_in_the_conversation(base, typed, monkeypatch):
    write_model()
    prompts = []

    def step(engine):
        [completion] = engine.waiting
        if completion.ids:
            raise KeyboardInterrupt
        prompts.append(completion.prompt)
        completion.ids += engine.tokenizer.encode("as far as")

    monkeypatch.setattr(Engine, "step", step)
    done = typed("one\rtwo\r/quit\r")
    assert done.text.count("as far as (stopped)\n") == 2
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "as far as"},
        {"role": "user", "content": "two"},
    ]
    tokenizer = Tokenizer.read(next(base.rglob("tokenizer.json")))
    assert prompts[1] == render_prompt(tokenizer, messages)


def test_oversized_question_is_reported_and_not_kept(base, typed, prompts):
    write_model(context=64)
    done = typed("x" * 64 + "\rhi\r/quit\r")
    assert "use a shorter prompt" in done.text and prompts == ["<|bos|>" + TURN.format("hi")]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_break_between_words(size):
    text = "one two  three\nfour-five " + "x" * 25 + " 漢字漢字漢字 end"
    lines = LineBreaker(10)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    wrapped = "".join(map(lines.add, pieces)) + lines.end()
    assert wrapped == ("one two  \nthree\nfour-five \n" + "x" * 25 + " 漢字\n漢字漢字 \nend")
    plain = LineBreaker(None)
    assert "".join(map(plain.add, pieces)) + plain.end() == text
