"""The watch over the ranks, and how they find each other, with a store of our own."""

import os
import threading
import time

import pytest
import torch.distributed as dist

from nanochat import distributed
from nanochat.common import HUNG
from nanochat.distributed import RankHeartbeat, name_attempt


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def quick(monkeypatch):
    """Beats of 20 ms; the end of the process is an event."""
    ended = threading.Event()

    def end(status):
        assert status == HUNG
        ended.set()
        raise Ended

    monkeypatch.setattr(distributed, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return ended


def test_R16_a_rank_that_fell_silent_is_told_from_one_that_is_at_work(store, quick, capsys):
    watches = [RankHeartbeat(store, rank, 3, timeout_seconds=1.0) for rank in range(3)]
    time.sleep(0.1)
    watches[1].closed.set()  # its process is stopped
    with watches[0].doing("waiting", "the sum of gradients"):
        assert quick.wait(5)
    watches[2].closed.set()
    text = capsys.readouterr().out
    assert "rank 0 has waited 1 s in the sum of gradients" in text
    first, second = text.splitlines()[-1].split("rank 1: ")[1].split("; rank 2: ")
    assert first.startswith("no sign of life for 1 s (process ")
    assert second.startswith("alive (process ") and "at work by itself" in second


def test_R16_waiting_less_than_the_timeout_is_nothing(store, quick):
    watches = [RankHeartbeat(store, rank, 2, timeout_seconds=0.5) for rank in range(2)]
    for _ in range(4):
        with watches[0].doing("waiting", "a barrier"):
            time.sleep(0.3)
    for each in watches:
        each.closed.set()
    assert not quick.is_set()


def test_R16_time_in_which_a_process_was_itself_suspended_is_no_waiting(store, quick):
    watches = [RankHeartbeat(store, rank, 2, timeout_seconds=0.6) for rank in range(2)]
    plain, stopped = watches[0].closed.wait, threading.Event()

    def sleep(seconds):
        if not stopped.is_set():
            stopped.set()
            time.sleep(1.0)  # as SIGSTOP and SIGCONT would
        return plain(seconds)

    with watches[0].doing("waiting", "a barrier"):
        watches[0].closed.wait = sleep
        assert stopped.wait(5)
        time.sleep(1.3)
    for each in watches:
        each.closed.set()
    assert not quick.is_set()


def test_R31_named_work_is_waited_for_until_it_ends(store, quick):
    watches = [RankHeartbeat(store, rank, 3, timeout_seconds=0.5) for rank in range(3)]
    with watches[0].doing("waiting", "a barrier"), watches[1].doing("waiting", "a barrier"):
        with watches[2].doing("working", "packing rows"):
            assert not quick.wait(2)
        assert quick.wait(5)  # it went on with what it does not name
    for each in watches:
        each.closed.set()


def test_R31_of_two_ranks_that_are_waited_for_both_must_name_work(store, quick, capsys):
    watches = [RankHeartbeat(store, rank, 3, timeout_seconds=0.5) for rank in range(3)]
    with watches[0].doing("waiting", "a barrier"), watches[2].doing("working", "packing rows"):
        assert quick.wait(5)
    for each in watches:
        each.closed.set()
    text = capsys.readouterr().out
    assert "rank 1: alive" in text and "at work by itself" in text and "packing rows for" in text


def test_R31_a_rank_whose_beats_stop_in_named_work_is_not_waited_for(store, quick, capsys):
    watches = [RankHeartbeat(store, rank, 3, timeout_seconds=0.5) for rank in range(3)]
    with (
        watches[0].doing("waiting", "a sum"),
        watches[1].doing("working", "a"),
        watches[2].doing("working", "b"),
    ):
        time.sleep(0.1)
        watches[2].closed.set()  # its process is stopped
        assert quick.wait(5)
    watches[1].closed.set()
    assert "no sign of life for" in capsys.readouterr().out


def test_R31_ranks_that_all_wait_for_each_other_end(store, quick):
    watches = [RankHeartbeat(store, rank, 2, timeout_seconds=0.5) for rank in range(2)]
    with watches[0].doing("waiting", "a barrier"), watches[1].doing("waiting", "a sum"):
        assert quick.wait(5)
    for each in watches:
        each.closed.set()


def test_R16_a_launcher_that_is_gone_is_said(quick, capsys):
    class Gone:
        def set(self, key, value):
            raise ConnectionError("reset by peer")

    with RankHeartbeat(Gone(), 0, 2, timeout_seconds=0.3).doing("waiting", "a barrier"):
        assert quick.wait(5)
    assert "the launcher does not answer: ConnectionError" in capsys.readouterr().out


def meet(store, ranks, world_size=3, seconds=5.0):
    """What each rank gets that comes: a name, or its error."""
    found = {}

    def come(rank):
        try:
            found[rank] = name_attempt(store, rank, world_size, seconds)
        except (TimeoutError, dist.DistStoreError) as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_agree_on_a_new_name_whatever_earlier_attempts_left_behind(store):
    names = []
    for ranks in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        found = meet(store, ranks)
        assert set(found) == {0, 1, 2} and len(set(found.values())) == 1
        names.append(found[0])
        store.set("greeting/1", f"of one that died in attempt {len(names)}")
    assert len(set(names)) == 3


def test_ranks_that_do_not_come_are_named(store):
    meet(store, [0, 1, 2])
    found = meet(store, [0, 2], seconds=0.3)
    assert str(found[0]) == "rank 1 of 3 did not join the process group"
    assert isinstance(found[2], dist.DistStoreError)
