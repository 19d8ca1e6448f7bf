"""The API answers as OpenAI's does: fields, streams, errors, limits."""

import json
import threading
import weakref
from typing import Any

import pytest

from nanochat.checkpoint import read_state, seal_of, stage_folder
from nanochat.common import REPOSITORY, read_json, write_json
from nanochat.engine import TURN_TOKENS
from nanochat.serve.openai_api import read_request
from nanochat.tokenizer import SPECIAL_TOKENS
from tests.web_server import (
    CHAT,
    HELLO,
    HELLO_PROMPT,
    PRODUCT,
    Choice,
    post,
    says,
    serving,
    write_model,
)

RECORDED = read_json(REPOSITORY / "tests" / "client_requests.json")


def error_of(answer, status: int = 400) -> dict[str, str]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# ---- V1: answers ---------------------------------------------------------------------------------


def test_V1_answers_have_the_fields_of_the_api(site):
    body = site.ask(max_tokens=5).json()
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
    assert (body["object"], body["model"], body["usage"]) == ("chat.completion", "sft:tiny", usage)
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    *events, last = site.events(max_tokens=5, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["object"] for event in events} == {"chat.completion.chunk"} and len(events) > 2
    assert last["choices"] == [] and last["usage"] == usage
    text = site.ask(prompt="abc").json()
    assert text["object"] == "text_completion"
    assert text["usage"] == {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20}


@pytest.mark.parametrize(
    "body", [{"n": 4}, {"prompt": ["abc", "xyz"], "n": 2}, {"prompt": "He said \u00e9!"}]
)
def test_V1_streamed_chunks_join_to_the_whole_answer(site, body):
    body = {**body, "max_tokens": 20, "seed": 7}
    whole = site.answers(**body)
    assert site.answers(stream=True, **body) == whole == site.answers(**body)
    assert len({one.text for one in whole}) == len(whole)


def test_V1_answer_ends_at_end_token_stop_string_or_limit(site, monkeypatch):
    says(monkeypatch, site, "one two three")
    for settings, text, finish, num_tokens in (
        ({}, "one two three", "stop", 13),
        ({"max_tokens": 4}, "one ", "length", 4),
        ({"max_completion_tokens": 4}, "one ", "length", 4),
        ({"max_tokens": 13}, "one two three", "length", 13),
        ({"stop": " t"}, "one", "stop", 5),
        ({"stop": ["", "three!"]}, "one two three", "stop", 13),
        ({"stop": ["two t", "e tw", "wo"]}, "on", "stop", 6),  # the first complete one
        ({"stop": ["two t", "wo"]}, "one t", "stop", 7),
    ):
        assert site.ask(**settings).json()["usage"]["completion_tokens"] == num_tokens
        for stream in (False, True):
            assert site.answers(stream=stream, **settings) == [Choice(text, finish)]


def test_V1_seed_and_n_determine_the_samples(site):
    def sample(**settings):
        return [one.text for one in site.answers(max_tokens=12, **settings)]

    four = sample(n=4, seed=5)
    assert sample(seed=5) == sample(seed=5, top_k=-1) == sample(seed=5, top_k=0) == four[:1]
    assert sample(seed=6) != four[:1] and sample() != sample()
    greedy = sample(temperature=0)
    for settings in ({"top_p": 0}, {"top_k": 1}, {"temperature": 0, "seed": 9}):
        assert sample(**settings) == greedy != four[:1]
    first, second = sample(prompt=["Once", "Once"])
    assert first != second  # equal prompts of a request share no seed
    prompts = ["abc", site.ids("abc"), site.ids("<|bos|>", "abc")]
    assert len(set(sample(prompt=prompts, seed=3) + sample(prompt=prompts[1], seed=3))) == 1


def test_V1_tool_calls_without_a_result_stay_apart(site, monkeypatch):
    calls = [f"<|python_{word}|>" for word in ("start", "end")]
    says(monkeypatch, site, *(piece for x in ("a=1", "b") for piece in (calls[0], x, calls[1])))
    parts = site.ask(max_tokens=30).json()["choices"][0]["message"]["parts"]
    assert [(part["type"], part["text"]) for part in parts] == [("python", "a=1"), ("python", "b")]
    assert {part["index"] for part in parts} == {0, 1}


def test_V1_openai_client_works_unmodified(site, monkeypatch):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["sft:tiny", "base:tiny"]
    assert client.models.retrieve("base:tiny").stage == "base"
    asked, create = {"model": "sft:tiny", "messages": HELLO}, client.chat.completions.create
    whole = create(**asked, max_tokens=9, n=2, top_p=0.9, stop=["zzz"], logprobs=False)
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
    assert whole.usage.completion_tokens == 18
    says(monkeypatch, site, "It is ", *PRODUCT, "!")
    with client.chat.completions.stream(**asked) as stream:
        kept = stream.get_final_completion().choices[0].message
    parts = [("text", "It is "), ("python", "6*7"), ("python_output", "42"), ("text", "!")]
    assert [(part["type"], part["text"]) for part in kept.parts] == parts
    assert kept.content == "It is !"
    for back in (kept, kept.model_dump()):
        usage = create(**{**asked, "messages": [*HELLO, back, *HELLO]}).usage
        assert usage.prompt_tokens == 9 + len(site.ids("It is ", *PRODUCT, "!")) + 9
    with pytest.raises(openai.NotFoundError, match="available: sft:tiny"):
        create(**{**asked, "model": "gpt-4"})
    with pytest.raises(openai.BadRequestError, match="sing"):
        create(**asked, extra_body={"sing": True})


def test_models_of_the_core_load_on_request_and_idle_ones_unload(site):
    write_model("mid:two")
    write_model("mid:looped")
    state = stage_folder("mid") / "looped/step_000001/state.json"
    saved = read_state(state.parent)
    saved["model"]["num_loops"] = 3  # as another script writes it: not offered
    write_json(state, {**saved, "seal": seal_of(saved)})
    with serving(max_models=2) as small:
        listed = [model["id"] for model in small.client.get("/v1/models").json()["data"]]
        assert listed == ["sft:tiny", "mid:two", "base:tiny"]
        unloaded = weakref.ref(small.engine)
        for name in listed[1:]:
            assert small.ask(model=name, max_tokens=2).json()["model"] == name
        assert unloaded() is None
        assert small.ask(model="sft:tiny", max_tokens=2).status_code == 200
        (stage_folder("mid") / "two/step_000001/model.safetensors").write_bytes(b"x")
        assert "mid:two" in error_of(small.ask(model="mid:two"), 503)["message"]
        for name in ("../../etc", "mid:looped"):
            assert error_of(small.ask(model=name), 404)["code"] == "model_not_found"


# ---- V8 and V12: text ----------------------------------------------------------------------------


def test_V8_characters_are_never_split(site, monkeypatch):
    text = "\u00e9\u6f22\U0001f44d\U0001f3fd \u20ac\u2028\x85\x1c!"  # one token per byte
    says(monkeypatch, site, text)
    deltas = [event["choices"][0]["delta"].get("content", "") for event in site.events()]
    assert "".join(deltas) == text == site.content() and "\ufffd" not in "".join(deltas)
    for length in range(1, 10):
        content = site.content(max_tokens=length)
        assert content == text.encode()[:length].decode("utf-8", "ignore")
    says(monkeypatch, site, b"\xc3(", "x")
    assert site.content() == "\ufffd(x"


@pytest.mark.parametrize(
    "body",
    [
        {
            "messages": [
                {"role": "system", "content": "X"},
                {"role": "developer", "content": [{"type": "text", "text": "X"}]},
                {"role": "user", "content": "X"},
                {"role": "assistant", "parts": [{"type": "python", "text": "X"}]},
            ],
            "user": "X",
        },
        {"prompt": "X", "stop": ["X"]},
    ],
)
def test_V12_P5_request_text_never_becomes_special_tokens(site, body):
    evil, usages = "".join(SPECIAL_TOKENS), []
    for text in (evil, evil.replace("<", "(")):  # equally long, not special
        filled = json.loads(json.dumps({**body, "max_tokens": 1}).replace("X", text))
        usages.append(site.ask(**filled).json()["usage"])
    assert usages[0] == usages[1]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_sampled_special_tokens_never_show_and_turns_end(site, monkeypatch, token):
    says(monkeypatch, site, "Hi", token, token, "!")
    ends = token in TURN_TOKENS
    for body in ({}, {"prompt": "x", "max_tokens": 9}):
        [found] = site.answers(**body)
        assert found == Choice("Hi" if ends or "start" in token and not body else "Hi!", "stop")


# ---- V14: clients --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_V14_recorded_client_requests_succeed(site, name):
    body = {**RECORDED[name], "max_tokens": 4, "max_completion_tokens": 4}
    assert site.answers(**body)[0].finish in ("stop", "length")


def test_V14_last_assistant_message_is_continued(site):
    messages, expected = [*HELLO, {"role": "assistant", "content": "Hi, I am"}], len("Hi, I am") + 9
    for settings in ({}, {"truncation": "auto"}):
        usage = site.ask(messages, max_tokens=1, **settings).json()["usage"]
        assert usage["prompt_tokens"] == expected


PENALTIES = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}


@pytest.mark.parametrize("name", [*PENALTIES, "repeat_penalty"])
def test_V14_penalties_change_the_answer(site, name):
    body = {"prompt": "abab" * 40, "temperature": 0, "max_tokens": 40}
    plain = site.content(**body)
    assert site.content(**body, **{name: 2.0}) != plain == site.content(**body, **PENALTIES)


def test_V14_min_p_and_logit_bias_choose_tokens(site):
    assert site.content(max_tokens=9, logit_bias={"65": 100}) == "A" * 9
    assert site.content(max_tokens=9, min_p=1.0) == site.content(max_tokens=9, temperature=0)


def test_V14_models_tell_context_length_and_kind(site):
    models = {model["id"]: model for model in site.client.get("/v1/models").json()["data"]}
    chat, base = models["sft:tiny"], models["base:tiny"]
    assert chat["max_model_len"] == chat["meta"]["n_ctx_train"] == 1024
    assert base["description"] == "continues text" != chat["description"]


# ---- V4, V13, V14: what is refused ---------------------------------------------------------------


def user(**message) -> dict[str, Any]:
    return {"messages": [{"role": "user", **message}]}


def part(**fields) -> dict[str, Any]:
    return user(content=[fields])


VALUES = {
    "messages": [None, [], [5], [1] * 300_000, [{"role": 1}] * 4096],
    "temperature": [-0.1, 3, "1", True, 10**400],
    "top_p": [1.1],
    "frequency_penalty": [3],
    "logit_bias": [{"A": 1}, {"65": 101}, {"265": 1}],
    "max_tokens": [0, 10**30, 1.5],
    "n": [0, 10**9],
    "seed": [2**70],
    "stop": [["x"] * 17, [1] * 300_000],
    "best_of": [2],
    "echo": [True],
    "logprobs": [True, 1],
    "top_logprobs": [2],
    "truncation": ["disabled"],
    "response_format": [{"type": "json_object"}],
    "tool_choice": ["required", {"type": "function"}],
    "sing": [True],
    "prompt": [[], {}, [265], [True], [["x"]], ["x"] * 200_000],
}
MESSAGES = {
    "messages": [
        user(),
        user(role="tool", content="x"),
        user(content=[1] * 300_000),
        part(type="image_url"),
        part(type="python", text="x"),
        part(type="text", text=3),
    ],
    "messages.0.tool_calls": [user(content="x", tool_calls=[{"id": "1"}])],
}
REFUSED = [(name, {name: value}) for name, values in VALUES.items() for value in values]
REFUSED += [(name, body) for name, bodies in MESSAGES.items() for body in bodies]
REFUSED += [("k0", {f"k{i}": 1 for i in range(80_000)})]


@pytest.mark.parametrize(("param", "body"), REFUSED, ids=lambda given: str(given)[:40])
def test_V4_V13_V14_one_short_error_names_the_field(site, param, body):
    answer = site.ask(**body)
    error = error_of(answer)
    assert len(answer.content) < 1000
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]


START = b'{"messages": [{"role": "user", "content": "x"}], "temperature": '
MALFORMED = [
    START + end for end in (b"NaN}", b"Infinity}", b"9" * 9999 + b"}", b"1", b"[" * 99_999)
]
MALFORMED += [b"", b"[]", b"\xff\xfe{}", START.replace(b"x", b"\\ud83d") + b"1}"]


@pytest.mark.parametrize("body", MALFORMED, ids=range(9))
def test_V4_malformed_json_is_refused(site, body):
    head = {"Content-Type": "application/json"}
    assert error_of(site.client.post(CHAT, content=body, headers=head))["message"]


def test_V13_health_is_answered_while_a_body_is_parsed(site, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def read_slowly(kind, body):
        begun.set()
        assert go_on.wait(60)
        return read_request(kind, body)

    monkeypatch.setattr("nanochat.serve.server.read_request", read_slowly)
    with site.raw(post({"messages": HELLO, "sing": 1})) as connection:
        assert begun.wait(60)
        assert site.client.get("/health").status_code == 200
        go_on.set()
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


# ---- V4, V5: context length ----------------------------------------------------------------------


def test_V4_context_limit_counts_tokens_not_characters(site):
    room = 1024 - len(HELLO_PROMPT) + 1
    for text in ("x" * (room - 1), "\u00e9" * ((room - 1) // 2)):
        usage = site.ask([{"role": "user", "content": text}], max_tokens=9).json()["usage"]
        assert usage["total_tokens"] <= 1024
        longer = [{"role": "user", "content": text + "\u00e9"}]
        error = error_of(site.ask(longer, truncation="auto"))
        assert error["code"] == "context_length_exceeded" and "1024" in error["message"]


TURNS = [{"role": r, "content": f"{i} " + r * 9} for i in range(20) for r in ("user", "assistant")]
LONG = [{"role": "system", "content": "Be kind."}, *TURNS, *HELLO]


def test_V5_full_context_drops_oldest_turns_by_default(site):
    short, long = site.ask(max_tokens=1), site.ask(LONG, max_tokens=1)
    assert long.status_code == 200 and set(long.headers) > set(short.headers)
    assert error_of(site.ask(LONG, truncation="error"))["code"] == "context_length_exceeded"
    with serving(truncation="error") as strict:
        assert error_of(strict.ask(LONG))["code"] == "context_length_exceeded"
        assert strict.ask(LONG, max_tokens=1, truncation="auto").status_code == 200
