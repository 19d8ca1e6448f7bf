"""Many users at once: disconnects, fairness, full queues, failures, tools, shutdown."""

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from nanochat.checkpoint import ASIDE, stage_folder
from nanochat.tokenizer import SPECIAL_TOKENS
from tests.web_server import CHAT, HELLO, post, serving, slow_down, until, write_model

SLOW = pytest.mark.slow
LONG = post({"messages": HELLO, "max_tokens": 200})


# ---- V2: disconnects -----------------------------------------------------------------------------


@pytest.mark.parametrize("times", [30, pytest.param(1000, marks=SLOW)])
def test_V2_disconnects_free_slots_and_leak_nothing(site, monkeypatch, times):
    taken = slow_down(monkeypatch, 0.01)
    site.content(max_tokens=2)
    process, steps, memory = psutil.Process(), [], []
    files = process.num_fds()
    for i in range(times):
        body = {"messages": HELLO, "max_tokens": 200, "n": 2, "stream": i % 2 == 0}
        with site.raw(post(body)) as connection:
            if i // 2 % 2:  # while decoding, otherwise before the first token
                until(lambda: site.load()[0] == 2)
                if body["stream"]:
                    assert connection.recv(65536)
        before = len(taken)
        site.wait_until_idle()
        steps.append(len(taken) - before)
        memory.append(process.memory_info().rss)
    assert sorted(steps)[times // 2] < 50 and max(steps) < 190  # a whole answer takes 200
    assert memory[-1] - memory[times // 2] < 20e6
    until(lambda: process.num_fds() <= files + 2)
    assert len(site.ask(n=8, max_tokens=2).json()["choices"]) == 8  # all slots are free


def test_V2_V3_full_queue_returns_429_and_disconnects_leave_it(base, monkeypatch):
    write_model("sft:busy")
    with serving("sft:busy", slots=1, max_waiting=1) as site:
        slow_down(monkeypatch, 0.01)
        first, second = site.raw(LONG), site.raw(LONG)
        until(lambda: site.load() == (1, 1))
        refused = site.ask(max_tokens=1)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        second.close()
        until(lambda: site.load() == (1, 0))
        first.close()
        site.wait_until_idle()
        assert site.ask(max_tokens=1).status_code == 200
        assert site.ask(n=3).status_code == 400  # a request that can never fit is not retryable


# ---- V3, V10: concurrent users -------------------------------------------------------------------


@pytest.mark.parametrize("users", [12, pytest.param(64, marks=SLOW)])
def test_V3_users_share_slots_and_get_fair_throughput(site, monkeypatch, users):
    taken, answers = slow_down(monkeypatch, 0.001), [0] * users

    def ask_again_and_again(user):
        while sum(answers) < 8 * users:
            site.content(max_tokens=20)
            answers[user] += 1

    with ThreadPoolExecutor(users) as pool:
        list(pool.map(ask_again_and_again, range(users)))
    assert max(answers) <= 2 * min(answers) and max(taken) == 8


# ---- models, tools and failures ------------------------------------------------------------------


def test_retrained_model_answers_with_its_new_weights(base):
    write_model("sft:again")
    write_model("mid:new", seed=4)
    folder = stage_folder("sft") / "again"
    with serving("sft:again", endless=False) as site:

        def answer(name="sft:again"):
            return site.content(model=name, temperature=0, max_tokens=9)

        old = answer()
        folder.rename(f"{folder}{ASIDE}1")  # another run begins, and has saved nothing yet
        assert answer() == old
        write_model("sft:again", step=2, seed=4)
        weights = folder / "step_000002" / "model.safetensors"
        saved = weights.read_bytes()
        weights.write_bytes(b"")
        assert answer() == old  # a damaged checkpoint replaces no good model
        write_model("sft:again", step=3, seed=4)
        weights.write_bytes(saved)
        assert answer() == answer("mid:new") != old


def test_pinned_step_stays_when_its_tag_trains_on(base, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("nanochat.checkpoint.time.time", lambda: 1.7e9)
        write_model("sft:pinned")
    with serving("sft:pinned:1", endless=False) as site:

        def found():
            models = site.client.get("/v1/models").json()["data"]
            return models[0], site.content(temperature=0, max_tokens=9)

        before = found()
        write_model("sft:pinned", step=2, seed=4)
        assert found() == before
        write_model("sft:pinned", step=3, seed=4)  # deletes step 1
        assert found() == before


def test_failed_step_ends_only_the_answers_of_its_model(site, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("device-side assert")

    slow_down(monkeypatch, 0.01)
    endless = dict.fromkeys(map(str, site.ids(*SPECIAL_TOKENS)), -100)
    healthy = {"model": "base:tiny", "max_tokens": 100, "seed": 1, "logit_bias": endless}
    alone = site.content(**healthy)
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(site.events, max_tokens=500, n=2, logit_bias=endless)
        other = pool.submit(site.content, **healthy)
        until(lambda: site.load()[0] == 3)
        with monkeypatch.context() as patch:
            patch.setattr(site.engine.model, "hidden", broken)
            patch.setattr(site.engine.cache, "copy", broken)
            assert failing.result()[-1]["error"]["code"] == "generation_failed"
            failed = site.ask(n=2, logit_bias=endless)
            assert failed.status_code == 500 and "device-side" in failed.text
        assert other.result() == alone
    assert site.content(max_tokens=3, logit_bias=endless) and site.load() == (0, 0)


# ---- V11: shutdown -------------------------------------------------------------------------------


def test_V11_shutdown_finishes_short_answers_and_ends_long_ones(base, monkeypatch):
    write_model("sft:long", context=2048)
    monkeypatch.setattr("nanochat.serve.server.DRAIN_SECONDS", 2.0)
    slow_down(monkeypatch, 0.02)
    with serving("sft:long") as site, ThreadPoolExecutor(2) as pool:
        short, long = (pool.submit(site.events, max_tokens=n) for n in (20, 1500))
        until(lambda: site.load()[0] == 2)
        site.server.should_exit = True
        assert short.result()[-1]["choices"][0]["finish_reason"] == "length"
        *events, last = long.result()
        assert last["error"]["code"] == "shutting_down" and len(events) > 20


# ---- monitoring ----------------------------------------------------------------------------------


def test_idle_stream_sends_keep_alive_comments(site, monkeypatch):
    monkeypatch.setattr("nanochat.serve.server.HEARTBEAT_SECONDS", 0.05)
    slow_down(monkeypatch, 0.3)
    body = {"messages": HELLO, "max_tokens": 2, "stream": True}
    with site.client.stream("POST", CHAT, json=body) as response:
        lines = list(response.iter_lines())
    assert ": keep-alive" in lines and lines[-2] == "data: [DONE]"
