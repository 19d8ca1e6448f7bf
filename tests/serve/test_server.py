"""The server: conformance to OpenAI's API, limits, security, and misbehaving clients."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace

import httpx
import pytest
import torch

from nanochat.chat_format import render_prompt
from nanochat.checkpoint import stage_folder
from nanochat.common import REPOSITORY
from nanochat.scaling import shape_for_depth
from nanochat.serve import responses
from nanochat.serve.security import SecurityConfig
from nanochat.serve.server import PAGE, ServerConfig
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer
from tasks.world.corpus import documents
from tests.web_server import (
    HELLO,
    Site,
    post,
    product,
    says,
    serving,
    write_checkpoint,
    write_model,
)

TEXT = "/v1/completions"


@pytest.fixture
def site(base):
    write_model()
    with serving() as found:
        yield found


def words(site: Site, text: str, end: str = "<|assistant_end|>") -> list[int]:
    return [*site.tokenizer.encode(text), site.tokenizer.special(end)]


# ---- API conformance -----------------------------------------------------------------------------


def test_V1_chat_completion_has_all_api_fields(site):
    body = site.chat(max_tokens=5, seed=1).json()
    assert body["object"] == "chat.completion" and body["model"] == "sft:tiny"
    assert body["id"].startswith("chatcmpl-") and abs(body["created"] - time.time()) < 60
    prompt = len(render_prompt(site.tokenizer, HELLO))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "total_tokens": prompt + 5,
    }
    (choice,) = body["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant" and choice["logprobs"] is None


def test_answers_are_sent_at_once(site):
    """Without TCP_NODELAY, answers on a kept connection wait 40 ms for an acknowledgment."""
    assert site.client.get("/health").status_code == 200
    for connection in site.server.server_state.connections:
        found = connection.transport.get_extra_info("socket")
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert site.server.server_state.connections


def test_V1_streamed_chunks_concatenate_to_the_full_answer(site):
    whole = site.content(max_tokens=40, seed=7)
    events = site.stream(max_tokens=40, seed=7, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in events[1:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == whole
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == "length"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 40
    often = site.stream(max_tokens=6, stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in often]
    assert counts == sorted(counts) and counts[-1] == 6


def test_V1_completion_ends_at_stop_string_eos_or_limit(site, monkeypatch):
    says(monkeypatch, site, words(site, "one two three"))
    site.engine.ends = {site.tokenizer.special("<|assistant_end|>")}

    def complete(**settings):
        choice = site.chat(**settings).json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    assert complete() == ("one two three", "stop")
    assert complete(max_tokens=4) == ("one ", "length")
    assert complete(max_completion_tokens=4) == ("one ", "length")
    assert complete(stop=" t") == ("one", "stop")
    assert complete(stop=["thr", "o th"]) == ("one tw", "stop")
    assert complete(stop=["three!"]) == ("one two three", "stop")
    for stop in (" t", "three!"):
        events = site.stream(stop=stop)
        streamed = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        assert streamed == complete(stop=stop)[0]
    assert site.chat(stop=" t").json()["usage"]["completion_tokens"] == len("one t")
    site.seconds_until_idle()


def test_V1_seed_and_n_determine_the_samples(site):
    def sample(**settings):
        choices = site.chat(max_tokens=12, **settings).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["message"]["content"] for choice in choices]

    four = sample(n=4, seed=5)
    assert len(set(four)) == 4 and sample(n=4, seed=5) == four
    assert sample(seed=5) == four[:1] != sample(seed=6)
    assert sample() != sample(), "samples without a seed must differ"
    greedy = sample(temperature=0)
    assert (
        sample(top_p=0)
        == sample(top_p=1e-50)
        == sample(top_k=1)
        == sample(temperature=0, seed=9)
        == greedy
    )
    events = site.stream(max_tokens=12, n=4, seed=5)
    streamed = ["", "", "", ""]
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == four


def test_V1_chat_logprobs_match_the_model(site):
    body = site.chat(max_tokens=6, seed=2, logprobs=True, top_logprobs=3).json()
    content = body["choices"][0]["logprobs"]["content"]
    ids = render_prompt(site.tokenizer, HELLO)
    assert len(content) == 6
    for entry in content:
        logprobs = site.engine.model(torch.tensor([ids]))[0, -1].log_softmax(0)
        (token,) = entry["bytes"] if len(entry["bytes"]) == 1 else [None]
        if token is None:
            break  # a special token has no single byte
        assert entry["logprob"] == pytest.approx(float(logprobs[token]), abs=1e-4)
        best = logprobs.topk(3)
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )
        ids.append(token)
    streamed = site.stream(max_tokens=6, seed=2, logprobs=True, top_logprobs=3)
    pieces = [e["choices"][0]["logprobs"] for e in streamed if e["choices"][0]["logprobs"]]
    assert [one for piece in pieces for one in piece["content"]] == content


def test_V1_text_completions_accept_text_and_token_ids(site):
    one = site.client.post(TEXT, json={"prompt": "abc", "max_tokens": 5, "seed": 3}).json()
    assert one["object"] == "text_completion" and one["usage"]["prompt_tokens"] == 4  # BOS
    ids = site.tokenizer.encode("abc")
    for prompt in (ids, [site.tokenizer.bos_id, *ids]):
        same = site.client.post(TEXT, json={"prompt": prompt, "max_tokens": 5, "seed": 3}).json()
        assert same["choices"][0]["text"] == one["choices"][0]["text"]
    body = {"prompt": ["abc", "xyz"], "max_tokens": 5, "n": 2, "seed": 3}
    both = site.client.post(TEXT, json=body).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["choices"][0]["text"] == one["choices"][0]["text"]
    streamed = ["", "", "", ""]
    for event in site.stream(TEXT, **body):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == [choice["text"] for choice in both["choices"]]
    short = site.client.post(TEXT, json={"prompt": "a"}).json()
    assert short["usage"]["completion_tokens"] == 16  # OpenAI's default


def test_V1_echo_returns_prompt_logprobs(site):
    text = "He said é!"
    body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 2}
    choice = site.client.post(TEXT, json=body).json()["choices"][0]
    found = choice["logprobs"]
    ids = [site.tokenizer.bos_id, *site.tokenizer.encode(text)]
    logprobs = site.engine.model(torch.tensor([ids]))[0].log_softmax(-1)
    wanted = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
    assert choice["text"] == text
    assert found["token_logprobs"] == pytest.approx(wanted, abs=1e-4)
    assert found["tokens"][:3] == ["H", "e", " "] and "bytes:\\xc3" in found["tokens"]
    assert found["text_offset"][:4] == [0, 1, 2, 3] and found["text_offset"][-1] == len(text) - 1
    assert all(
        max(top.values()) >= logprob
        for top, logprob in zip(found["top_logprobs"], found["token_logprobs"], strict=True)
    )
    by_ids = site.client.post(TEXT, json={**body, "prompt": ids}).json()["choices"][0]
    assert by_ids["text"] == text and by_ids["logprobs"]["tokens"][0] == "<|bos|>"
    assert by_ids["logprobs"]["token_logprobs"] == [None, *found["token_logprobs"]]
    assert by_ids["logprobs"]["top_logprobs"] == [None, *found["top_logprobs"]]
    longer = site.client.post(TEXT, json={**body, "max_tokens": 3, "seed": 1}).json()["choices"][0]
    assert len(longer["logprobs"]["tokens"]) == len(ids) - 1 + 3
    assert longer["text"].startswith(text)
    streamed = site.stream(TEXT, **{**body, "max_tokens": 3, "seed": 1})
    assert "".join(event["choices"][0]["text"] for event in streamed) == longer["text"]
    parts = [e["choices"][0]["logprobs"] for e in streamed if e["choices"][0]["logprobs"]]
    for key, value in longer["logprobs"].items():
        assert [one for part in parts for one in part[key]] == value


def test_tool_calls_are_returned_as_parts_and_can_be_resent(site, monkeypatch):
    script = [*site.tokenizer.encode("It is "), *product(site), *words(site, " then.")]
    says(monkeypatch, site, script)
    site.engine.ends = {site.tokenizer.special("<|assistant_end|>")}
    message = site.chat().json()["choices"][0]["message"]
    assert message["content"] == "It is  then."
    parts = [("text", "It is "), ("python", "6*7"), ("python_output", "42"), ("text", " then.")]
    assert [(part["type"], part["text"]) for part in message["parts"]] == parts
    streamed = [event["choices"][0]["delta"] for event in site.stream()]
    merged = {}
    for part in (part for delta in streamed for part in delta.get("parts", [])):
        known = merged.setdefault(part["index"], {**part, "text": ""})
        assert known["type"] == part["type"]
        known["text"] += part["text"]
    assert [(part["type"], part["text"]) for part in merged.values()] == parts
    messages = [*HELLO, message, {"role": "user", "content": "And?"}]
    prompt = site.chat(messages, max_tokens=1).json()["usage"]["prompt_tokens"]
    as_parts = {"role": "assistant", "content": message["parts"]}
    assert prompt == len(render_prompt(site.tokenizer, [*HELLO, as_parts, messages[-1]]))


def test_models_load_on_request_and_idle_ones_are_unloaded(base):
    for name in ("base:one", "mid:two", "sft:tiny"):
        write_model(name)
    with serving(max_models=2) as site:
        listed = site.client.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["sft:tiny", "mid:two", "base:one"]
        assert site.client.get("/v1/models/mid:two").json()["stage"] == "mid"
        for name in ("base:one", "mid:two"):
            assert site.chat(model=name, max_tokens=2).json()["model"] == name
        assert list(site.server.handler.library.loaded) == ["base:one", "mid:two"]
        (stage_folder("base") / "one" / "step_000001" / "model.safetensors").write_bytes(b"x")
        assert site.chat(model="sft:tiny", max_tokens=2).status_code == 200
        damaged = site.chat(model="base:one", max_tokens=2)
        assert damaged.status_code == 503 and "base:one" in damaged.json()["error"]["message"]
        missing = site.chat(model="../../etc", max_tokens=2)
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


def test_unloaded_model_is_freed_before_the_next_is_loaded(base, monkeypatch):
    for name in ("base:one", "sft:tiny"):
        write_model(name)
    alive = []
    with serving(max_models=1) as site:
        library, engine = site.server.handler.library, weakref.ref(site.engine)
        load = library.load
        monkeypatch.setattr(library, "load", lambda name: alive.append(engine()) or load(name))
        for name in ("sft:tiny", "base:one"):
            assert site.chat(model=name, max_tokens=2).status_code == 200
    assert alive == [None]


# ---- the official client -------------------------------------------------------------------------


@pytest.fixture
def client(site):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)


def test_V1_openai_client_parses_our_responses(site, client):
    assert [model.id for model in client.models.list()] == ["sft:tiny"]
    assert client.models.retrieve("sft:tiny").owned_by == "nanochat"
    params = {"model": "sft:tiny", "messages": HELLO, "max_tokens": 9, "seed": 4}
    whole = client.chat.completions.create(**params, n=2, top_p=0.9, stop=["zzz"], logprobs=True)
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
    assert whole.usage.completion_tokens == 18
    assert whole.choices[0].logprobs.content[0].logprob <= 0
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**params, stream=True, stream_options=options))
    alone = client.chat.completions.create(**params)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == alone.choices[0].message.content
    assert chunks[-1].usage == alone.usage
    text = client.completions.create(
        model="sft:tiny", prompt="ab", max_tokens=3, echo=True, logprobs=1
    )
    assert text.choices[0].text.startswith("ab") and len(text.choices[0].logprobs.tokens) == 5
    back = [*HELLO, alone.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
    assert client.chat.completions.create(model="sft:tiny", messages=back, max_tokens=1).choices


def test_V1_openai_client_can_resend_a_streamed_message(site, client, monkeypatch):
    script = [*site.tokenizer.encode("It is "), *product(site), *words(site, "!")]
    says(monkeypatch, site, script)
    site.engine.ends = {site.tokenizer.special("<|assistant_end|>")}
    params = {"model": "sft:tiny", "messages": HELLO}
    with client.chat.completions.stream(**params) as stream:
        kept = stream.get_final_completion().choices[0].message
    assert kept.content == "It is !"
    parts = [("text", "It is "), ("python", "6*7"), ("python_output", "42"), ("text", "!")]
    assert [(part["type"], part["text"]) for part in kept.parts] == parts
    for back in (kept, kept.model_dump()):
        again = [*HELLO, back, {"role": "user", "content": "More"}]
        answer = client.chat.completions.create(model="sft:tiny", messages=again, max_tokens=1)
        whole = {"role": "assistant", "content": [dict(type=t, text=x) for t, x in parts]}
        prompt = render_prompt(site.tokenizer, [*HELLO, whole, again[-1]])
        assert answer.usage.prompt_tokens == len(prompt)


def test_V1_openai_client_raises_for_our_errors(site, client):
    import openai

    params = {"model": "sft:tiny", "messages": HELLO}
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**params, "model": "gpt-4"})
    assert missing.value.code == "model_not_found" and "sft:tiny" in missing.value.message
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(**params, temperature=3)
    assert hot.value.param == "temperature" and "2" in hot.value.message
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument.*sing"):
        client.chat.completions.create(**params, extra_body={"sing": True})
    with pytest.raises(openai.BadRequestError, match="tool_choice: not supported;.*no function"):
        tool = {"type": "function", "function": {"name": "f"}}
        client.chat.completions.create(**params, tools=[tool], tool_choice="required")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            **{**params, "messages": [{"role": "user", "content": "x" * 300}]}
        )
    assert long.value.code == "context_length_exceeded"
    harmless = {"presence_penalty": 0, "user": "me", "tools": [], "metadata": {"a": "b"}}
    assert client.chat.completions.create(**params, max_tokens=1, extra_body=harmless).choices


# ---- disconnects ---------------------------------------------------------------------------------


def abort(site: Site, stream: bool, after: str, taken: list[int]) -> int:
    """Request a long answer and disconnect; returns the number of steps until idle."""
    connection = site.raw()
    body = {"messages": HELLO, "max_tokens": 200, "stream": stream, "n": 2}
    connection.sendall(post("/v1/chat/completions", body))
    if after == "tokens" and stream:
        received = b""
        while received.count(b'"content"') < 5:
            received += connection.recv(65536)
    elif after == "tokens":
        while not site.engine.busy:
            time.sleep(0.001)
    connection.close()
    if after == "nothing":
        time.sleep(0.02)
    before = len(taken)
    site.seconds_until_idle()
    return len(taken) - before


def test_V2_disconnects_free_slots_and_leak_nothing(site, monkeypatch, record_property):
    hang_up(site, 30, slow_down(monkeypatch, site, 0.01))
    record_property("requests served", 30)


@pytest.mark.slow
def test_V2_a_thousand_disconnects_leak_nothing(site, monkeypatch, record_property):
    hang_up(site, 1000, slow_down(monkeypatch, site, 0.005))
    record_property("requests served", 1000)


def hang_up(site: Site, times: int, taken: list[int]) -> None:
    import psutil

    site.chat(max_tokens=2)
    process = psutil.Process()
    files, threads = process.num_fds(), threading.active_count()
    steps, before = [], 0
    for i in range(times):
        if i == times // 2:
            before = process.memory_info().rss
        after = ("tokens", "nothing")[i // 2 % 2]
        steps.append(abort(site, i % 2 == 0, after, taken))
    steps.sort()
    grown = process.memory_info().rss - before
    print(f"{times} aborts: idle after {steps[times // 2]} steps, max {steps[-1]}; ", end="")
    print(f"RSS +{grown / 1e6:.1f} MB in the second half")
    assert steps[times // 2] < 50 and steps[-1] < 190  # a full answer takes 200
    assert site.is_idle() and site.worker.status() == "ok"
    assert grown < 20e6
    until(lambda: process.num_fds() <= files + 2)
    assert threading.active_count() <= threads + 8  # event loop threads
    assert len(site.content(max_tokens=5)) > 0


def until(holds, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def slow_down(patch, site: Site, seconds: float) -> list[int]:
    """Slow down every step; returns a list that collects the number of tokens of each step."""
    plain, taken = site.engine.step, []

    def step(patience):
        time.sleep(seconds)
        grown = plain(patience)
        taken.append(len(grown))
        return grown

    patch.setattr(site.engine, "step", step)
    return taken


def test_V2_disconnect_removes_a_queued_request(base):
    write_model()
    with serving(slots=1) as site:
        slow_down(pytest.MonkeyPatch(), site, 0.01)
        first = site.raw()
        first.sendall(post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 200}))
        until(lambda: site.engine.active)
        second = site.raw()
        second.sendall(post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 200}))
        until(lambda: site.engine.waiting)
        second.close()
        until(lambda: not site.engine.waiting)
        assert len(site.engine.active) == 1
        first.close()
        site.seconds_until_idle()


# ---- concurrent users ----------------------------------------------------------------------------


def load(site: Site, users: int, seconds: int, tokens: int) -> dict:
    """Run tests.load_client in another process; returns its results."""
    command = [sys.executable, "-m", "tests.load_client", site.url]
    done = subprocess.run(
        [*command, *map(str, (users, seconds, tokens))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=seconds + 240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == [] and found["most"] < 2 * found["least"]
    return found


def test_V3_concurrent_users_get_fair_throughput(base, record_property):
    write_model(context=512)
    with serving(slots=8) as site:
        few = load(site, users=8, seconds=3, tokens=40)
        assert few["refused"] == 0
        crowd = load(site, users=12, seconds=3, tokens=40)  # more users than slots
        assert crowd["refused"] == 0
        record_property("requests served", few["answers"] + crowd["answers"])


@pytest.mark.slow
def test_V3_sixty_four_users_share_engine_steps(base, record_property, monkeypatch):
    cfg = shape_for_depth(4, 4096, 512)
    tokenizer = Tokenizer.train(documents(0, 0, "val"), 4096)
    write_checkpoint("sft:d4", replace(cfg, vocab_size=tokenizer.vocab_size), tokenizer)
    with serving("sft:d4", slots=64) as site:
        taken = slow_down(monkeypatch, site, 0.0)
        found = load(site, 64, 20, 100)
        site.seconds_until_idle()
        assert found["refused"] == 0
        assert sum(taken) > 4 * sum(tokens > 0 for tokens in taken) > 0
        record_property("requests served", found["answers"])


def test_V3_full_queue_returns_429_with_retry_after(base):
    write_model()
    with serving(slots=1, max_waiting=1) as site:
        slow_down(pytest.MonkeyPatch(), site, 0.01)
        held = [site.raw() for _ in range(2)]
        for connection in held:
            connection.sendall(post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 200}))
        until(lambda: site.worker.load.total() == 2)
        assert site.client.get("/health").json() == {"status": "ok", "running": 1, "waiting": 1}
        rejected = site.chat(max_tokens=1)
        assert rejected.status_code == 429 and 1 <= int(rejected.headers["retry-after"]) <= 60
        assert rejected.json()["error"]["type"] == "rate_limit_error"
        for connection in held:
            connection.close()
        site.seconds_until_idle()
        assert site.chat(max_tokens=1).status_code == 200
        assert site.chat(n=3).status_code == 400, "a request that can never fit is not retryable"


def test_server_survives_a_token_outside_the_vocabulary(site, monkeypatch):
    monkeypatch.setattr(site.engine.tokenizer, "decode_bytes", lambda ids: 1 / 0)
    failed = site.chat(max_tokens=3)
    assert failed.status_code == 500 and "ZeroDivisionError" in failed.json()["error"]["message"]
    monkeypatch.undo()
    assert site.chat(max_tokens=3).status_code == 200


def test_equal_prompts_of_a_request_get_different_answers(site):
    body = {"prompt": ["Once", "Once"], "max_tokens": 30, "temperature": 1.5}
    first, second = site.client.post(TEXT, json=body).json()["choices"]
    assert first["text"] != second["text"]


def test_failed_step_returns_500_and_server_keeps_running(site, monkeypatch):
    plain = site.engine.model.logits

    def broken(hidden):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(site.engine.model, "logits", broken)
    failed = site.chat(max_tokens=3)
    assert failed.status_code == 500 and "out of memory" in failed.json()["error"]["message"]
    (*_, last) = site.stream(max_tokens=3)
    assert last["error"]["code"] == "generation_failed"
    monkeypatch.setattr(site.engine.model, "logits", plain)
    assert site.chat(max_tokens=3).status_code == 200 and site.seconds_until_idle() >= 0


# ---- limits --------------------------------------------------------------------------------------

CHAT = {"messages": HELLO, "max_tokens": 2}


def test_V4_large_bodies_are_rejected(base):
    write_model()
    with serving(security=SecurityConfig(max_body_bytes=200_000)) as site:
        site.chat(max_tokens=1)
        large = b'{"messages": [{"role": "user", "content": "' + b"x" * 30_000_000 + b'"}]}'
        head = {"Content-Type": "application/json"}
        answer = site.client.post("/v1/chat/completions", content=large, headers=head)
        assert answer.status_code == 413 and "200,000" in answer.json()["error"]["message"]
        pieces = (large[i : i + 10_000] for i in range(0, 3_000_000, 10_000))  # chunked
        answer = site.client.post("/v1/chat/completions", content=pieces, headers=head)
        assert answer.status_code == 413
        for _ in range(20):  # just under the size limit, but too many tokens
            body = {"messages": [{"role": "user", "content": "word " * 39_000}]}
            answer = site.client.post("/v1/chat/completions", json=body)
            assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_V4_context_limit_counts_tokens_not_characters(site):
    room = site.engine.cache.capacity - len(render_prompt(site.tokenizer, HELLO)) + len("Hello")
    for text in ("x" * (room - 1), "é" * ((room - 1) // 2)):
        assert site.chat([{"role": "user", "content": text}], max_tokens=9).status_code == 200
        longer = [{"role": "user", "content": text + "é"}]
        assert site.chat(longer).json()["error"]["code"] == "context_length_exceeded"


def test_V5_long_conversation_is_rejected_or_truncated(site):
    turns = [
        {"role": r, "content": f"{i} " + r * 4} for i in range(20) for r in ("user", "assistant")
    ]
    long = [{"role": "system", "content": "Be kind."}, *turns, {"role": "user", "content": "last?"}]
    rejected = site.chat(long)
    assert rejected.status_code == 400
    assert rejected.json()["error"]["code"] == "context_length_exceeded"
    kept = site.chat(long, truncation="auto", max_tokens=1000).json()
    used = kept["usage"]["prompt_tokens"]
    capacity = site.engine.cache.capacity
    assert capacity // 2 < used <= capacity * 3 // 4
    assert kept["usage"]["completion_tokens"] == capacity - used
    assert kept["choices"][0]["finish_reason"] == "length"
    alone = [{"role": "user", "content": "x" * 300}]
    assert site.chat(alone, truncation="auto").status_code == 400


# ---- slow clients and foreign origins ------------------------------------------------------------


def test_V6_slow_and_idle_connections_are_closed(base):
    write_model()
    with serving(security=SecurityConfig(request_seconds=1.0, send_seconds=1.0)) as site:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
        silent = [site.raw() for _ in range(60)]
        dripping = [site.raw() for _ in range(60)]
        unfinished = [site.raw() for _ in range(20)]
        for connection in dripping:
            connection.sendall(head)
        for connection in unfinished:
            connection.sendall(post("/v1/chat/completions", {"messages": HELLO})[:-4])
        closed = threading.Event()

        def drip():
            while not closed.wait(0.2):
                for connection in dripping:
                    try:
                        connection.sendall(b"a")
                    except OSError:
                        pass

        threading.Thread(target=drip, daemon=True).start()
        for _ in range(5):
            assert site.chat(max_tokens=3).status_code == 200
        for connection in (*silent, *dripping):
            connection.settimeout(60)
            try:
                assert connection.recv(1000) == b""
            except ConnectionResetError:
                pass
        for connection in unfinished:
            assert b" 408 " in connection.recv(1000)
        closed.set()
        idle = site.raw()  # keep-alive after a response, then silent
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in idle.recv(1000)
        idle.sendall(b"GET /health HT")
        idle.settimeout(60)
        while idle.recv(1000):
            pass
        assert len(site.server.server_state.connections) <= 1  # this test's connection


def test_V6_client_that_does_not_read_is_dropped(base, monkeypatch):
    write_model()
    with serving(security=SecurityConfig(send_seconds=0.5)) as site:
        blow_up(monkeypatch, 200_000)  # pad every event to fill the buffers quickly
        connection = site.raw()
        body = {"messages": HELLO, "max_tokens": 200, "stream": True}
        connection.sendall(post("/v1/chat/completions", body))
        until(lambda: site.engine.busy)
        site.seconds_until_idle(60)
        until(lambda: len(site.server.server_state.connections) == 0)
        assert site.chat(max_tokens=1).status_code == 200


def blow_up(patch, size: int) -> None:
    plain = responses.event
    patch.setattr(
        "nanochat.serve.responses.event", lambda data: ": " + "x" * size + "\n\n" + plain(data)
    )


def test_V7_foreign_hosts_and_origins_are_rejected(site):
    assert ServerConfig().host == "127.0.0.1"
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "",
    ):
        rejected = site.client.get("/v1/models", headers={"Host": host})
        assert rejected.status_code == 403, host
    for host in ("localhost", "localhost:1", "127.0.0.1:8000", "[::1]:8000", "192.168.1.7"):
        assert site.client.get("/v1/models", headers={"Host": host}).status_code == 200, host
    for origin in ("https://evil.example", "null", "http://localhost:1", "http://127.0.0.1"):
        for method in ("GET", "POST", "OPTIONS"):
            answered = site.client.request(method, "/v1/models", headers={"Origin": origin})
            assert answered.status_code == 403, origin
            assert not any(name.startswith("access-control") for name in answered.headers)
    own = site.client.get("/v1/models", headers={"Origin": site.url})
    assert own.status_code == 200
    assert not any(name.startswith("access-control") for name in own.headers)
    assert own.headers["x-content-type-options"] == "nosniff"
    simple = {"Content-Type": "text/plain"}  # needs no CORS preflight
    sent = site.client.post("/v1/chat/completions", content=json.dumps(CHAT), headers=simple)
    assert sent.status_code == 415


def test_V7_api_key_is_required_if_configured(base, tmp_path):
    write_model()
    (tmp_path / "key").write_text("open sesame\n")
    with serving(api_key_file=str(tmp_path / "key")) as site:
        for given in (
            None,
            "Bearer",
            "Bearer open",
            "Basic open sesame",
            "Bearer \xe9",
            "open sesame",
        ):
            head = {} if given is None else {"Authorization": given.encode("latin-1")}
            for path in ("/v1/models", "/metrics", "/v1/chat/completions"):
                rejected = site.client.get(path, headers=head)
                assert rejected.status_code == 401 and rejected.headers["www-authenticate"]
                assert rejected.json()["error"]["code"] == "invalid_api_key"
        head = {"Authorization": "Bearer open sesame"}
        assert site.client.get("/v1/models", headers=head).status_code == 200
        assert site.client.get("/").status_code == 200  # the page prompts for the key
        assert site.client.get("/health").status_code == 200
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ValueError, match="key"):
        ServerConfig(api_key_file=str(tmp_path / "key")).key()


# ---- text ----------------------------------------------------------------------------------------

WONDERS = "é ß 漢字 👍🏽 naïve €"


def test_V8_streaming_never_splits_characters(site, monkeypatch):
    says(monkeypatch, site, words(site, WONDERS))  # a token per byte
    site.engine.ends = {site.tokenizer.special("<|assistant_end|>")}
    pieces = [event["choices"][0]["delta"].get("content", "") for event in site.stream()]
    assert "".join(pieces) == WONDERS and "\ufffd" not in "".join(pieces)
    assert site.content() == WONDERS
    for length in range(1, len(WONDERS.encode())):
        cut = WONDERS.encode()[:length].decode("utf-8", "ignore")
        text = site.content(max_tokens=length)
        assert text.rstrip("\ufffd") == cut, "an incomplete character becomes one U+FFFD"
        assert text.count("\ufffd") <= 1
    says(monkeypatch, site, [0xC3, 0x28, *words(site, "x")])
    assert site.content() == "\ufffd(x"  # invalid UTF-8


def test_streamed_events_have_no_line_breaks_of_any_kind(site, monkeypatch):
    says(monkeypatch, site, words(site, "a\u2028b\x85c\x1cd"))
    site.engine.ends = {site.tokenizer.special("<|assistant_end|>")}
    deltas = [event["choices"][0]["delta"] for event in site.stream()]  # httpx splits there
    assert "".join(delta.get("content", "") for delta in deltas) == "a\u2028b\x85c\x1cd"


def test_V9_page_runs_only_its_own_script(site):
    page = site.client.get("/")
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy and "http" not in policy
    for part in ("default-src 'none'", "frame-ancestors 'none'", "trusted-types 'none'"):
        assert part in policy
    assert page.text.count("<script") == page.text.count("</script>") == page.text.count(" src=")
    assert "<style" not in page.text and " style=" not in page.text
    assert not re.search(r"\son\w+=", page.text)
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert loaded and all(path.startswith("/page/") for path in loaded)
    for path in sorted(PAGE.iterdir()):
        found = site.client.get(f"/page/{path.name}")
        assert found.text == path.read_text() and found.headers["cache-control"] == "no-cache"
        assert found.headers["content-security-policy"] == policy
        for foreign in ("//cdn", "innerHTML", "outerHTML", "insertAdjacentHTML", "@import"):
            assert foreign not in found.text
        for foreign in ("document.write", "eval(", "new Function", "DOMParser"):
            assert foreign not in found.text
        assert set(re.findall(r"https?://\w[\w.]*", found.text)) <= {"http://www.w3.org"}
    for name in ("none.js", "..%2Fserver.py", "%2e%2e/server.py", "server.py"):
        assert site.client.get(f"/page/{name}").status_code == 404


def test_V10_seeded_answer_does_not_depend_on_the_batch(site):
    questions = [[{"role": "user", "content": "q" * (i + 1)}] for i in range(6)]
    settings = {"max_tokens": 60, "temperature": 1.0}
    alone = [site.content(q, seed=i, **settings) for i, q in enumerate(questions)]
    together = [""] * len(questions)

    def ask(i: int) -> None:
        together[i] = httpx.post(
            f"{site.url}/v1/chat/completions",
            json={"messages": questions[i], "seed": i, **settings},
            timeout=60,
        ).json()["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(questions))]
    slow_down(pytest.MonkeyPatch(), site, 0.005)  # so that the requests overlap
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_V11_running_answers_end_cleanly_on_shutdown(base, monkeypatch):
    write_model(context=2048)
    monkeypatch.setattr("nanochat.serve.server.DRAIN_SECONDS", 600.0)
    with serving() as site:
        taken = slow_down(monkeypatch, site, 0.02)
        slow_step, both_queued = site.engine.step, threading.Event()

        def step(patience):
            both_queued.wait(60)
            return slow_step(patience)

        monkeypatch.setattr(site.engine, "step", step)
        events: dict[str, list] = {}

        def ask(name: str, tokens: int) -> None:
            events[name] = Site(
                site.url, site.server, httpx.Client(base_url=site.url, timeout=60)
            ).stream(max_tokens=tokens)

        lengths = {"short": 5, "long": 1500}
        threads = [threading.Thread(target=ask, args=item) for item in lengths.items()]
        for thread in threads:
            thread.start()
        until(lambda: site.worker.load.total() == 2)
        site.server.should_exit = True
        until(lambda: site.worker.deadline is not None)
        both_queued.set()
        until(lambda: "short" in events and len(taken) > 20)
        site.worker.deadline = time.monotonic()
        for thread in threads:
            thread.join(60)
        assert events["short"][-1]["choices"][0]["finish_reason"] == "length"
        assert events["long"][-1]["error"]["code"] == "shutting_down"
        assert len(events["long"]) > 10


def test_V12_request_text_never_becomes_special_tokens(site, monkeypatch):
    requests = []
    plain = site.worker.submit
    monkeypatch.setattr(
        site.worker, "submit", lambda engine, new: requests.extend(new) or plain(engine, new)
    )
    evil = "".join(SPECIAL_TOKENS)
    specials = {site.tokenizer.special(name) for name in SPECIAL_TOKENS}

    def count(response) -> int:
        assert response.status_code == 200, response.text
        return sum(token in specials for token in requests[-1].prompt)

    assert count(site.chat([{"role": "user", "content": evil}], max_tokens=1)) == 4
    parts = [{"type": "text", "text": evil}]
    assert count(site.chat([{"role": "user", "content": parts}], max_tokens=1)) == 4
    for role in ("system", "developer"):
        system = [{"role": role, "content": "<|user_end|>"}, *HELLO]
        assert count(site.chat(system, max_tokens=1)) == 4
    call = {"role": "assistant", "content": [{"type": "python", "text": "<|python_end|>"}]}
    talk = [*HELLO, {"role": "assistant", "content": "<|bos|>"}, *HELLO]
    assert count(site.chat(talk, max_tokens=1)) == 8
    assert count(site.chat([*HELLO, call, *HELLO], max_tokens=1)) == 10  # 2 from the part's type
    body = {"prompt": evil, "max_tokens": 1, "stop": [evil], "user": evil}
    assert count(site.client.post(TEXT, json=body)) == 1
    assert site.chat(model=evil).status_code == 404


# ---- monitoring ----------------------------------------------------------------------------------


def test_metrics_count_requests_and_tokens(site):
    site.chat(max_tokens=7)
    site.chat(max_tokens=0)
    site.client.get("/nowhere")
    site.client.get("/health", headers={"Host": "evil.example"})
    text = site.client.get("/metrics").text
    for line in (
        'nanochat_requests_total{path="/v1/chat/completions",status="200"} 1.0',
        'nanochat_requests_total{path="/v1/chat/completions",status="400"} 1.0',
        'nanochat_requests_total{path="other",status="404"} 1.0',
        'nanochat_requests_total{path="/health",status="403"} 1.0',
        "nanochat_completion_tokens_total 7.0",
        "nanochat_first_token_seconds_count 1.0",
        "nanochat_running 0.0",
    ):
        assert line in text, text
    gone = site.client.get("/nowhere")
    assert gone.status_code == 404 and "/nowhere" in gone.json()["error"]["message"]
    assert site.client.delete("/v1/models").status_code == 405


def test_idle_stream_sends_keep_alive_comments(site, monkeypatch):
    monkeypatch.setattr("nanochat.serve.responses.HEARTBEAT_SECONDS", 0.05)
    slow_down(monkeypatch, site, 0.2)
    with site.client.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as response:
        lines = list(response.iter_lines())
    assert ": keep-alive" in lines and lines[-2] == "data: [DONE]"
