"""Ablation arms: the total of the control in other proportions; the Korean study's arms."""

import pytest

from nanochat.common import REPOSITORY
from nanochat.lab.ablation import arm_counts, read_floor
from tasks.buckets import Tags, buckets, read_mixture
from tests.golf.helpers import commands_of

COUNTS = {"chat": 500, "chat-korean": 300, "gsm8k": 150, "arc": 50, "spare": 0}
LANGUAGES = ("en", "ko", "en", "en", "de")
TAGS = {name: Tags(language=code) for name, code in zip(COUNTS, LANGUAGES, strict=True)}


@pytest.mark.parametrize(
    "arm, floor, counts",
    [
        ("copy:again", {}, [500, 300, 150, 50, 0]),
        ("only:gsm8k", {}, [0, 0, 1000, 0, 0]),
        ("only:chat-korean", {"arc": 0.05}, [0, 950, 0, 50, 0]),
        ("only:arc", {"arc": 0.05}, [0, 0, 0, 1000, 0]),
        ("drop:chat", {}, [0, 600, 300, 100, 0]),
        ("swap:gsm8k -> spare", {}, [500, 300, 0, 50, 150]),
        ("swap:gsm8k->chat", {}, [650, 300, 0, 50, 0]),
        ("scale:arc*2", {}, [474, 284, 142, 100, 0]),
        ("ratio:language ko:en=1:4", {}, [571, 200, 172, 57, 0]),
        ("drop:chat then ratio:language ko:en=1:4", {}, [0, 200, 600, 200, 0]),
        ("drop:chat then scale:arc*2 then drop:chat-korean", {}, [0, 0, 571, 429, 0]),
    ],
)
def test_arm_keeps_the_total_of_the_control(arm, floor, counts):
    found = arm_counts(arm, COUNTS, TAGS, floor)
    assert list(found.values()) == counts and sum(counts) == 1000


@pytest.mark.parametrize(
    "arm, message",
    [
        ("none:x", "use one of: copy:name"),
        ("copy:", "unknown ablation arm"),
        ("swap:chat->chat", "unknown ablation arm"),
        ("scale:chat*-1", "unknown ablation arm"),
        ("drop:chat then drop:none", "none is not in the mixture"),
        ("scale:chat*3", "other buckets cannot compensate"),
        ("ratio:language ko:fr=1:1", "lacks tokens with language ko or fr"),
        ("drop:spare", "equals the control(.|\n)*the changed buckets have count 0"),
    ],
)
def test_invalid_arm_error_names_the_fix(arm, message):
    with pytest.raises(ValueError, match=message):
        arm_counts(arm, COUNTS, TAGS, {})


def test_floor_must_leave_tokens():
    with pytest.raises(ValueError, match="must be shares below 100% in total"):
        read_floor("arc=60%,gsm8k=40%")
    with pytest.raises(ValueError, match="other is not in the mixture"):
        arm_counts("only:chat", COUNTS, TAGS, read_floor("other=5%"))


@pytest.mark.parametrize("data", ["public", "standins"])
def test_every_arm_of_the_korean_study_changes_the_mixture(data, tmp_path):
    commands = commands_of("dev/korean_study.sh", tmp_path, DATA=data)
    [sweep] = [flags for script, flags in commands if script == "lab.sweep"]
    flags = dict(flag.lstrip("-").split("=", 1) for flag in sweep)
    spec, declared = read_mixture(str(REPOSITORY / flags["mixture"]))
    parts = buckets(spec, declared)
    named = {part.name: part.tags for part in parts}
    counts = {part.name: part.tokens or 0 for part in parts}
    arms, floor = flags["arms"].split("|"), read_floor(flags["arm_floor"])
    found = {tuple(arm_counts(arm, counts, named, floor).values()) for arm in arms}
    assert len(found) == len(arms) == 21 and tuple(counts.values()) not in found
