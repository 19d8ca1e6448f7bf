"""Chat format: rendering, loss mask, and no special tokens from text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.chat_format import render, render_prompt
from nanochat.serve.transcript import render_fitting
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

TOKENIZER = Tokenizer.train(["what is it"], 265)
S = TOKENIZER.special


def shown(ids, mask):
    """Decode all ids, then only those with loss; special tokens show as names."""
    trained = [i for i, m in zip(ids, mask, strict=True) if m]
    return TOKENIZER.decode(ids), TOKENIZER.decode(trained)


def chat(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_B3_only_assistant_text_has_loss():
    whole, trained = shown(*render(TOKENIZER, chat("hi", "hello", "bye", "so long")))
    assert whole == (
        "<|bos|><|user_start|>hi<|user_end|><|assistant_start|>hello<|assistant_end|>"
        "<|user_start|>bye<|user_end|><|assistant_start|>so long<|assistant_end|>"
    )
    assert trained == "hello<|assistant_end|>so long<|assistant_end|>"


def test_tool_call_has_loss_and_its_output_does_not():
    parts = [
        {"type": "text", "text": "I count: "},
        {"type": "python", "text": "6*7"},
        {"type": "python_output", "text": "42"},
        {"type": "text", "text": "so 42"},
    ]
    whole, trained = shown(*render(TOKENIZER, [*chat("6*7?"), *chat("", parts)[1:]]))
    assert whole.endswith(
        "I count: <|python_start|>6*7<|python_end|><|output_start|>42<|output_end|>so 42"
        "<|assistant_end|>"
    )
    assert trained == "I count: <|python_start|>6*7<|python_end|>so 42<|assistant_end|>"


def test_system_message_precedes_first_user_message():
    messages = [{"role": "system", "content": "Be kind."}, *chat("hi", "hello")]
    assert "<|user_start|>Be kind.\n\nhi<|user_end|>" in shown(*render(TOKENIZER, messages))[0]


def test_V14_consecutive_messages_of_a_speaker_are_merged():
    late = [*chat("hi", "hello"), {"role": "system", "content": "Be kind."}, *chat("bye")]
    assert "<|user_start|>Be kind.\n\nbye<|user_end|>" in shown(*render(TOKENIZER, late))[0]
    answers = [*chat("hi", "one"), *chat("", [{"type": "python", "text": "1"}])[1:], *chat("", "")]
    whole, trained = shown(*render(TOKENIZER, [*chat("", "well?")[1:], *answers[:-2], *chat("ok")]))
    assert whole == (
        "<|bos|><|assistant_start|>well?<|assistant_end|><|user_start|>hi<|user_end|>"
        "<|assistant_start|>one\n\n<|python_start|>1<|python_end|><|assistant_end|>"
        "<|user_start|>ok<|user_end|>"
    )
    assert trained == (
        "well?<|assistant_end|>one\n\n<|python_start|>1<|python_end|><|assistant_end|>"
    )
    only = [{"role": "system", "content": "Be kind."}]
    assert TOKENIZER.decode(render_prompt(TOKENIZER, only)) == (
        "<|bos|><|user_start|>Be kind.<|user_end|><|assistant_start|>"
    )


def test_consecutive_text_parts_are_concatenated():
    cut = [{"type": "text", "text": text} for text in ("wh", "", "at is", " it")]
    for messages in (chat("hi", cut), chat(cut, "hi")):
        joined = [{**m, "content": "what is it" if m["content"] == cut else "hi"} for m in messages]
        assert render(TOKENIZER, messages) == render(TOKENIZER, joined)


def test_final_assistant_message_can_be_continued():
    ids = render_prompt(TOKENIZER, chat("hi", "hello"), continue_last=True)
    assert TOKENIZER.decode(ids) == "<|bos|><|user_start|>hi<|user_end|><|assistant_start|>hello"
    for continue_last in (False, True):
        asked = render_prompt(TOKENIZER, chat("hi"), continue_last)
        assert asked == render_prompt(TOKENIZER, chat("hi", ""), continue_last)


def test_prompt_ends_with_assistant_start():
    expected = "<|bos|><|user_start|>hi<|user_end|><|assistant_start|>"
    assert TOKENIZER.decode(render_prompt(TOKENIZER, chat("hi"))) == expected
    assert TOKENIZER.decode(render_prompt(TOKENIZER, chat("hi", "hello"))) == expected


def test_V5_long_conversation_drops_its_oldest_turns():
    system = [{"role": "system", "content": "Be kind."}]
    talk = chat("one", "two", "three", "four", "five")
    whole = render_prompt(TOKENIZER, [*system, *talk])
    last = len(render_prompt(TOKENIZER, [*system, talk[-1]]))
    for most in range(len(whole) + 2):
        prompt = render_fitting(TOKENIZER, [*system, *talk], most)
        kept = [render_prompt(TOKENIZER, [*system, *talk[first:]]) for first in (0, 2, 4)]
        assert prompt == next((k for k in kept if len(k) <= most), kept[-1])
        assert len(prompt) <= max(most, last)
    for messages in (talk[:4], talk[1:], system, [*system, *system, *talk[1:4]]):  # any order
        whole = render_prompt(TOKENIZER, messages, continue_last=True)
        assert render_fitting(TOKENIZER, messages, 999) == whole
    assert render_fitting(TOKENIZER, talk[:4], 5) == render_fitting(TOKENIZER, talk[2:4], 999)
    with pytest.raises(ValueError, match="message 6"):
        render_fitting(TOKENIZER, [*system, *talk, {"role": "tool", "content": "x"}], 5)
    many = chat(*["word " * 9] * 4001)
    assert len(render_fitting(TOKENIZER, many, 200)) <= 200  # fast even for many turns


def test_max_tokens_truncates_conversation():
    ids, mask = render(TOKENIZER, chat("hi", "hello"), max_tokens=7)
    assert len(ids) == len(mask) == 7


@given(st.lists(st.text() | st.sampled_from(SPECIAL_TOKENS), min_size=2, max_size=6))
def test_P5_V12_text_never_becomes_a_special_token(texts):
    texts = [text.encode(errors="replace").decode() for text in texts]
    ids, _ = render(TOKENIZER, chat(*texts))
    structure = [i for i in ids if i >= S("<|bos|>")]
    turns = [
        token
        for i in range(len(texts))
        for token in (S(f"<|{('user', 'assistant')[i % 2]}_{edge}|>") for edge in ("start", "end"))
    ]
    assert structure == [TOKENIZER.bos_id, *turns]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one"),
        ([{"role": "tool", "content": "x"}], "'tool'"),
        ([{"role": ["user"], "content": "x"}], "role"),
        ([{"role": "user", "content": 3}], "message 0"),
        (
            [{"role": "user", "content": [{"type": "python", "text": "x"}]}],
            "message 0.*user parts are text",
        ),
        (chat("a", [{"type": "image", "text": "x"}]), "image"),
        (chat("a", [{"type": "text"}]), "message 1"),
    ],
)
def test_invalid_conversation_is_rejected(messages, complaint):
    with pytest.raises(ValueError, match=complaint):
        render(TOKENIZER, messages)
