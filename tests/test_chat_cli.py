"""Chat in the terminal: typed, piped and -p input, commands; text on terminals."""

import io
import readline
import sys

import pytest

from nanochat.chat_format import render_prompt
from nanochat.common import printable
from nanochat.engine import Completion, Engine
from nanochat.records import RunLog
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
        terminal = io.StringIO("".join(f"{line}\n" for line in lines))
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", terminal)
        return command.works("chat_cli", *flags)

    return run


def pipe(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_base_model_continues_text_without_chat_tokens(command, prompts, typed):
    write_model("base:tiny")
    write_model("sft:other")
    command.works("chat_cli", "-g", "tiny", "-p", " Once upon")
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


# ---- Text on terminals ---------------------------------------------------------------------------

TOKENIZER = Tokenizer.train(["what is it"], 265)  # bytes only: all non-ASCII characters are split
HOSTILE = (
    "a\x1b[2J\x1b]0;title\x07\r\x08b\x9b31m\u202etxt.exe\u2066\u200b\ufeff[/red]\x00\x85\u2028"
)
SHOWN = r"a\x1b[2J\x1b]0;title\x07\r\x08b\x9b31m\u202etxt.exe\u2066\u200b\ufeff[/red]\x00\x85\u2028"
LEGITIMATE = (
    "a[1:100:5] :x: [b]",  # neither emoji nor markup
    "two lines\n\tand a tab",
    "\ud55c\uad6d\uc5b4 \u05e9\u05dc\u05d5\u05dd \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001f44d\U0001f3fd na\u00efve",
)
EXPECTED = {HOSTILE: SHOWN, **{text: text for text in LEGITIMATE}}


def test_S13_answer_on_a_terminal_is_shown_literally(command, monkeypatch):
    said, shown = ("\n".join(texts) for texts in (EXPECTED, EXPECTED.values()))
    write_model(context=1024)
    ids = iter([*TOKENIZER.encode(said), TOKENIZER.special("<|assistant_end|>")])
    monkeypatch.setattr("nanochat.engine.sample", lambda *_: [next(ids)])
    assert command.works("chat_cli", "--max_new_tokens=999", "-p", "?") == f"{shown}\n"


def test_S13_errors_tracebacks_and_logs_escape_text(tmp_path, command, capfd):
    assert {text: printable(text) for text in EXPECTED} == EXPECTED
    assert printable("\ud800") == r"\ud800"
    name = "\x1b[2J\u202e"
    text = command.rejects("tok_train", f"--dataset={tmp_path / name}")
    assert r"\x1b[2J\u202e" in text and "\x1b" not in text
    sys.excepthook(LookupError, LookupError(HOSTILE), None)  # set when a script starts
    assert capfd.readouterr().err == f"LookupError: {SHOWN}\n"
    with RunLog(tmp_path) as log:
        log.log(0, {"note": HOSTILE})
    assert capfd.readouterr().out == f"step     0 | note {SHOWN}\n"
