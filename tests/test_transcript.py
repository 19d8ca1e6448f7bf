"""What a reader is shown while a model speaks."""

from hypothesis import given
from hypothesis import strategies as st

from nanochat.chat_format import render
from nanochat.tokenizer import Tokenizer
from nanochat.transcript import Transcript

TOKENIZER = Tokenizer.train(["what is it"], 265)  # bytes: every other character is split
PARTS = [
    {"type": "text", "text": "h\u00f6 "},
    {"type": "python", "text": "6*7"},
    {"type": "python_output", "text": "42"},
    {"type": "text", "text": " \U0001f600"},
]


def test_parts_come_back_as_they_were_rendered():
    question = {"role": "user", "content": "?"}
    ids, _ = render(TOKENIZER, [question, {"role": "assistant", "content": PARTS}])
    start = ids.index(TOKENIZER.special("<|assistant_start|>")) + 1
    transcript = Transcript(TOKENIZER)
    shown = [piece for token in ids[start:-1] for piece in transcript.add(token)]
    assert transcript.close() == []
    assert transcript.parts == PARTS
    assert transcript.text == "h\u00f6  \U0001f600"
    assert "".join(text for kind, text in shown if kind == "python") == "6*7"


@given(st.text())
def test_V8_a_character_is_shown_whole_or_not_at_all(text):
    text = text.encode(errors="replace").decode()
    transcript = Transcript(TOKENIZER)
    shown = [piece for token in TOKENIZER.encode(text) for piece in transcript.add(token)]
    assert "".join(piece for _, piece in shown) == text
    assert ("\ufffd" in transcript.text) == ("\ufffd" in text)


def test_bytes_that_are_no_character_are_shown_as_such_at_the_end():
    transcript = Transcript(TOKENIZER)
    assert transcript.add("\u00f6".encode()[0]) == []
    assert transcript.close() == [("text", "\ufffd")]
