"""
Arms of a data ablation: the same tokens of another mixture.

    "drop:gsm8k", rows of each bucket in the control -> rows of each bucket in the arm

Every arm has as many rows as the control, and so as many trained tokens and steps: what a bucket
gains, others lose, each in proportion to what it has. Pure functions of names, tags and counts.

    copy:NAME           the control again, under another name: what comes out is noise
    only:X              X, and of every other bucket what the floor says
    drop:X              the control without X; the others grow
    swap:A->B           B takes the rows of A
    scale:X*2           twice as much of X; the others shrink
    ratio:TAG a:b=1:4   buckets whose TAG is a against those where it is b; others stay
"""

import re
from collections.abc import Mapping, Sequence

from nanochat.mixture import (
    MixConfig,
    Part,
    Tags,
    parse_mixture,
    whole,
)

FORMS = "copy:name, only:x, drop:x, swap:a->b, scale:x*2, ratio:language ko:en=1:4"
RATIO = re.compile(r"(\w+) ([^:=]+):([^:=]+)=([\d.]+):([\d.]+)")


def arm_counts(
    arm: str, counts: Mapping[str, int], tags: Mapping[str, Tags], floor: Mapping[str, float]
) -> dict[str, int]:
    """
    What an arm takes of each bucket; the sum stays.

    floor: bucket -> the least share of the whole that `only` leaves it, so that the answers keep
    their form. Raises ValueError naming an arm that is none or changes nothing, or a bucket that is
    not there.
    """
    kind, _, words = arm.partition(":")
    total = sum(counts.values())
    if kind == "copy" and words:
        return dict(counts)
    if kind == "only":
        bucket = one_of(counts, words, arm)
        kept = {name: total * share for name, share in floor.items() if name != bucket}
        for name in kept:
            one_of(counts, name, f"the floor {name}")
        wanted = {name: kept.get(name, 0.0) for name in counts}
        wanted[bucket] = total - sum(kept.values())
        if wanted[bucket] <= 0:
            raise ValueError(f"{arm!r}: the floor {dict(floor)} leaves nothing of {bucket}")
    elif kind == "drop":
        wanted = changed(counts, {one_of(counts, words, arm): 0.0}, arm)
    elif kind == "swap" and words.count("->") == 1:
        old, new = (one_of(counts, name.strip(), arm) for name in words.split("->"))
        wanted = {**counts, old: 0, new: counts[new] + counts[old]} if old != new else {**counts}
    elif kind == "scale" and "*" in words:
        name, _, factor = words.rpartition("*")
        bucket = one_of(counts, name, arm)
        wanted = changed(counts, {bucket: counts[bucket] * number(factor, arm)}, arm)
    elif kind == "ratio" and (found := RATIO.fullmatch(words)):
        wanted = weighed(counts, tags, found, arm)
    else:
        raise ValueError(f"{arm!r} is no arm; there are {FORMS}")
    found = dict(zip(counts, whole(list(wanted.values())), strict=True))
    if found == dict(counts):
        raise ValueError(f"{arm!r} is the control, {found} rows: what it changes has none there")
    return found


def taken(
    mix: MixConfig, names: Sequence[str], tags: Mapping[str, Tags], counts: Sequence[int]
) -> list[int]:
    """What a mixture takes of its buckets in the end: that of its arm, where it is one."""
    if not mix.arm:
        return list(counts)
    control = dict(zip(names, counts, strict=True))
    return list(arm_counts(mix.arm, control, tags, read_floor(mix.arm_floor)).values())


def changed(counts: Mapping[str, int], given: Mapping[str, float], arm: str) -> dict[str, float]:
    """Some buckets as given, the others in proportion, so that the sum stays."""
    total, rest = sum(counts.values()), sum(n for b, n in counts.items() if b not in given)
    left = total - sum(given.values())
    if left < 0 or (left and not rest):
        raise ValueError(f"{arm!r} leaves nothing for the other buckets to make up")
    return {b: given.get(b, n * left / rest if rest else 0.0) for b, n in counts.items()}


def weighed(
    counts: Mapping[str, int], tags: Mapping[str, Tags], ratio: re.Match, arm: str
) -> dict[str, float]:
    """Two groups of buckets by a tag, in a ratio of rows."""
    tag, first, second, left, right = ratio.groups()
    if not hasattr(Tags(), tag):
        raise ValueError(f"{arm!r}: there is no tag {tag}; there are {', '.join(vars(Tags()))}")
    groups = [
        {name: n for name, n in counts.items() if getattr(tags[name], tag) == value}
        for value in (first, second)
    ]
    weights = [number(left, arm), number(right, arm)]
    for value, group in zip((first, second), groups, strict=True):
        if not group:
            raise ValueError(f"{arm!r}: no bucket of the mixture has the {tag} {value!r}")
    both = sum(sum(group.values()) for group in groups)
    wanted: dict[str, float] = {**counts}
    for group, weight in zip(groups, weights, strict=True):
        rows = sum(group.values())
        for name, n in group.items():  # those that the control has none of, alike
            share = n / rows if rows else 1 / len(group)
            wanted[name] = both * weight / sum(weights) * share
    return wanted


def one_of(counts: Mapping[str, int], name: str, arm: str) -> str:
    """A bucket of the mixture. Raises ValueError for another name."""
    if name not in counts:
        raise ValueError(
            f"{arm!r} names {name!r}, but the buckets of the mixture are {', '.join(counts)}; one "
            "that only an arm takes stands in the mixture as =0%"
        )
    return name


def number(words: str, arm: str) -> float:
    """A positive number. Raises ValueError for anything else."""
    try:
        value = float(words)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ValueError(f"{arm!r}: {words!r} is no positive number")
    return value


def read_floor(spec: str) -> dict[str, float]:
    """Bucket -> share, from words like those of a mixture. Raises ValueError for other amounts."""
    parts: list[Part] = parse_mixture(spec) if spec else []
    floor = {part.label: part.share for part in parts if part.share is not None}
    if len(floor) < len(parts):
        raise ValueError(f"{spec!r}: a floor is made of shares, as in arc_easy=5%")
    return floor
