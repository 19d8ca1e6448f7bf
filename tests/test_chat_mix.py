"""Rows of conversations from several buckets: amounts and order."""

import json
from collections import Counter

import numpy as np
import pytest

from nanochat.chat_packing import choose_conversations, encode, mix_conversations, mixed_chat_rows
from nanochat.dataloader import interleave
from nanochat.finetune import ChatMixture, train_rows
from nanochat.mixture import Tags
from nanochat.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["what is it"], 265)


class Chats(list):
    """Conversations whose text contains their name and index."""

    def __init__(self, name, count, length):
        super().__init__(
            [
                {"role": "user", "content": f"{name}{i:03d}"},
                {"role": "assistant", "content": name * length},
            ]
            for i in range(count)
        )
        self.identity = {"name": name, "count": count, "length": length}


class Bucket:
    def __init__(self, name, count, length, language):
        self.name, self.tags, self.benchmark = name, Tags(language=language), ""
        self.train, self.val = Chats(name, count, length), Chats(name, 5, length)


def encoded(name="a", count=40, length=12):
    chats = Chats(name, count, length)
    return encode(chats.identity, chats, TOKENIZER, 63)


def test_repeats_are_whole_passes_then_a_random_part():
    bucket = encoded()
    total = int(bucket.lengths.sum())
    for times, counts in ((1, {1: 40}), (2, {2: 40}), (1.5, {1: 20, 2: 20}), (0.25, {1: 10})):
        which = choose_conversations(bucket.lengths, round(total * times), 0, 0)
        assert Counter(Counter(which.tolist()).values()) == counts
    assert not len(choose_conversations(bucket.lengths, 0, 0, 0))
    one, other = (
        choose_conversations(bucket.lengths, total // 2, seed, 0).tolist() for seed in (0, 1)
    )
    assert set(one) != set(other)  # seeds choose different halves


def test_chosen_tokens_are_off_by_at_most_half_a_conversation():
    lengths = np.random.default_rng(0).integers(5, 300, 1000)
    for tokens in (100, 5_000, 77_777, 400_000):
        assert abs(lengths[choose_conversations(lengths, tokens, 0, 0)].sum() - tokens) <= 150


def test_any_window_of_a_mixture_keeps_its_proportions():
    sizes = [np.full(600, 3), np.full(100, 6), np.full(30, 20)]
    buckets, numbers = interleave(sizes, seed=0)
    for first in range(0, 700, 73):
        here = Counter(buckets[first : first + 73].tolist())
        for bucket, each in enumerate(sizes):
            assert here[bucket] == pytest.approx(73 * len(each) / 730, abs=2.1)
    for bucket, each in enumerate(sizes):
        assert numbers[buckets == bucket].tolist() == list(range(len(each)))


def test_rows_combine_conversations_of_all_buckets(machine):
    buckets = {"a": encoded("a", 60, 40), "b": encoded("b", 60, 1)}
    tokens = [int(each.lengths.sum()) for each in buckets.values()]
    rows = mixed_chat_rows(buckets, tokens, 0, TOKENIZER, 63)
    counts = rows.counts("train")
    assert counts["documents"] == 120 and counts["dropped"] == 0
    assert counts["tokens"] / (counts["rows"] * 63) > 0.9  # long ones alone would waste a third
    letters = [TOKENIZER.encode(name)[0] for name in buckets]
    both = sum(all((row == letter).any() for letter in letters) for row in rows.batch(0, 10, 0))
    assert both > 5
    again = mixed_chat_rows(buckets, tokens, 0, TOKENIZER, 63)
    assert again.folder == rows.folder
    for other in ([tokens[0], tokens[1] // 2], tokens):
        seed = 1 if other == tokens else 0
        assert mixed_chat_rows(buckets, other, seed, TOKENIZER, 63).folder != rows.folder


def test_order_of_a_mixture_depends_only_on_the_seed():
    buckets = [encoded("a", 30), encoded("b", 30)]
    tokens = [int(each.lengths.sum()) for each in buckets]
    orders = [
        [piece.tolist() for piece in mix_conversations(buckets, tokens, seed)] for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_train_rows_resolves_the_mixture_in_tokens(machine):
    learned = [Bucket("a", 40, 12, "en"), Bucket("b", 40, 12, "ko"), Bucket("c", 40, 12, "ko")]

    def resolved(mixture):
        chats = ChatMixture(mixture, {}, learned, learned)
        return train_rows(chats, 0, TOKENIZER, 63, machine)

    whole, rows = resolved("a,b,c=0%")
    assert whole.shares_by("language") == {"en": 0.5, "ko": 0.5} and whole.documents == 80
    assert rows.counts("train")["documents"] == 80
    share, rows = resolved("a=80%,b=20%,c=0%")
    assert [round(bucket.repeats, 2) for bucket in share.buckets] == [1.0, 0.25, 0.0]
    assert rows.counts("train")["documents"] == 50
    json.dumps(share.state())
    tokens = share.buckets[1].tokens
    swapped, rows = resolved(f"a={share.buckets[0].tokens}t,b=0%,c={tokens}t")
    assert [round(bucket.repeats, 2) for bucket in swapped.buckets] == [1.0, 0.0, 0.25]
    assert [bucket.tokens for bucket in swapped.buckets] == [share.buckets[0].tokens, 0, tokens]
    assert swapped.tokens == share.tokens and rows.counts("train")["documents"] == 50
    assert resolved(f"a={tokens}t,b=0%,c=0%")[0].tokens == tokens


def test_conversations_are_encoded_once_for_all_mixtures(monkeypatch):
    first = encoded()
    monkeypatch.setattr("nanochat.chat_packing.render", None)  # would fail if it were called
    again = encoded()
    assert again.fingerprint == first.fingerprint and again.trained == first.trained
    assert np.array_equal(again.ids, first.ids)
