"""Mixtures of conversations: notation, amounts, and what is reported about them."""

import json
import re

import pytest

from tasks.buckets import buckets, chat_mixture, read_mixture


def test_mixture_reads_names_sources_counts_and_repeats():
    spec = "SmolTalk:local/chat=10000, gsm8k*1.5,aqua,jsonl:~/own.jsonl=5*3,hub:a/b{x: y, z: w}=2"
    found = buckets(f"{spec},mmlu=3*500t")
    assert [(b.name, b.source, b.rows, b.repeats, b.tokens) for b in found] == [
        ("smoltalk:local/chat", "local/chat", 10_000, 1.0, None),
        ("gsm8k", None, None, 1.5, None),
        ("aqua", None, None, 1.0, None),
        ("jsonl:~/own.jsonl", "~/own.jsonl", 5, 3.0, None),
        ("hub:a/b{x: y, z: w}", "a/b{x: y, z: w}", 2, 1.0, None),
        ("mmlu", None, 3, 1.0, 500),
    ]


@pytest.mark.parametrize("part", ["", "a=0", "a*2=10", "a*-1", "a=1.5", "a=1.2.3", "a=x", "a=5%"])
def test_invalid_part_of_a_mixture_is_named(part):
    with pytest.raises(ValueError, match=re.escape(f"{part!r} in the mixture")):
        buckets(f"gsm8k,{part},aqua*2")


def test_tables_report_shares_by_bucket_and_tag(tmp_path, capsys):
    line = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    (tmp_path / "a.jsonl").write_text(f"{line}\n" * 9)
    file = {"task": "jsonl", "source": str(tmp_path / "a.jsonl"), "domain": "chat"}
    own = {name: {**file, "language": name} for name in ("en", "ko")}
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"mixture": "en,ko*5", "buckets": own}))
    about = {"conversations": 9, "tokens": 200, "trained": 60, "used_tokens": 1000}
    counts = {"en": about, "ko": {**about, "used_tokens": 3000}}
    by_bucket, by_tag = chat_mixture(str(path)).tables(counts)
    assert by_bucket["rows"][1] == ["ko", "chat, ko", "9", "200", "60", "15", "75.0%"]
    assert by_tag["rows"] == [["language", "en", "25.0%"], ["language", "ko", "75.0%"]]
    assert "more than 4 repeats of ko" in capsys.readouterr().out


def test_custom_buckets_are_declared_in_a_file(tmp_path):
    path = tmp_path / "own.json"
    own = {"task": "smoltalk", "source": "a/b", "language": "ko"}
    path.write_text(json.dumps({"mixture": "own*2", "buckets": {"own": own}}))
    assert read_mixture(str(path)) == ("own*2", {"own": own})
    assert read_mixture("a=5,jsonl:own.json") == ("a=5,jsonl:own.json", {})
    for wrong in ({**own, "color": "red"}, {"language": "ko"}, {**own, "domain": 5}):
        path.write_text(json.dumps({"mixture": "own*2", "buckets": {"own": wrong}}))
        with pytest.raises(ValueError, match="own.json: own is .* string values"):
            read_mixture(str(path))
