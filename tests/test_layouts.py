"""Conversations and preference pairs in the forms in which people keep them, and near misses."""

import json

import pytest

from nanochat.chat_format import render
from nanochat.tokenizer import Tokenizer
from scripts.chat_dpo import Preferences
from scripts.lab.filter import read_rows
from tasks.base import assistant, user
from tasks.buckets import buckets
from tasks.chats import JSONL

TOKENIZER = Tokenizer.train(["Hi there, yes and no."], 265)
HI = [user("Hi"), assistant("Yes.")]
SYSTEM = {"role": "system", "content": "Be brief."}
LONGER = [*HI, user("And?"), assistant("No.")]
SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]
FORMS = {  # row -> conversation
    "messages": ({"messages": HI, "id": 7}, HI),
    "a list of messages": (HI, HI),
    "conversations": ({"conversations": SHARED}, HI),
    "other names of the roles": (
        {"conversations": [{**SHARED[0], "from": "user"}, {**SHARED[1], "from": "chatgpt"}]},
        HI,
    ),
    "a system message": (
        {"conversations": [{"from": "system", "value": "Be brief."}, *SHARED]},
        [SYSTEM, *HI],
    ),
    "a field of the system message": ({"system": "Be brief.", "messages": HI}, [SYSTEM, *HI]),
    "an empty system message": ({"system": " ", "conversations": SHARED}, HI),
    "Alpaca": ({"instruction": "Hi", "input": "", "output": "Yes."}, HI),
    "Alpaca with an input": (
        {"instruction": "Add.", "input": "2 and 3", "output": "5", "text": "Below is"},
        [user("Add.\n\n2 and 3"), assistant("5")],
    ),
    "Dolly": (
        {"instruction": "Who?", "context": "Ann came.", "response": "Ann.", "category": "qa"},
        [user("Who?\n\nAnn came."), assistant("Ann.")],
    ),
    "a system prompt": (
        {"system_prompt": "Be brief.", "question": "Hi", "response": "Yes."},
        [SYSTEM, *HI],
    ),
    "prompt and completion": ({"prompt": "Hi", "completion": "Yes."}, HI),
    "prompt and response": ({"prompt": "Hi", "response": "Yes."}, HI),
    "question and answer": ({"question": "Hi", "answer": "Yes."}, HI),
    "messages before the answer": ({"prompt": LONGER[:3], "completion": LONGER[3:]}, LONGER),
    "messages without a value": ({"messages": None, "prompt": "Hi", "response": "Yes."}, HI),
}
ALL = "".join(json.dumps(row) + "\n" for row, _ in FORMS.values())


def rendered(messages):
    return render(TOKENIZER, messages)


def items(path, task=JSONL) -> list:
    return task("train", str(path)).items + task("val", str(path)).items


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_conversation_is_read(tmp_path, form):
    row, wanted = FORMS[form]
    other = {"messages": [user("Bye"), assistant("Bye.")]}
    path = tmp_path / "own.jsonl"
    path.write_text(f"{json.dumps(row)}\n\n{json.dumps(other)}\n")
    found = [rendered(each) for each in items(path)]
    assert len(found) == 2 and rendered(wanted) in found
    [filtered, _] = read_rows(str(path))
    assert rendered(filtered["messages"]) == rendered(wanted)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["own.json", "own.jsonl", "own"])
def test_array_of_conversations_on_one_line_or_several(tmp_path, indent, name):
    path = tmp_path / name
    path.write_text(json.dumps([HI, {"prompt": "Bye", "response": "Bye."}], indent=indent))
    assert sorted(map(str, items(path))) == sorted(map(str, [HI, [user("Bye"), assistant("Bye.")]]))


def test_file_is_a_bucket_without_a_prefix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine.jsonl", "mine.json", "mine.ndjson"):
        (tmp_path / name).write_text(ALL)
    for words in ("mine.jsonl", "jsonl:mine.jsonl", "./mine.json", "~/mine.ndjson=9*2"):
        [bucket] = buckets(words)
        assert len(bucket.train) >= 9 and bucket.name.startswith("jsonl:")
    (tmp_path / "own.csv").write_text("prompt,answer\n")
    with pytest.raises(ValueError, match="own.csv is a file; use jsonl:own.csv"):
        buckets("own.csv")


def test_fields_are_named_in_braces_and_others_listed(tmp_path, capsys):
    path = tmp_path / "own.jsonl"
    lines = [{"inquiry": f"q{i}", "reply": "a", "talk": HI, "lang": "en"} for i in range(2)]
    lines.append({**lines[0], "inquiry": "q2", "lang": "de"})
    path.write_text("".join(map("{}\n".format, map(json.dumps, lines))))
    [named] = buckets(f"jsonl:{path}{{prompt: inquiry, answer: reply, where: lang=en}}")
    assert {each[0]["content"] for each in [*named.train, *named.val]} == {"q0", "q1"}
    assert "fields that are not read: talk\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="val is for repositories"):
        JSONL("train", f"{path}{{messages: talk, val: dev}}")


NEAR_MISSES = {  # row -> what the error says
    "no known field": ({"ask": "Hi", "tell": "Yes."}, "no conversation in the fields ask, tell"),
    "a prompt alone": ({"prompt": "Hi"}, "no conversation in the fields prompt"),
    "a text": ({"text": "Hi"}, "no conversation in the fields text; read are a list of messages"),
    "a number": (3, "3 is no conversation"),
    "a string of messages": ({"messages": json.dumps(HI)}, "is no list of messages"),
    "an empty list": ({"messages": []}, r"\[\] is no list of messages"),
    "no answer": ({"messages": HI[:1]}, "roles must alternate"),
    "an unknown role": ({"messages": [{"role": "bot", "content": "x"}]}, "has role 'bot'"),
    "no content": (
        {"messages": [user("Hi"), {"role": "assistant"}]},
        "a message has no content, but the keys role",
    ),
    "a message that is a string": ({"messages": ["Hi", "Yes."]}, "the message 'Hi' is no object"),
    "value without from": ({"conversations": [{"value": "Hi"}]}, "no role and no content, but"),
    "from and content": (
        {"messages": [{"from": "human", "content": "Hi"}]},
        "a message has no value, but the keys from, content",
    ),
    "a null answer": ({"prompt": "Hi", "completion": None}, r"prompt, completion \(null\)"),
    "a number as answer": ({"prompt": "Hi", "answer": 4}, "a prompt or an answer is 4; it must be"),
    "a list as input": ({"instruction": "Hi", "input": ["a"], "output": "b"}, "must be text"),
    "two system messages": ({"system": "No.", "messages": [SYSTEM, *HI]}, "two system messages"),
    "a weight of the row": ({"messages": HI, "weight": 0}, "a weight is of a message"),
    "tool calls": ({"messages": [HI[0], {**HI[1], "tool_calls": [1]}]}, "has tool_calls"),
    "a weight": ({"messages": [HI[0], {**HI[1], "weight": 0.5}]}, "has the weight 0.5; use 0"),
    "an empty answer": ({"instruction": "Hi", "output": ""}, "a message is empty"),
    "an image": ({"messages": [user("Hi"), assistant([{"type": "image"}])]}, "invalid part"),
}


@pytest.mark.parametrize("form", NEAR_MISSES)
def test_near_miss_is_one_sentence_with_file_and_line(tmp_path, form):
    row, message = NEAR_MISSES[form]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(map("{}\n".format, map(json.dumps, [HI, LONGER, row]))))
    with pytest.raises(ValueError, match=rf"own\.jsonl, line 3: .*{message}") as raised:
        items(path)
    assert "Error(" not in str(raised.value) and "\n" not in str(raised.value)


def test_message_of_weight_0_is_not_trained_on():
    ids, mask = render(TOKENIZER, [*HI[:1], {**HI[1], "weight": 0}, *LONGER[2:]])
    plain_ids, plain = render(TOKENIZER, LONGER)
    yes, no = (len(TOKENIZER.encode(word)) + 1 for word in ("Yes.", "No."))
    assert ids == plain_ids and sum(plain) == yes + no and sum(mask) == no and mask[-1] == 1


# ---- Preference pairs ----------------------------------------------------------------------------

NO = [user("Hi"), assistant("No.")]
PAIRS = {
    "a question": ({"question": "Hi", "chosen": "Yes.", "rejected": "No."}, [HI, NO]),
    "messages": ({"prompt": HI[:1], "chosen": HI[1:], "rejected": NO[1:]}, [HI, NO]),
    "one message": ({"prompt": "Hi", "chosen": HI[1], "rejected": NO[1]}, [HI, NO]),
    "whole chats": ({"prompt": "Hi", "chosen": HI, "rejected": NO}, [HI, NO]),
    "chats of from and value": ({"chosen": {"conversations": SHARED}, "rejected": NO}, [HI, NO]),
    "a list of two": ([HI, NO], [HI, NO]),
    "a system message in the prompt": (
        {"prompt": [SYSTEM, HI[0]], "chosen": HI, "rejected": NO},
        [[SYSTEM, *HI], [SYSTEM, *NO]],
    ),
    "a system message": (
        {"system": "Be brief.", "prompt": "Hi", "chosen": "Yes.", "rejected": "No."},
        [[SYSTEM, *HI], [SYSTEM, *NO]],
    ),
}
PAIR_MISSES = {
    "no rejected answer": ({"prompt": "Hi", "chosen": "Yes."}, "no rejected among the fields"),
    "no prompt": ({"chosen": "Yes.", "rejected": "No."}, "no conversation in the fields"),
    "a number": ({"prompt": "Hi", "chosen": 1, "rejected": 2}, "a prompt or an answer is 1"),
    "scores": ({"prompt": "Hi", "responses": ["Yes.", "No."]}, "no chosen and rejected among"),
    "a string": ("Hi", "'Hi' is no conversation"),
}


@pytest.mark.parametrize("form", PAIRS)
def test_every_form_of_a_pair_is_read(tmp_path, form):
    row, wanted = PAIRS[form]
    path = tmp_path / "pairs.jsonl"
    other = {"prompt": "Bye", "chosen": "Yes.", "rejected": "No."}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
    assert wanted in items(path, Preferences)


@pytest.mark.parametrize("form", PAIR_MISSES)
def test_near_miss_of_a_pair_is_one_sentence(tmp_path, form):
    row, message = PAIR_MISSES[form]
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{json.dumps(PAIRS['a question'][0])}\n{json.dumps(row)}\n")
    with pytest.raises(ValueError, match=rf"line 2: .*{message}") as raised:
        items(path, Preferences)
    assert "Error(" not in str(raised.value)
