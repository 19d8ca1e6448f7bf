"""Ablation arms: the total of the control in other proportions; the Korean study's arms."""

import re

import pytest

from nanochat.common import REPOSITORY
from nanochat.lab.ablation import arm_counts, read_floor
from nanochat.mixture import Tags, read_mixture
from tasks.buckets import parse_task_mixture, tags
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
        ("scale:chat*0.5", {}, [250, 450, 225, 75, 0]),
        ("ratio:language ko:en=1:4", {}, [572, 200, 171, 57, 0]),
        ("ratio:language de:ko=1:2", {}, [500, 200, 150, 50, 100]),
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
        ("swap:gsm8k", "unknown ablation arm"),
        ("copy:x then drop:chat", "a copy cannot be changed"),
        ("drop:chat then drop:none", "bucket 'none' is not in the mixture"),
        ("scale:chat*-1", "'-1' is not a positive number"),
        ("scale:chat*3", "other buckets cannot compensate"),
        ("ratio:language ko:fr=1:1", "no bucket of the mixture has language='fr'"),
        ("ratio:language ko:ko=1:1", "unknown ablation arm"),
        ("ratio:colour ko:en=1:1", "unknown tag colour"),
        ("drop:spare", "equals the control(.|\n)*the changed buckets have count 0"),
        ("swap:spare->chat", "equals the control"),
        ("only:chat", "leaves nothing for chat"),
    ],
)
def test_invalid_arm_error_names_the_fix(arm, message):
    with pytest.raises(ValueError, match=message):
        arm_counts(arm, COUNTS, TAGS, {"arc": 0.6, "gsm8k": 0.4} if arm == "only:chat" else {})


@pytest.mark.parametrize("data", ["public", "standins"])
def test_every_arm_of_the_korean_study_changes_the_mixture(data, tmp_path):
    commands = commands_of("dev/korean_study.sh", tmp_path, DATA=data)
    [sweep] = [flags for script, flags in commands if script == "lab.sweep"]
    flags = dict(flag.lstrip("-").split("=", 1) for flag in sweep)
    spec, declared = read_mixture(str(REPOSITORY / flags["mixture"]))
    parts = parse_task_mixture(spec, declared)
    named = {part.label: tags(part, declared) for part in parts}
    counts = {part.label: part.tokens or 0 for part in parts}
    arms, floor = flags["arms"].split("|"), read_floor(flags["arm_floor"])
    found = [tuple(arm_counts(arm, counts, named, floor).values()) for arm in arms]
    assert len(set(found)) == len(arms) == 21 and tuple(counts.values()) not in found
    for arm, values in zip(arms, found, strict=True):
        korean = sum(
            n for n, each in zip(values, named.values(), strict=True) if each.language == "ko"
        )
        if match := re.search(r"ko:en=1:(\d)", arm):
            assert sum(values) == pytest.approx(korean * (1 + int(match[1])), rel=1e-5)
