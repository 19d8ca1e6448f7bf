"""Rank heartbeats and rendezvous, with a local store."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from nanochat import distributed
from nanochat.common import HUNG
from nanochat.distributed import RankHeartbeat, name_attempt


class Ended(BaseException):
    """Raised instead of ending the process."""


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def quick(monkeypatch):
    """Heartbeats every 20 ms; returns an event that is set when the process would exit."""
    ended = threading.Event()

    def end(status):
        assert status == HUNG
        ended.set()
        raise Ended

    monkeypatch.setattr(distributed, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return ended


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves, for heartbeats sent by hand; returns [seconds]."""
    now, no_thread = [0.0], SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(distributed, "time", SimpleNamespace(monotonic=lambda: now[0]))
    quiet = SimpleNamespace(Event=threading.Event, Thread=lambda **options: no_thread)
    monkeypatch.setattr(distributed, "threading", quiet)
    return now


def by_hand(store, world_size, timeout_seconds):
    """Heartbeats without threads, each sent once; needs the fixture `clock`."""
    found = [RankHeartbeat(store, rank, world_size, timeout_seconds) for rank in range(world_size)]
    for each in found:
        each.beat()
    return found


def test_R16_silent_rank_is_distinguished_from_busy_rank(store, quick, capsys):
    heartbeats = [RankHeartbeat(store, rank, 3, timeout_seconds=1.0) for rank in range(3)]
    time.sleep(0.1)
    heartbeats[1].closed.set()  # as if its process were stopped
    with heartbeats[0].doing("waiting", "gradient reduction"):
        assert quick.wait(60)
    heartbeats[2].closed.set()
    text = capsys.readouterr().out
    assert "rank 0 has waited 1 s in gradient reduction" in text
    first, second = text.splitlines()[-1].split("rank 1: ")[1].split("; rank 2: ")
    assert first.startswith("no heartbeat for 1 s (process ")
    assert second.startswith("alive (process ") and "unreported work" in second


def test_R16_waits_shorter_than_timeout_are_ignored(store, quick, clock):
    waiting, other = by_hand(store, 2, timeout_seconds=0.5)
    for _ in range(4):
        with waiting.doing("waiting", "barrier"):
            clock[0] += 0.3
            waiting.beat()
            waiting.check()
    with pytest.raises(Ended), waiting.doing("waiting", "barrier"):
        clock[0] += 0.6
        waiting.check()


def test_R16_suspended_time_does_not_count_as_waiting(store, quick, clock):
    waiting, other = by_hand(store, 2, timeout_seconds=0.6)
    pauses = [1.0, 0.1, 0.1, 0.1, 0.1]  # the first one like SIGSTOP and SIGCONT

    def wait(seconds):
        clock[0] += pauses.pop(0)

    waiting.closed = SimpleNamespace(is_set=lambda: not pauses, wait=wait)
    with waiting.doing("waiting", "barrier"):
        waiting.run()
        pauses += [0.1] * 4
        with pytest.raises(Ended):
            waiting.run()


def test_R31_wait_is_extended_while_work_is_reported(store, quick, clock):
    ranks = by_hand(store, 3, timeout_seconds=0.5)

    def pass_time():
        for _ in range(8):
            clock[0] += 0.25
            for rank in ranks:
                rank.beat()
            ranks[0].check()

    with ranks[0].doing("waiting", "barrier"), ranks[1].doing("waiting", "barrier"):
        with ranks[2].doing("working", "packing rows"):
            pass_time()
        with pytest.raises(Ended):
            pass_time()  # rank 2 goes on, reporting no work


def test_R31_both_awaited_ranks_must_report_work(store, quick, capsys):
    heartbeats = [RankHeartbeat(store, rank, 3, timeout_seconds=0.5) for rank in range(3)]
    with heartbeats[0].doing("waiting", "barrier"), heartbeats[2].doing("working", "packing rows"):
        assert quick.wait(60)
    for each in heartbeats:
        each.closed.set()
    text = capsys.readouterr().out
    assert "rank 1: alive" in text and "unreported work" in text and "packing rows for" in text


def test_R31_wait_ends_if_heartbeats_stop_during_work(store, quick, capsys):
    heartbeats = [RankHeartbeat(store, rank, 3, timeout_seconds=0.5) for rank in range(3)]
    with (
        heartbeats[0].doing("waiting", "all-reduce"),
        heartbeats[1].doing("working", "a"),
        heartbeats[2].doing("working", "b"),
    ):
        time.sleep(0.1)
        heartbeats[2].closed.set()  # as if its process were stopped
        assert quick.wait(60)
    heartbeats[1].closed.set()
    assert "no heartbeat for" in capsys.readouterr().out


def test_R31_ranks_waiting_for_each_other_exit(store, quick):
    heartbeats = [RankHeartbeat(store, rank, 2, timeout_seconds=0.5) for rank in range(2)]
    with heartbeats[0].doing("waiting", "barrier"), heartbeats[1].doing("waiting", "all-reduce"):
        assert quick.wait(60)
    for each in heartbeats:
        each.closed.set()


def test_R16_unreachable_launcher_is_reported(quick, capsys):
    class Gone:
        def set(self, key, value):
            raise ConnectionError("reset by peer")

    with RankHeartbeat(Gone(), 0, 2, timeout_seconds=0.3).doing("waiting", "barrier"):
        assert quick.wait(60)
    assert "launcher unreachable: ConnectionError" in capsys.readouterr().out


def join_ranks(store, ranks, world_size=3, seconds=5.0):
    """Call `name_attempt` on these ranks; returns the name or error of each."""
    found = {}

    def join(rank):
        try:
            found[rank] = name_attempt(store, rank, world_size, seconds)
        except (TimeoutError, dist.DistStoreError) as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_attempt_name_is_new_despite_stale_store_keys(store):
    names = []
    for ranks in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        found = join_ranks(store, ranks)
        assert set(found) == {0, 1, 2} and len(set(found.values())) == 1
        names.append(found[0])
        store.set("greeting/1", f"token of a rank that died in attempt {len(names)}")
    assert len(set(names)) == 3


def test_error_names_missing_ranks(store):
    join_ranks(store, [0, 1, 2])
    found = join_ranks(store, [0, 2], seconds=0.3)
    assert str(found[0]) == "rank 1 of 3 did not join the process group"
    assert isinstance(found[2], dist.DistStoreError)
