"""The Korean study: its two mixtures, its arms, and its bases."""

import re
import subprocess

import pytest

from nanochat.common import REPOSITORY
from nanochat.lab.ablation import arm_counts, read_floor
from nanochat.mixture import read_mixture
from tasks.buckets import parse_task_mixture, tags

STUDY = REPOSITORY / "dev/korean_study.sh"


def arms_of_study() -> list[str]:
    lines = STUDY.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("buckets="))
    last = next(i for i, line in enumerate(lines) if line.startswith("for bucket"))
    script = "\n".join([*lines[first : last + 1], 'printf "%s" "$arms"'])
    return subprocess.check_output(["bash", "-c", script], text=True).split("|")


@pytest.mark.parametrize("data", ["public", "standins"])
def test_every_arm_changes_the_mixture(data):
    spec, declared = read_mixture(str(REPOSITORY / f"dev/korean_{data}.json"))
    parts = parse_task_mixture(spec, declared)
    named = {part.label: tags(part, declared) for part in parts}
    buckets = "openthoughts3 rstar-coder web-daily web-code web-science web-medical styles options"
    assert list(named) == buckets.split()
    korean = [name for name in named if named[name].language == "ko"]
    assert korean == buckets.split()[2:]
    counts = {part.label: part.tokens for part in parts}
    floor, arms = read_floor("styles=5%"), arms_of_study()
    assert len(arms) == 21
    found = {arm: tuple(arm_counts(arm, counts, named, floor).values()) for arm in arms}
    assert len(set(found.values())) == 21 and tuple(counts.values()) not in found.values()
    for arm, values in found.items():
        assert sum(values) == sum(counts.values()), arm
        by_name = dict(zip(counts, values, strict=True))
        left = by_name["rstar-coder"]
        if match := re.search(r"ko:en=1:(\d)", arm):
            ko = sum(by_name[name] for name in korean)
            assert sum(values) == pytest.approx(ko * (1 + int(match[1])), rel=1e-5)
        without = "drop:rstar-coder" in arm or arm.startswith("only:") and "rstar" not in arm
        assert (left == 0) == without, arm
