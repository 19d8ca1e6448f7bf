"""The thread of the engines: what its readers get, and that it never keeps what nobody reads."""

import asyncio
import time
from concurrent.futures import Future

import pytest
import torch

from nanochat.engine import Engine, Sampling
from nanochat.serve.openai_api import ApiError
from nanochat.serve.scheduler import (
    GenerationRequest as Prompt,
)
from nanochat.serve.scheduler import (
    Worker,
)
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
    """Run `use(worker)` on an event loop with a worker that is stopped in the end."""

    async def main():
        worker = Worker(**options)
        worker.start()
        try:
            return await asyncio.wait_for(use(worker), 20)
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


def test_a_reply_has_the_answers_to_all_its_prompts_numbered_through(engine):
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


def test_the_tokens_that_are_told_are_those_of_the_text(engine):
    async def use(worker):
        for stop in ((), ("\\x",), None):
            settings = Sampling(max_new_tokens=40, seed=5)
            plain = text_of(await read(worker.submit(engine, [Prompt([7], settings)])))
            if stop is None:
                stop = (plain[9:11],)
            ask = Prompt([7], settings, stop=stop, parts=False, logprobs=0)
            pieces = await read(worker.submit(engine, [ask]))
            text, said = text_of(pieces), [one for piece in pieces for one in piece.tokens]
            assert [one.start for one in said] == sorted(one.start for one in said)
            assert not said or said[-1].start < len(text)
            specials = Transcript(TOKENIZER).kinds  # which begin and end a tool's part
            tokens = [one.logprob.token for one in said if one.logprob.token not in specials]
            assert TOKENIZER.decode(tokens).startswith(text)
            assert not stop or not tokens or len(TOKENIZER.decode(tokens[:-1])) < len(text)
            assert pieces[-1].finish == ("stop" if any(s in plain for s in stop) else "length")

    run(engine, use)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_logprobs_are_those_of_a_full_forward_for_prompt_and_answer(engine, length):
    prompt = [(7 * j + 1) % 250 for j in range(length)]
    settings = Sampling(max_new_tokens=6, seed=3, top_k=9)

    async def use(worker):
        asked = Prompt(prompt, settings, n=3, parts=False, echo_from=0, logprobs=4)
        reply = worker.submit(engine, [asked, Prompt([5, 6, 7], settings)])
        pieces = await read(reply)
        assert not any(piece.tokens for piece in pieces if piece.index == 3)
        for index, answer in enumerate(reply.answers[:3]):
            ids = [*prompt, *answer.completion.ids]
            told = [one.logprob for p in pieces if p.index == index for one in p.tokens]
            assert [one.token for one in told] == ids and told[0].logprob is None
            logprobs = engine.model(torch.tensor([ids]))[0].log_softmax(-1).detach()
            for at, one in enumerate(told[1:]):
                assert one.logprob == pytest.approx(float(logprobs[at, one.token]), abs=1e-4)
                best = logprobs[at].topk(4)
                assert [token for token, _ in one.top] == best.indices.tolist()
                assert [p for _, p in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)

    run(engine, use)


def test_a_full_queue_refuses_and_has_room_again(engine):
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


def test_a_closed_reply_frees_its_slots_even_before_it_began(engine):
    async def use(worker):
        for _ in range(20):
            reply = worker.submit(engine, [Prompt([1], LONG, n=2)])
            worker.close(reply)
        while worker.load:
            await asyncio.sleep(0.001)
        assert not engine.busy and not worker.owners and not any(engine.cache.lengths)

    run(engine, use)


def test_what_fails_is_told_to_those_it_concerns_alone(engine, monkeypatch):
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
        with pytest.raises(ValueError, match="at least one"):
            worker.submit(other, [Prompt([], LONG)])

    run(engine, use)


def test_V11_draining_lets_answers_end_and_then_ends_them(engine, monkeypatch):
    plain = engine.step
    monkeypatch.setattr(engine, "step", lambda patience: time.sleep(0.02) or plain(patience))

    async def use(worker):
        short, long = (worker.submit(engine, [Prompt([1], s)]) for s in (SHORT, LONG))
        worker.drain(0.3)
        with pytest.raises(ApiError, match="stopped"):
            worker.submit(engine, [Prompt([1], SHORT)])
        assert worker.status() == "stopping"
        assert (await read(short))[-1].finish == "length"
        with pytest.raises(ApiError, match="stopped"):
            await read(long)
        assert long.usage["completion_tokens"] > 3

    run(engine, use)
    assert not engine.busy


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_is_left_waiting_when_the_thread_itself_fails(engine, monkeypatch):
    async def use(worker):
        reply = worker.submit(engine, [Prompt([1], LONG)])
        monkeypatch.setattr(worker, "step", lambda *arguments: 1 / 0)
        with pytest.raises(ApiError, match="ended"):
            await read(reply)
        worker.thread.join(5)
        assert worker.status() == "broken"
        with pytest.raises(ApiError, match="must be restarted"):
            worker.submit(engine, [Prompt([1], LONG)])

    run(engine, use)


def test_a_device_that_is_broken_for_good_leaves_nobody_waiting(engine, monkeypatch):
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


def test_a_tool_at_work_does_not_hold_up_another_model(engine, monkeypatch):
    other = Engine(model_of(TOKENIZER), TOKENIZER, slots=2)
    other.ends = set()
    plain, patience = engine.step, []

    def step(seconds):
        if other.active:
            patience.append(seconds)
        return plain(seconds)

    monkeypatch.setattr(engine, "step", step)

    async def use(worker):
        away = worker.submit(engine, [Prompt([1], LONG)])
        while not engine.active:
            await asyncio.sleep(0.001)
        engine.active[0].pending_tool_call = Future()
        while not engine.calling:
            await asyncio.sleep(0.001)
        await read(worker.submit(other, [Prompt([1], LONG)]))
        assert not any(patience)  # it waits for the tool only where nobody else generates
        engine.calling[0].pending_tool_call.set_result(None)
        assert (await read(away))[-1].finish == "length"

    run(engine, use)


def test_a_reader_that_waits_in_vain_is_told_so(engine, monkeypatch):
    plain = engine.step
    monkeypatch.setattr(engine, "step", lambda patience: time.sleep(0.2) or plain(patience))

    async def use(worker):
        reply = worker.submit(engine, [Prompt([1], SHORT)])
        assert await reply.news(0.01) == []
        assert await reply.news(60)

    run(engine, use)
