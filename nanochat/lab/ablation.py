"""
Ablation arms of a data mixture: the same total tokens in different proportions.

    "drop:gsm8k" -> parse_arm -> counts of each bucket in the control -> counts in the arm

Every arm has the same total as the control, and therefore the same number of steps: when one bucket
grows, the others shrink in proportion to their counts. Pure functions of names, tags and counts.

    copy:NAME           a copy of the control, to measure noise
    only:X              X alone, plus the floor shares of the other buckets
    drop:X              the control without X; the others grow
    swap:A->B           move the count of A to B
    scale:X*2           twice as much X; the others shrink
    ratio:TAG a:b=1:4   ratio of buckets with TAG a to those with TAG b; others stay
    ARM then ARM        one change, then another
"""

import re
from collections.abc import Callable, Mapping
from functools import partial

from nanochat.mixture import Tags, parse_mixture, round_to_total

ARM_SYNTAX = (
    "copy:name, only:x, drop:x, swap:a->b, scale:x*2, ratio:language ko:en=1:4, or one then another"
)
RATIO = re.compile(r"(\w+) ([^:=]+):([^:=]+)=([\d.]+):([\d.]+)")

Counts = Mapping[str, float]
"""Bucket -> number of rows or tokens."""


def arm_counts(
    arm: str, control: Mapping[str, int], tags: Mapping[str, Tags], floor: Mapping[str, float]
) -> dict[str, int]:
    """
    Return the counts of an arm, given those of the control; the total stays the same.

    tags: tags of each bucket. floor: bucket -> minimum share of the total in an `only` arm, so that
    answers keep the format that evaluations parse. Raises ValueError like `parse_arm`, and for an
    arm that changes nothing or whose change the other buckets cannot offset.
    """
    change = parse_arm(arm, tags, floor)
    if change is None:
        return dict(control)
    found = dict(zip(control, round_to_total(list(change(control).values())), strict=True))
    if found == dict(control):
        raise ValueError(f"{arm!r} equals the control, {found}: the changed buckets have count 0")
    return found


def parse_arm(
    arm: str, tags: Mapping[str, Tags], floor: Mapping[str, float]
) -> Callable[[Counts], dict[str, float]] | None:
    """
    Return a function from the counts of the control to those of the arm; None for a copy.

    Raises ValueError for an unknown form, bucket or tag, or a factor that is not positive.
    """
    for name in floor:
        require_bucket(name, tags, f"floor {name}")
    if " then " in arm:
        one, other = (parse_arm(part, tags, floor) for part in arm.split(" then ", 1))
        if one and other:
            return lambda counts: other(one(counts))
        raise ValueError(f"unknown ablation arm {arm!r}: a copy cannot be changed")
    kind, _, words = arm.partition(":")
    if kind == "copy" and words:
        return None
    if kind == "only":
        require_bucket(words, tags, arm)
        least = {name: share for name, share in floor.items() if name != words}
        return partial(keep_only, bucket=words, floor=least, arm=arm)
    if kind == "drop":
        require_bucket(words, tags, arm)
        return partial(scale_bucket, bucket=words, factor=0.0, arm=arm)
    if kind == "swap" and words.count("->") == 1:
        old, new = (require_bucket(name.strip(), tags, arm) for name in words.split("->"))
        return partial(swap_buckets, old=old, new=new)
    if kind == "scale" and "*" in words:
        name, _, factor = words.rpartition("*")
        require_bucket(name, tags, arm)
        return partial(scale_bucket, bucket=name, factor=positive_number(factor, arm), arm=arm)
    found = RATIO.fullmatch(words)
    if kind == "ratio" and found and found[2] != found[3]:
        tag, first, second, left, right = found.groups()
        groups = [
            (buckets_with(tag, value, tags, arm), positive_number(weight, arm))
            for value, weight in ((first, left), (second, right))
        ]
        return partial(set_ratio, groups=groups)
    raise ValueError(f"unknown ablation arm {arm!r}; use one of: {ARM_SYNTAX}")


def keep_only(
    counts: Counts, bucket: str, floor: Mapping[str, float], arm: str
) -> dict[str, float]:
    """Assign the whole total to one bucket, except for the floor shares."""
    total = sum(counts.values())
    wanted = {name: total * floor.get(name, 0.0) for name in counts}
    wanted[bucket] = total - sum(wanted.values())
    if wanted[bucket] <= 0:
        raise ValueError(f"{arm!r}: the floor {dict(floor)} leaves nothing for {bucket}; lower it")
    return wanted


def scale_bucket(counts: Counts, bucket: str, factor: float, arm: str) -> dict[str, float]:
    """Scale one bucket by a factor and the others in proportion; the total stays the same."""
    total, wanted = sum(counts.values()), counts[bucket] * factor
    left, rest = total - wanted, total - counts[bucket]
    if left < 0 or (left and not rest):
        raise ValueError(f"{arm!r}: the other buckets cannot compensate; use another arm")
    others = {name: n * left / rest if rest else 0.0 for name, n in counts.items()}
    return {**others, bucket: wanted}


def swap_buckets(counts: Counts, old: str, new: str) -> dict[str, float]:
    """Move the count of one bucket to another."""
    if old == new:
        return dict(counts)
    return {**counts, old: 0, new: counts[new] + counts[old]}


def set_ratio(counts: Counts, groups: list[tuple[list[str], float]]) -> dict[str, float]:
    """Split the total of groups of buckets in proportion to the group weights."""
    total = sum(counts[name] for names, _ in groups for name in names)
    weights = sum(weight for _, weight in groups)
    wanted = dict(counts)
    for names, weight in groups:
        own = sum(counts[name] for name in names)
        for name in names:  # an empty group is divided evenly
            share = counts[name] / own if own else 1 / len(names)
            wanted[name] = total * weight / weights * share
    return wanted


def require_bucket(name: str, tags: Mapping[str, Tags], arm: str) -> str:
    """Return `name`. Raises ValueError if the mixture has no such bucket."""
    if name not in tags:
        raise ValueError(
            f"{arm!r}: bucket {name!r} is not in the mixture ({', '.join(tags)}); if only an "
            "arm uses it, list it as <name>=0%"
        )
    return name


def buckets_with(tag: str, value: str, tags: Mapping[str, Tags], arm: str) -> list[str]:
    """Return the buckets with this value of a tag. Raises ValueError if there are none."""
    if not hasattr(Tags(), tag):
        raise ValueError(f"{arm!r}: unknown tag {tag}; use one of: {', '.join(vars(Tags()))}")
    names = [name for name, each in tags.items() if getattr(each, tag) == value]
    if not names:
        raise ValueError(f"{arm!r}: no bucket of the mixture has {tag}={value!r}")
    return names


def positive_number(words: str, arm: str) -> float:
    """Parse a positive, finite number. Raises ValueError for anything else."""
    try:
        value = float(words)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{arm!r}: {words!r} is not a positive number")
    return value


def read_floor(spec: str) -> dict[str, float]:
    """Parse "a=5%,b=2%" into bucket -> share. Raises ValueError for amounts other than shares."""
    parts = parse_mixture(spec) if spec else []
    floor = {part.label: part.share for part in parts if part.share is not None}
    if len(floor) < len(parts):
        raise ValueError(f"floor {spec!r} must consist of shares, as in arc_easy=5%")
    return floor
