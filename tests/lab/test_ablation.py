"""Arms of an ablation: the same tokens, other proportions."""

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


def test_every_arm_has_the_tokens_of_the_control():
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


@pytest.mark.parametrize(
    "words, message",
    [
        ("none:x", "is no arm; there are copy:name"),
        ("copy:", "is no arm"),
        ("swap:gsm8k", "is no arm"),
        ("only:gsm", "names 'gsm', but the buckets of the mixture are chat"),
        ("scale:chat*-1", "'-1' is no positive number"),
        ("scale:chat*3", "leaves nothing for the other buckets"),
        ("ratio:language ko:fr=1:1", "no bucket of the mixture has the language 'fr'"),
        ("ratio:language ko:ko=1:1", "is no arm"),
        ("ratio:colour ko:en=1:1", "there is no tag colour"),
        ("scale:spare*2", "is the control(.|\n)*what it changes has a count of 0 there"),
        ("drop:spare", "is the control"),
        ("swap:spare->chat", "is the control"),
    ],
)
def test_an_arm_that_is_none_is_refused_with_the_way_out(words, message):
    with pytest.raises(ValueError, match=message):
        arm(words)


def test_buckets_that_the_control_has_none_of_share_a_ratio_alike():
    assert arm("ratio:language de:ko=1:2") == [500, 200, 150, 50, 100]


def test_a_floor_leaves_something():
    with pytest.raises(ValueError, match="leaves nothing of chat"):
        arm("only:chat", "arc=60%,gsm8k=40%")


def test_a_floor_names_buckets_of_the_mixture():
    with pytest.raises(ValueError, match="the floor arcs.* names 'arcs', but the buckets"):
        arm("drop:chat", "arcs=5%")


def test_a_floor_is_made_of_shares():
    with pytest.raises(ValueError, match="a floor is made of shares"):
        read_floor("arc=50")
