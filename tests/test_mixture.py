"""Mixtures of conversations: notation, amounts, and what is reported about them."""

import json
import re

import pytest

from nanochat.mixture import Part, Resolution, Resolved, Tags, parse_mixture, read_mixture, resolve


def test_parse_mixture_reads_names_sources_counts_and_repeats():
    spec = "SmolTalk:local/chat=10000, gsm8k*1.5,aqua,jsonl:~/own.jsonl=5*3,hub:a/b{x: y, z: w}=2"
    assert parse_mixture(spec) == [
        Part("SmolTalk", "local/chat", rows=10_000),
        Part("gsm8k", repeats=1.5),
        Part("aqua"),
        Part("jsonl", "~/own.jsonl", rows=5, repeats=3),
        Part("hub", "a/b{x: y, z: w}", rows=2),
    ]


@pytest.mark.parametrize("part", ["", "a=0", "a*0", "a*2=10", "a*-1", "a=1.5", "a=1.2.3", "a=x"])
def test_invalid_part_of_a_mixture_is_named(part):
    with pytest.raises(ValueError, match=re.escape(f"{part!r} in the mixture")):
        parse_mixture(f"b,{part},c*2")


def test_amounts_resolve_to_whole_counts():
    parts = parse_mixture("a,b*2,c*1.5,d=5,e*.5")
    assert resolve(parts, [100, 7, 3, 5, 9]) == [100, 14, 5, 5, 4]  # from 4.5 and 4.5
    with pytest.raises(ValueError, match="b gets under"):
        resolve(parse_mixture("a,b"), [1000, 0])


def test_resolution_reports_shares_and_too_many_repeats():
    korean = Tags(language="ko", domain="chat")
    english = Resolved("a", Tags(language="en", domain="chat"), 1000, 1000, 300, trained=400)
    mixed = Resolution("a,b*5", [english, Resolved("b", korean, 200, 1000, 50, trained=60)])
    by_bucket, by_tag = mixed.tables()
    assert by_bucket["rows"][1] == ["b", "chat, ko", "50", "1,000", "300", "5.00", "50.0%"]
    assert by_tag["rows"] == [["language", "en", "50.0%"], ["language", "ko", "50.0%"]]
    assert "b is used 5.0 times per epoch" in str(mixed) and mixed.documents == 300 + 5 * 50
    assert Resolution("b*4", [Resolved("b", korean, 200, 800, 50)]).warnings == []


def test_custom_buckets_are_declared_in_a_file(tmp_path):
    path = tmp_path / "own.json"
    own = {"task": "smoltalk", "source": "a/b", "language": "ko"}
    path.write_text(json.dumps({"mixture": "own*2", "buckets": {"own": own}}))
    assert read_mixture(str(path)) == ("own*2", {"own": own})
    assert read_mixture("a=5,jsonl:own.json") == ("a=5,jsonl:own.json", {})
    for wrong in ({"color": "red"}, {"dataset": "a"}):
        path.write_text(json.dumps({"mixture": "own*2", "buckets": {"own": own | wrong}}))
        with pytest.raises(ValueError, match="own.json: own (has invalid|must have exactly one)"):
            read_mixture(str(path))
