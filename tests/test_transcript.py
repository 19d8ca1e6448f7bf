"""Display of answers during generation."""

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nanochat.chat_format import render
from nanochat.common import REPOSITORY, printable
from nanochat.distributed import DistContext
from nanochat.logger import RunLog
from nanochat.serve.transcript import Transcript
from nanochat.tokenizer import Tokenizer
from scripts.chat_cli import Chat, ChatCli

TOKENIZER = Tokenizer.train(["what is it"], 265)  # bytes only: all non-ASCII characters are split
PARTS = [
    {"type": "text", "text": "h\u00f6 "},
    {"type": "python", "text": "6*7"},
    {"type": "python_output", "text": "42"},
    {"type": "text", "text": " \U0001f600"},
]


def test_transcript_restores_the_rendered_parts():
    question = {"role": "user", "content": "?"}
    ids, _ = render(TOKENIZER, [question, {"role": "assistant", "content": PARTS}])
    start = ids.index(TOKENIZER.special("<|assistant_start|>")) + 1
    transcript = Transcript(TOKENIZER)
    shown = [piece for token in ids[start:-1] for piece in transcript.add(token)]
    assert transcript.close() == []
    assert transcript.parts == PARTS
    assert "".join(text for kind, text in shown if kind == "python") == "6*7"


@given(st.text())
def test_V8_characters_are_never_shown_partially(text):
    text = text.encode(errors="replace").decode()
    transcript = Transcript(TOKENIZER)
    shown = [piece for token in TOKENIZER.encode(text) for piece in transcript.add(token)]
    assert "".join(piece for _, piece in shown) == text
    assert "".join(part["text"] for part in transcript.parts) == text


def test_incomplete_bytes_end_as_a_replacement_character():
    transcript = Transcript(TOKENIZER)
    assert transcript.add("\u00f6".encode()[0]) == []
    assert transcript.close() == [("text", "\ufffd")]


# ------------------------------------------------------------------------------------------------
# S13: terminals

HOSTILE = "a\x1b[2J\x1b]0;title\x07\r\x08b\x9b31m\u202etxt.exe\u2066\u200b\ufeff[/red]\x00"
SHOWN = r"a\x1b[2J\x1b]0;title\x07\r\x08b\x9b31m\u202etxt.exe\u2066\u200b\ufeff[/red]\x00"
LEGITIMATE = (
    "a[1:100:5] :x: [b]",  # neither emoji nor markup
    "two lines\n\tand a tab",
    "\ud55c\uad6d\uc5b4 \u05e9\u05dc\u05d5\u05dd \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001f44d\U0001f3fd na\u00efve",
)


def test_S13_control_characters_are_printed_as_escapes():
    assert printable(HOSTILE) == SHOWN
    assert printable("\ud800 \x85 \u2028") == r"\ud800 \x85 \u2028"


@pytest.mark.parametrize("text", LEGITIMATE)
def test_S13_legitimate_text_is_printed_unchanged(text):
    assert printable(text) == text


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(("said", "shown"), [(HOSTILE, SHOWN), *((t, t) for t in LEGITIMATE)])
def test_S13_chat_escapes_control_characters_in_answers(terminal, said, shown):
    out = io.StringIO()
    answer = SimpleNamespace(finish=None, ids=[])

    def step():
        answer.ids, answer.finish = TOKENIZER.encode(said), "stop"

    engine = SimpleNamespace(
        tokenizer=TOKENIZER,
        cache=SimpleNamespace(capacity=100),
        submit=lambda prompt, sampling: [answer],
        step=step,
        cancel=lambda completion: None,
    )
    console = Console(
        file=out, force_terminal=terminal, highlight=False, soft_wrap=True, emoji=False
    )
    Chat(engine, ChatCli(), console).ask("?")  # type: ignore
    assert out.getvalue() == (shown.replace("\t", "        ") if terminal else shown) + "\n"


def test_S13_errors_and_tracebacks_escape_names(tmp_path, command):
    folder = str(tmp_path / "\x1b[2J\u202e")
    text = command.rejects("report", f"--report_dir={folder}")
    assert r"\x1b[2J\u202e" in text and "\x1b" not in text
    code = (
        "from nanochat.config import start; from scripts.report import Report; import sys\n"
        "def main(cfg): raise ValueError(cfg.report_dir)\n"
        "start(main, Report(), 'A script.')"
    )
    words = [sys.executable, "-c", code, f"--report_dir={folder}"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8")
    assert "Traceback" in done.stderr and r"\x1b[2J\u202e" in done.stderr
    assert "\x1b" not in done.stderr and "\u202e" not in done.stderr


def test_S13_logs_escape_values_and_names(tmp_path, capsys):
    with RunLog(tmp_path) as log:
        log.log(0, {"note": HOSTILE})
    out = capsys.readouterr().out
    assert SHOWN in out and "\x1b" not in out
    DistContext(0, 0, 1, torch.device("cpu"), torch.float32).print0("resumed", HOSTILE)
    assert capsys.readouterr().out == f"resumed {SHOWN}\n"
