"""The generation thread: replies, log-probabilities, queue limits, failures and shutdown."""

import asyncio
import time
from concurrent.futures import Future

import pytest
import torch

from nanochat.engine import Engine, Sampling
from nanochat.serve.openai_api import ApiError
from nanochat.serve.scheduler import GenerationRequest as Prompt
from nanochat.serve.scheduler import Worker
from nanochat.serve.transcript import Transcript
from nanochat.tokenizer import Tokenizer
from tests.test_engine import model_of

TOKENIZER = Tokenizer.train(["a b"], 265)
SHORT = Sampling(max_new_tokens=6, seed=1)
LONG = Sampling(max_new_tokens=40, seed=1)


@pytest.fixture
def engine():
    found = Engine(model_of(TOKENIZER), TOKENIZER, slots=2)
    found.ends = set()
    return found


def run(engine, use, **options):
    """Run `use(worker)` on an event loop, then stop the worker."""

    async def main():
        worker = Worker(**options)
        worker.start()
        try:
            return await asyncio.wait_for(use(worker), 120)
        finally:
            worker.stop()
            assert not worker.thread.is_alive()

    return asyncio.run(main())


async def read(reply):
    pieces = []
    while reply.unfinished:
        pieces += await reply.news()
    return pieces


def text_of(pieces, index=0):
    return "".join(piece.text for piece in pieces if piece.index == index)


def test_completion_indices_run_across_all_prompts(engine):
    async def use(worker):
        reply = worker.submit(engine, [Prompt([1, 2], SHORT, n=2), Prompt([3], LONG)])
        pieces = await read(reply)
        assert {p.index for p in pieces} == {0, 1, 2}
        assert [p.finish for p in pieces if p.finish] == ["length"] * 3
        assert list(reply.usage.values()) == [3, 6 + 6 + 40, 3 + 6 + 6 + 40]
        alone = await read(worker.submit(engine, [Prompt([3], LONG)]))
        assert text_of(alone) == text_of(pieces, 2)
        assert 0 < reply.first_seconds

    run(engine, use)


def test_reported_tokens_match_the_text(engine):
    async def use(worker):
        for stop in ((), ("\\x",), None):
            settings = Sampling(max_new_tokens=40, seed=5)
            plain = text_of(await read(worker.submit(engine, [Prompt([7], settings)])))
            if stop is None:
                stop = (plain[9:11],)
            prompt = Prompt([7], settings, stop=stop, parts=False, logprobs=0)
            pieces = await read(worker.submit(engine, [prompt]))
            text, infos = text_of(pieces), [one for piece in pieces for one in piece.tokens]
            assert [one.start for one in infos] == sorted(one.start for one in infos)
            assert not infos or infos[-1].start < len(text)
            specials = Transcript(TOKENIZER).kinds  # start and end tokens of tool calls
            tokens = [one.logprob.token for one in infos if one.logprob.token not in specials]
            assert TOKENIZER.decode(tokens).startswith(text)
            assert not stop or not tokens or len(TOKENIZER.decode(tokens[:-1])) < len(text)
            assert pieces[-1].finish == ("stop" if any(s in plain for s in stop) else "length")

    run(engine, use)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_logprobs_equal_those_of_a_full_forward(engine, length):
    prompt = [(7 * j + 1) % 250 for j in range(length)]
    settings = Sampling(max_new_tokens=6, seed=3, top_k=9)

    async def use(worker):
        echoed = Prompt(prompt, settings, n=3, parts=False, echo_from=0, logprobs=4)
        reply = worker.submit(engine, [echoed, Prompt([5, 6, 7], settings)])
        pieces = await read(reply)
        assert not any(piece.tokens for piece in pieces if piece.index == 3)
        for index, answer in enumerate(reply.answers[:3]):
            ids = [*prompt, *answer.completion.ids]
            found = [one.logprob for p in pieces if p.index == index for one in p.tokens]
            assert [one.token for one in found] == ids and found[0].logprob is None
            logprobs = engine.model(torch.tensor([ids]))[0].log_softmax(-1).detach()
            for i, one in enumerate(found[1:]):
                assert one.logprob == pytest.approx(float(logprobs[i, one.token]), abs=1e-4)
                best = logprobs[i].topk(4)
                assert [token for token, _ in one.top] == best.indices.tolist()
                assert [p for _, p in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)

    run(engine, use)


def test_full_queue_rejects_until_it_drains(engine):
    async def use(worker):
        held = [worker.submit(engine, [Prompt([1], LONG)]) for _ in range(3)]
        assert sum(worker.counts()) == 3 and worker.busy(engine)
        with pytest.raises(ApiError) as full:
            worker.submit(engine, [Prompt([1], SHORT)])
        assert 1 <= int(full.value.headers["Retry-After"]) <= 60
        for reply in held:
            await read(reply)
        assert worker.counts() == (0, 0) and not worker.busy(engine)
        assert await read(worker.submit(engine, [Prompt([1], SHORT)]))

    run(engine, use, max_waiting=1)


def test_closing_a_queued_reply_frees_its_slots(engine):
    async def use(worker):
        for _ in range(20):
            reply = worker.submit(engine, [Prompt([1], LONG, n=2)])
            worker.close(reply)
        while worker.load:
            await asyncio.sleep(0.001)
        assert not engine.busy and not worker.owners and not any(engine.cache.lengths)

    run(engine, use)


def test_engine_failure_affects_only_its_own_replies(engine, monkeypatch):
    other = Engine(model_of(TOKENIZER), TOKENIZER, slots=2)
    other.ends = set()

    async def use(worker):
        monkeypatch.setattr(engine, "step", lambda patience: 1 / 0)
        broken = worker.submit(engine, [Prompt([1], LONG, n=2)])
        whole = worker.submit(other, [Prompt([1], LONG)])
        with pytest.raises(ApiError, match="ZeroDivisionError"):
            await read(broken)
        assert (await read(whole))[-1].finish == "length"
        assert worker.status() == "ok" and not worker.load
        with pytest.raises(ValueError, match="must have 1 to"):
            worker.submit(other, [Prompt([], LONG)])

    run(engine, use)


def test_V11_drain_aborts_replies_after_the_deadline(engine, monkeypatch):
    plain = engine.step
    monkeypatch.setattr(engine, "step", lambda patience: time.sleep(0.05) or plain(patience))

    async def use(worker):
        short, long = (worker.submit(engine, [Prompt([1], s)]) for s in (SHORT, LONG))
        worker.drain(600.0)
        with pytest.raises(ApiError, match="is shutting down"):
            worker.submit(engine, [Prompt([1], SHORT)])
        assert worker.status() == "stopping"
        assert (await read(short))[-1].finish == "length"
        worker.drain(0.0)  # the deadline is over
        with pytest.raises(ApiError, match="shut down"):
            await read(long)
        assert long.usage["completion_tokens"] > 3

    run(engine, use)
    assert not engine.busy


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_crash_ends_all_replies_with_an_error(engine, monkeypatch):
    async def use(worker):
        reply = worker.submit(engine, [Prompt([1], LONG)])
        monkeypatch.setattr(worker, "step", lambda *arguments: 1 / 0)
        with pytest.raises(ApiError, match="thread exited"):
            await read(reply)
        worker.thread.join(60)
        assert worker.status() == "broken"
        with pytest.raises(ApiError, match="restart the server"):
            worker.submit(engine, [Prompt([1], LONG)])

    run(engine, use)


def test_broken_device_fails_every_reply(engine, monkeypatch):
    async def use(worker):
        reply = worker.submit(engine, [Prompt([1, 2, 3], LONG, n=2)])
        assert await reply.news()

        def broken(*arguments):
            raise RuntimeError("device-side assert")

        monkeypatch.setattr(engine.model, "hidden", broken)
        monkeypatch.setattr(engine.cache, "copy", broken)
        with pytest.raises(ApiError, match="device-side"):
            await read(reply)
        again = worker.submit(engine, [Prompt([1, 2, 3], LONG, n=2)])
        with pytest.raises(ApiError, match="device-side"):
            await read(again)
        while worker.load:
            await asyncio.sleep(0.001)
        assert worker.status() == "ok" and not any(engine.cache.lengths)

    run(engine, use)


def test_running_tool_does_not_block_another_model(engine, monkeypatch):
    other = Engine(model_of(TOKENIZER), TOKENIZER, slots=2)
    other.ends = set()
    plain, patience = engine.step, []

    def step(seconds):
        if other.active:
            patience.append(seconds)
        return plain(seconds)

    monkeypatch.setattr(engine, "step", step)

    async def use(worker):
        calling = worker.submit(engine, [Prompt([1], LONG)])
        while not engine.active:
            await asyncio.sleep(0.001)
        engine.active[0].pending_tool_call = Future()
        while not engine.calling:
            await asyncio.sleep(0.001)
        await read(worker.submit(other, [Prompt([1], LONG)]))
        assert not any(patience)  # never waits for the tool while another engine is active
        engine.calling[0].pending_tool_call.set_result(None)
        assert (await read(calling))[-1].finish == "length"

    run(engine, use)


def test_news_returns_an_empty_list_on_timeout(engine, monkeypatch):
    plain = engine.step
    monkeypatch.setattr(engine, "step", lambda patience: time.sleep(0.2) or plain(patience))

    async def use(worker):
        reply = worker.submit(engine, [Prompt([1], SHORT)])
        assert await reply.news(0.01) == []
        assert await reply.news(60)

    run(engine, use)
