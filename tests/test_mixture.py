"""Mixtures: notation, resolution to amounts, and mixed rows."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nanochat.chat_packing import encode, open_chat_rows, pack_encoded
from nanochat.dataloader import MixedRows, Rows, diff_recipe, order_of_pass
from nanochat.lab.study import with_tokens
from nanochat.mixture import (
    Part,
    Resolution,
    Resolved,
    Tags,
    parse_budget,
    parse_mixture,
    read_mixture,
    resolve,
)
from nanochat.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["what is it"], 265)


def bucket_of(name: str, num_chats: int) -> Rows:
    """Packed rows of 63 tokens, each with one distinct conversation."""
    chats = [
        [{"role": "user", "content": f"{i} {name}"}, {"role": "assistant", "content": "a" * 50}]
        for i in range(num_chats)
    ]
    rows = open_chat_rows({"rows": name, "n": num_chats}, TOKENIZER, 63)
    pack_encoded(
        rows, "train", encode({"name": name, "n": num_chats}, chats, TOKENIZER, 63), TOKENIZER
    )
    assert rows.packed_train_rows == num_chats
    return rows


# ------------------------------------------------------------------------------------------------
# Notation


def test_parse_mixture_reads_all_amounts():
    spec = (
        "SmolTalk:local/chat=10000, gsm8k*1.5,aqua,jsonl:~/own.jsonl=5*3,local/web=20%,x=900t,"
        "y=50*700t,z=50*0t"
    )
    assert parse_mixture(spec) == [
        Part("SmolTalk", "local/chat", rows=10_000),
        Part("gsm8k", repeats=1.5),
        Part("aqua"),
        Part("jsonl", "~/own.jsonl", rows=5, repeats=3),
        Part("local/web", share=0.2),
        Part("x", tokens=900),
        Part("y", rows=50, tokens=700),
        Part("z", rows=50, tokens=0),
    ]


@pytest.mark.parametrize(
    "spec",
    [
        *("", "a,,b", "a=0", "a*0", "a*2=10", "a*-1", "a=1.5", "a=10%*2", "a=5t*2", "a=1.2.3"),
        *("a=0t", "a*5t", "a=5t*5t", "a=5%*5t", "a=5*1.5t", "a=0*5t"),
    ],
)
def test_invalid_mixture_error_names_the_part(spec):
    with pytest.raises(ValueError, match="in the mixture .* (must be name|has amount 0)"):
        parse_mixture(spec)


# ------------------------------------------------------------------------------------------------
# Amounts


def counts(spec, available, budget=None, alpha=1.0):
    return resolve(parse_mixture(spec), available, 10, budget, alpha)


def test_amounts_resolve_to_whole_rows():
    assert counts("a,b*2,c*1.5,d=55t", [100, 7, 3, 40]) == [100, 14, 5, 5]  # from 4.5 and 5.5
    assert counts("a,b=20%", [80, 500]) == [80, 20]  # a fifth of the total
    assert counts("a=75%,b=25%", [30, 20]) == [30, 10]  # until the first runs out
    assert counts("a=75%,b=25%", [30, 20], budget=4_000) == [300, 100]
    assert counts("a,b,c=100t", [300, 100, 50], budget=2_100) == [150, 50, 10]
    assert sum(counts("a,b,c", [333, 334, 334], budget=1_000)) == 100


def test_power_moves_shares_from_proportional_to_equal():
    assert counts("a,b", [900, 100], alpha=1.0) == [900, 100]
    assert counts("a,b", [900, 100], alpha=0.5) == [750, 250]
    assert counts("a,b", [900, 100], alpha=0.0) == [500, 500]
    assert counts("a,b,c*1", [900, 100, 50], alpha=0.0) == [500, 500, 50]  # c is fixed


@pytest.mark.parametrize(
    "spec, available, budget, message",
    [
        ("a=60%,b=60%", [9, 9], None, "add up to 120.0%: too much"),
        ("a=100%,b", [9, 9], None, "add up to 100.0%: too much"),
        ("a=30%,b=30%", [9, 9], None, "add up to 60.0%, not 100%"),
        ("a*2,b*2", [9, 9], 1_000, "leave 640 for"),
        ("a*2,b", [90, 9], 1_000, "leave -800 for"),
        ("a,b=1t", [1000, 9], None, "b gets under 10 tokens"),
        ("a,b", [1000, 0], None, "b gets under"),
    ],
)
def test_contradictory_amounts_are_rejected(spec, available, budget, message):
    with pytest.raises(ValueError, match=message):
        counts(spec, available, budget)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["", "*1.5", "=400t"]), st.integers(50, 5000)), min_size=1),
    st.floats(0, 1),
)
def test_resolved_rows_add_up_to_the_amounts(buckets, alpha):
    spec = ",".join(f"b{i}{amount}" for i, (amount, _) in enumerate(buckets))
    available = [n for _, n in buckets]
    found = counts(spec, available, alpha=alpha)
    wanted = [{"": n, "*1.5": 1.5 * n, "=400t": 40}[amount] for amount, n in buckets]
    assert abs(sum(found) - math.fsum(wanted)) <= 0.5 + 1e-6
    for (amount, _), count, want in zip(buckets, found, wanted, strict=True):
        assert not amount or abs(count - want) < 1 + 1e-6


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([1, 64, 2048]),
)
def test_explicit_tokens_resolve_exactly(buckets, row_tokens):
    """Conversations are counted in tokens, text in rows of `row_tokens`."""
    assume(any(count for count, _ in buckets))
    counts = [count for count, _ in buckets]
    parts = [Part(f"b{i}", rows=7 if has_rows else None) for i, (_, has_rows) in enumerate(buckets)]
    words = [with_tokens(part, n * row_tokens) for part, n in zip(parts, counts, strict=True)]
    parts = parse_mixture(",".join(words))
    for budget in (None, sum(counts) * row_tokens):
        assert resolve(parts, [5000] * len(parts), row_tokens, budget) == counts


def test_resolution_has_tag_shares_and_repeat_warning():
    ko = Tags(language="ko", domain="chat")
    mixed = Resolution(
        "a,b*5",
        [
            Resolved("a", replace(ko, language="en"), 1000, 1000, 300, trained=400),
            Resolved("b", ko, 200, 1000, 50, trained=60),
        ],
    )
    assert mixed.shares_by("language") == {"en": 0.5, "ko": 0.5}
    assert mixed.shares_by("domain") == {"chat": 1.0}
    assert mixed.documents == 300 + 5 * 50
    by_bucket, by_tag = mixed.tables()
    assert by_bucket["rows"][1] == ["b", "chat, ko", "50", "1,000", "300", "5.00", "50.0%"]
    assert by_tag["rows"] == [["language", "en", "50.0%"], ["language", "ko", "50.0%"]]
    assert mixed.warnings == ["warning: b is used 5.0 times per epoch; above 4, returns diminish"]
    json.dumps(mixed.state())


@pytest.mark.parametrize(("tokens", "warned"), [(50, False), (51, True)])
def test_added_options_over_5_percent_give_warning(tokens, warned):
    plain = Resolved("a", Tags(augmented="order"), 1000, 1000 - tokens, 9)
    options = Resolved("b", Tags(augmented="options"), 1000, tokens, 9)
    warnings = Resolution("a,b", [plain, options]).warnings
    assert [line for line in warnings if "5%" in line and "retrieval" in line] == warnings
    assert bool(warnings) == warned


# ------------------------------------------------------------------------------------------------
# Rows


def test_each_pass_has_the_specified_amounts_evenly_spread():
    mixed = MixedRows({"a": (bucket_of("a", 40), 60), "b": (bucket_of("b", 20), 20)})
    assert mixed.rows_per_pass == 80
    ids = np.concatenate([mixed.row_ids(step, 8, seed=0)[:, 1:] for step in range(10)])
    taken = Counter(map(tuple, ids.tolist()))
    assert set(Counter(n for (b, _, _), n in taken.items() if b == 1).items()) == {(1, 20)}
    assert Counter(n for (b, _, _), n in taken.items() if b == 0) == {1: 20, 2: 20}  # 1.5 times
    for step in range(10):
        assert 1 <= (mixed.row_ids(step, 8, seed=0)[:, 1] == 1).sum() <= 3  # 2 of 8 on average
    first = Counter(map(tuple, ids[ids[:, 0] == 0].tolist()))
    again = np.concatenate([mixed.row_ids(10 + step, 8, seed=0)[:, 1:] for step in range(10)])
    both = first + Counter(map(tuple, again[again[:, 0] == 0].tolist()))
    assert set(both.values()) == {3}  # the second pass starts with the unused half


def test_R4_mixed_batch_is_reproducible_and_split_among_ranks():
    def opened():
        return MixedRows({"a": (bucket_of("a", 40), 60), "b": (bucket_of("b", 20), 20)})

    mixed, again = opened(), opened()
    for step in (13, 2, 0):
        whole = mixed.batch(step, 16, seed=3)
        assert np.array_equal(whole, again.batch(step, 16, seed=3))
        parts = [again.read(ids) for ids in np.split(again.row_ids(step, 16, seed=3), 4)]
        assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(mixed.batch(0, 16, seed=3), mixed.batch(0, 16, seed=4))


def test_mixture_of_one_bucket_equals_that_bucket():
    rows = bucket_of("a", 40)
    mixed = MixedRows({"a": (rows, 40)})
    for step in range(7):
        assert np.array_equal(mixed.batch(step, 8, seed=1), rows.batch(step, 8, seed=1))


def test_row_ids_count_earlier_uses_of_each_row():
    mixed = MixedRows({"a": (bucket_of("a", 40), 60), "b": (bucket_of("b", 20), 20)})
    seen: Counter = Counter()
    for step in range(20):
        for uses, bucket, shard, row in mixed.row_ids(step, 8, seed=0).tolist():
            assert uses == seen[bucket, shard, row]
            seen[bucket, shard, row] += 1


def test_fingerprint_depends_on_proportions():
    a, b = bucket_of("a", 40), bucket_of("b", 20)
    one, other = (MixedRows({"a": (a, n), "b": (b, 20)}) for n in (60, 40))
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == MixedRows({"a": (a, 60), "b": (b, 20)}).fingerprint
    assert one.recipe["buckets"]["a"] == {"count": 60, "fingerprint": a.fingerprint}
    changed = diff_recipe({"rows": one.recipe}, {"rows": other.recipe})
    assert changed == ["rows.buckets.a.count: was 60, now 40"]


def test_order_of_a_mixture_never_changes():
    """Resuming needs this; numpy guarantees the raw PCG64 stream."""
    bucket, number = order_of_pass((5, 3), seed=0, number=0)
    assert bucket.tolist() == [1, 0, 0, 0, 1, 0, 1, 0]
    assert number.tolist() == [0, 0, 1, 2, 1, 3, 2, 4]


# ------------------------------------------------------------------------------------------------
# Custom buckets


def test_custom_buckets_are_declared_in_a_file(tmp_path):
    path = tmp_path / "own.json"

    def read(buckets):
        path.write_text('{"mixture": "chat-korean=50%", "buckets": ' + buckets + "}")
        return read_mixture(str(path))

    spec, declared = read(
        '{"chat-korean": {"task": "smoltalk", "source": "a/b", "language": "ko"}}'
    )
    assert spec == "chat-korean=50%" and declared["chat-korean"]["language"] == "ko"
    assert read_mixture("a=5,jsonl:own.json") == ("a=5,jsonl:own.json", {})
    for wrong, message in (
        ('{"x": {"language": "ko"}}', "x must have exactly one of task and dataset"),
        ('{"x": {"task": "arc_easy", "color": "red"}}', "x has invalid {'color': 'red'}; use only"),
        ('{}, "more": 1', "must be .*mixture.*buckets"),
    ):
        with pytest.raises(ValueError, match=message):
            read(wrong)
    with pytest.raises(FileNotFoundError, match="nowhere.json"):
        read_mixture("nowhere.json")


def test_parse_budget_reads_tokens_and_power():
    for end, budget in (("", (None, 1.0)), ("@900t", (900, 1.0)), ("@^.5", (None, 0.5))):
        assert tuple(parse_budget(f"a,b=20%{end}").values()) == budget
        assert parse_mixture(f"a,b=20%{end}") == [Part("a"), Part("b", share=0.2)]
    assert parse_budget("a@900t^0") == {"mixture_tokens": 900, "mixture_alpha": 0.0}
    for wrong in ("a@0t", "a@^1.5"):
        with pytest.raises(ValueError, match=r"1 token, its power in \[0, 1\]"):
            parse_budget(wrong)
    for wrong in ("a@", "a@900", "a@^-0.1", "a@^", "a@5%"):
        with pytest.raises(ValueError, match="in the mixture .* must be name"):
            parse_mixture(wrong)
