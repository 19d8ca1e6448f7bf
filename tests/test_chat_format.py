"""Chat format: rendering, loss mask, truncation, and no special tokens from text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.chat_format import render, render_fitting, render_prompt
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

TOKENIZER = Tokenizer.train(["what is it"], 265)
LETTERS = "^[]{}<>()"  # how the tests show the special tokens: bos, user, assistant, python, output
SYSTEM = {"role": "system", "content": "Be kind."}
CALL = [{"type": "python", "text": "6*7"}, {"type": "python_output", "text": "42"}]


def decode(ids):
    return "".join(
        TOKENIZER.decode([i]) if i < TOKENIZER.bos_id else LETTERS[i - TOKENIZER.bos_id]
        for i in ids
    )


def shown(messages, trained="assistant"):
    """All ids as text, then only those with loss."""
    ids, mask = render(TOKENIZER, messages, trained=trained)
    return decode(ids), decode(i for i, m in zip(ids, mask, strict=True) if m)


def chat(*texts, first="user"):
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_B3_only_assistant_text_and_its_end_have_loss():
    answer = [*parts("I count: "), *CALL, *parts("so ", "42")]
    messages = [SYSTEM, *chat("hi", "hello", parts("6*", "7?"), answer)]
    assert shown(messages) == (
        "^[Be kind.\n\nhi]{hello}[6*7?]{I count: <6*7>(42)so 42}",
        "hello}I count: <6*7>so 42}",
    )
    ids, mask = render(TOKENIZER, messages, max_tokens=7)
    assert len(ids) == len(mask) == 7
    trained = {who: shown(messages, who)[1] for who in ("user", "all")}
    assert trained["user"] == "Be kind.\n\nhi]6*7?]"
    assert trained["all"] == "Be kind.\n\nhi]hello}6*7?]I count: <6*7>so 42}"


def test_V14_messages_of_one_speaker_in_any_order_are_merged():
    more = chat(CALL[:1], "bye", first="assistant")
    messages = [*chat("well?", "hi", "one", first="assistant"), *more[:1], SYSTEM, *more[1:]]
    assert shown(messages) == ("^{well?}[hi]{one\n\n<6*7>}[Be kind.\n\nbye]", "well?}one\n\n<6*7>}")


@pytest.mark.parametrize(
    ("messages", "prompt", "continued"),
    [
        (chat("hi", ""), "^[hi]{", "^[hi]{"),
        (chat("hi", "hello"), "^[hi]{", "^[hi]{hello"),
        ([SYSTEM], "^[Be kind.]{", "^[Be kind.]{"),
        (
            [{**SYSTEM, "role": "developer"}, *chat("a", "b")],
            "^[Be kind.\n\na]{",
            "^[Be kind.\n\na]{b",
        ),
        (chat("well?", first="assistant"), "^{well?}{", "^{well?"),
    ],
)
def test_prompt_ends_where_the_assistant_goes_on(messages, prompt, continued):
    assert decode(render_prompt(TOKENIZER, messages)) == prompt
    assert decode(render_prompt(TOKENIZER, messages, continue_last=True)) == continued


def test_V5_long_conversation_drops_its_oldest_turns():
    talk = chat("one", "two", "three", "four", "five")
    fits = ["^[Be kind.\n\none]{two}[three]{four}[five]{", "^[Be kind.\n\nthree]{four}[five]{"]
    last = "^[Be kind.\n\nfive]{"
    for most in range(len(fits[0]) + 2):
        for system in (SYSTEM, {**SYSTEM, "role": "developer"}):
            prompt = decode(render_fitting(TOKENIZER, [system, *talk], most))
            assert prompt == next((text for text in fits if len(text) <= most), last)
    for messages in (talk[:4], talk[1:], [SYSTEM], [SYSTEM, SYSTEM, *talk[1:4]]):  # any order
        whole = render_prompt(TOKENIZER, messages, continue_last=True)
        assert render_fitting(TOKENIZER, messages, 999) == whole
    assert decode(render_fitting(TOKENIZER, talk[:4], 5)) == "^[three]{four"


@given(st.lists(st.text() | st.sampled_from(SPECIAL_TOKENS), min_size=2, max_size=6))
def test_P5_V12_text_never_becomes_a_special_token(texts):
    texts = [text.encode(errors="replace").decode() for text in texts]
    structure = [i for i in render(TOKENIZER, chat(*texts))[0] if i >= TOKENIZER.bos_id]
    assert decode(structure) == "^" + "".join(("[]", "{}")[i % 2] for i in range(len(texts)))


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one"),
        ("hi", "list of messages"),
        ([{"role": "tool", "content": "x"}], "'tool'"),
        (chat(3), "message 0"),
        (chat("\ud800"), "surrogates"),
        (chat(CALL), "message 0.*user parts are text"),
        (chat("a", [{"type": "text"}]), "message 1"),
    ],
)
def test_invalid_conversation_is_rejected(messages, complaint):
    with pytest.raises(ValueError, match=complaint):
        render(TOKENIZER, messages)
