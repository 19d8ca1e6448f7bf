"""Text of models and users on terminals: whole characters, no control characters."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from nanochat.chat_format import Transcript, render
from nanochat.common import printable
from nanochat.logger import RunLog
from nanochat.tokenizer import Tokenizer
from tests.web_server import write_model

TOKENIZER = Tokenizer.train(["what is it"], 265)  # bytes only: all non-ASCII characters are split
PARTS = [
    {"type": "text", "text": "h\u00f6 "},
    {"type": "python", "text": "6*7"},
    {"type": "python_output", "text": "42"},
    {"type": "text", "text": " \U0001f600"},
]
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


def test_transcript_restores_the_rendered_parts():
    question, start = {"role": "user", "content": "?"}, TOKENIZER.special("<|assistant_start|>")
    ids, _ = render(TOKENIZER, [question, {"role": "assistant", "content": PARTS}])
    transcript = Transcript(TOKENIZER)
    shown = [piece for token in ids[ids.index(start) + 1 : -1] for piece in transcript.add(token)]
    assert transcript.close() == [] and transcript.parts == PARTS
    assert "".join(text for kind, text in shown if kind == "python") == "6*7"


@given(st.text())
def test_V8_characters_are_never_shown_partially(text):
    text = text.encode(errors="replace").decode()
    transcript = Transcript(TOKENIZER)
    shown = [piece for token in TOKENIZER.encode(text) for piece in transcript.add(token)]
    assert "".join(piece for _, piece in shown) == text
    assert transcript.add("\u00f6".encode()[0]) == []
    assert transcript.close() == [("text", "\ufffd")]
    assert "".join(part["text"] for part in transcript.parts) == f"{text}\ufffd"


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
    text = command.rejects("report", f"--report_dir={tmp_path / name}")
    assert r"\x1b[2J\u202e" in text and "\x1b" not in text
    sys.excepthook(LookupError, LookupError(HOSTILE), None)  # set when a script starts
    assert capfd.readouterr().err == f"LookupError: {SHOWN}\n"
    with RunLog(tmp_path) as log:
        log.log(0, {"note": HOSTILE})
    assert capfd.readouterr().out == f"step     0 | note {SHOWN}\n"
