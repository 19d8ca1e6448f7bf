"""Generated input: any conversation renders as its turns, or is rejected."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.chat_format import render, render_prompt
from nanochat.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["a small text, ein kurzer Text, \u6c49\u5b57"], 280)
simple = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = simple | st.lists(simple, max_size=4) | st.dictionaries(st.text(max_size=9), simple)
texts = st.text(max_size=30) | st.sampled_from(["<|bos|>", "<|assistant_start|>", "\ud800", "\0"])
kinds = st.sampled_from(["text", "python", "python_output", "image"])
parts = st.lists(st.fixed_dictionaries({"type": kinds, "text": texts}) | values, max_size=3)
roles = st.sampled_from(["user", "assistant", "system", "tool"])
messages = st.fixed_dictionaries({"role": roles | values, "content": texts | parts | values})
plausible = st.lists(texts | parts, max_size=6).map(
    lambda said: [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(said)]
)


@given(plausible | st.lists(messages | values, max_size=5) | values)
@settings(max_examples=200, derandomize=True)
def test_V12_any_conversation_renders_as_its_turns_or_raises(conversation):
    try:
        ids, mask = render(TOKENIZER, conversation)
    except ValueError:
        return
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    assert ids[0] == TOKENIZER.bos_id not in ids[1:]
    starts = [TOKENIZER.special(f"<|{who}_start|>") for who in ("user", "assistant")]
    answers = [message["role"] == "assistant" for message in conversation]
    turns = [each for i, each in enumerate(answers) if i == 0 or each != answers[i - 1]]
    assert [i for i in ids if i in starts] == [starts[each] for each in turns]
    render_prompt(TOKENIZER, conversation)
