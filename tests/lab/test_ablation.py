"""Ablation arms: same total, different proportions."""

import pytest

from nanochat.lab.ablation import arm_counts, read_floor
from nanochat.mixture import Tags

COUNTS = {"chat": 500, "chat-korean": 300, "gsm8k": 150, "arc": 50, "spare": 0}
TAGS = {
    "chat": Tags(language="en"),
    "chat-korean": Tags(language="ko"),
    "gsm8k": Tags(language="en"),
    "arc": Tags(language="en"),
    "spare": Tags(language="de"),
}


def arm(words, floor=""):
    found = arm_counts(words, COUNTS, TAGS, read_floor(floor))
    assert sum(found.values()) == 1000 and list(found) == list(COUNTS)
    return list(found.values())


def test_arms_keep_the_control_total():
    assert arm("copy:again") == [500, 300, 150, 50, 0]
    assert arm("only:gsm8k") == [0, 0, 1000, 0, 0]
    assert arm("only:chat-korean", "arc=5%") == [0, 950, 0, 50, 0]
    assert arm("only:arc", "arc=5%") == [0, 0, 0, 1000, 0]
    assert arm("drop:chat") == [0, 600, 300, 100, 0]
    assert arm("swap:gsm8k->spare") == [500, 300, 0, 50, 150]
    assert arm("swap:gsm8k -> chat") == [650, 300, 0, 50, 0]
    assert arm("scale:arc*2") == [474, 284, 142, 100, 0]
    assert arm("scale:chat*0.5") == [250, 450, 225, 75, 0]
    assert arm("ratio:language ko:en=1:1") == [357, 500, 107, 36, 0]
    assert arm("ratio:language ko:en=1:4") == [572, 200, 171, 57, 0]
    assert arm("drop:chat then ratio:language ko:en=1:4") == [0, 200, 600, 200, 0]
    assert arm("drop:chat then scale:arc*2 then drop:chat-korean") == [0, 0, 571, 429, 0]


@pytest.mark.parametrize(
    "words, message",
    [
        ("none:x", "unknown ablation arm.*use one of: copy:name"),
        ("copy:", "unknown ablation arm"),
        ("swap:gsm8k", "unknown ablation arm"),
        ("copy:x then drop:chat", "unknown ablation arm"),
        ("drop:chat then drop:none", "bucket 'none' is not in the mixture"),
        ("only:gsm", "bucket 'gsm' is not in the mixture .chat"),
        ("scale:chat*-1", "'-1' is not a positive number"),
        ("scale:chat*3", "other buckets cannot compensate"),
        ("ratio:language ko:fr=1:1", "no bucket of the mixture has language='fr'"),
        ("ratio:language ko:ko=1:1", "unknown ablation arm"),
        ("ratio:colour ko:en=1:1", "unknown tag colour"),
        ("scale:spare*2", "equals the control(.|\n)*the changed buckets have count 0"),
        ("drop:spare", "equals the control"),
        ("swap:spare->chat", "equals the control"),
    ],
)
def test_invalid_arm_error_suggests_a_fix(words, message):
    with pytest.raises(ValueError, match=message):
        arm(words)


def test_ratio_splits_evenly_among_empty_buckets():
    assert arm("ratio:language de:ko=1:2") == [500, 200, 150, 50, 100]


def test_floor_of_all_tokens_is_rejected():
    with pytest.raises(ValueError, match="leaves nothing for chat"):
        arm("only:chat", "arc=60%,gsm8k=40%")


def test_floor_with_unknown_bucket_is_rejected():
    with pytest.raises(ValueError, match="floor arcs.* bucket 'arcs' is not in the mixture"):
        arm("drop:chat", "arcs=5%")


def test_floor_must_consist_of_shares():
    with pytest.raises(ValueError, match="must consist of shares"):
        read_floor("arc=50")
