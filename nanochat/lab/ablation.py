"""
Ablation arms of a data mixture: the same total tokens in different proportions.

    mixture of the control, "drop:gsm8k" -> arm_counts -> data_arms -> --mixture of the arm

Every arm has the same total as the control, and therefore the same number of steps: when one bucket
grows, the others shrink in proportion to their counts.

    copy:NAME           a copy of the control, to measure noise
    only:X              X alone, plus the floor shares of the other buckets
    drop:X              the control without X; the others grow
    swap:A->B           move the count of A to B
    scale:X*2           twice as much X; the others shrink
    ratio:TAG a:b=1:4   ratio of buckets with TAG a to those with TAG b; others stay
    ARM then ARM        one change, then another
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanochat.common import base_dir, fingerprint, write_json
from tasks.buckets import Bucket, Tags, buckets, read_mixture

CONTROL = "control"
Arms = Mapping[str, Sequence[str]]
"""Variants by name, the control first: their training flags."""

FORMS = {
    "copy": r"(.+)",
    "only": r"(.+)",
    "drop": r"(.+)",
    "swap": r"(.+?) *-> *(?!\1$)(.+)",
    "scale": r"(.+)\*(\d+\.?\d*)",
    "ratio": r"(\w+) ([^:=]+):([^:=]+)=([1-9]\d*):([1-9]\d*)",
}
SYNTAX = (
    "copy:name, only:x, drop:x, swap:a->b, scale:x*2, ratio:language ko:en=1:4, or one then another"
)


def data_arms(mixture: str, arms: str, floor: str) -> Arms:
    """
    The control and the data ablation arms, separated by |; flags set the tokens of every bucket.

    Raises ValueError for an unsuitable mixture or arm.
    """
    spec, declared = read_mixture(mixture)
    parts = buckets(spec, declared)
    if missing := [part.name for part in parts if part.tokens is None]:
        raise ValueError(f"--arms needs tokens in --mixture, as in {missing[0]}=40000t")
    tags, shares = {part.name: part.tags for part in parts}, read_floor(floor)
    counts = {part.name: part.tokens or 0 for part in parts}
    found = {CONTROL: counts} | {
        arm: arm_counts(arm, counts, tags, shares) for arm in map(str.strip, arms.split("|"))
    }
    return {arm: [mixture_flag(parts, tokens, declared)] for arm, tokens in found.items()}


def mixture_flag(
    parts: Sequence[Bucket], tokens: Mapping[str, int], declared: Mapping[str, Any]
) -> str:
    """
    Flag that sets a mixture with these tokens of each bucket, from the same conversations; with
    declared buckets, it is written to a file.
    """
    rows = ("" if part.count is None else f"{part.count}*" for part in parts)
    spec = ",".join(f"{p.name}={n}{tokens[p.name]}t" for p, n in zip(parts, rows, strict=True))
    if not declared:
        return f"--mixture={spec}"
    content = {"mixture": spec, "buckets": declared}
    path = base_dir() / "sweeps" / "mixtures" / f"{fingerprint(content)}.json"
    write_json(path, content)
    return f"--mixture={path}"


def arm_counts(
    arm: str, control: Mapping[str, int], tags: Mapping[str, Tags], floor: Mapping[str, float]
) -> dict[str, int]:
    """
    Return the counts of an arm, given those of the control; the total stays the same.

    tags: tags of each bucket. floor: bucket -> minimum share of the total in an `only` arm, so that
    answers keep the format that evaluations parse. Raises ValueError for an unknown form, bucket or
    tag, and for an arm that changes nothing or whose change the other buckets cannot offset.
    """
    counts: Mapping[str, float] = control
    for change in arm.split(" then "):
        wanted = wanted_counts(change, counts, tags, floor)
        if unknown := wanted.keys() - counts.keys():
            raise ValueError(
                f"{arm!r}: {', '.join(unknown)} is not in the mixture ({', '.join(counts)}); if "
                "only an arm uses it, list it as <name>=0t"
            )
        rest = sum(n for name, n in counts.items() if name not in wanted)
        factor = (sum(counts.values()) - sum(wanted.values())) / rest if rest else 0.0
        counts = {name: wanted.get(name, n * factor) for name, n in counts.items()}
    if min(counts.values()) < 0 or not math.isclose(sum(counts.values()), sum(control.values())):
        raise ValueError(f"{arm!r}: the other buckets cannot compensate; use another arm")
    ends = [0, *map(round, itertools.accumulate(counts.values()))]  # so that the total is exact
    sizes = (end - start for start, end in itertools.pairwise(ends))
    found = dict(zip(control, sizes, strict=True))
    if found == control and not arm.startswith("copy:"):
        raise ValueError(f"{arm!r} changes nothing in {found}; use another arm")
    return found


def wanted_counts(
    change: str, counts: Mapping[str, float], tags: Mapping[str, Tags], floor: Mapping[str, float]
) -> dict[str, float]:
    """Counts of the buckets that a change sets; the others keep their proportions."""
    kind, _, words = change.partition(":")
    found = re.fullmatch(FORMS.get(kind, ""), words)
    total = sum(counts.values())
    match kind, found and found.groups():
        case "copy", (_,):
            return {}
        case "only", (name,):
            wanted = dict.fromkeys(counts, 0.0) | {n: total * share for n, share in floor.items()}
            wanted[name] = 0.0
            return wanted | {name: total - sum(wanted.values())}
        case "drop", (name,):
            return {name: 0.0}
        case "swap", (old, new):
            return {old: 0.0, new: counts.get(old, 0) + counts.get(new, 0)}
        case "scale", (name, factor):
            return {name: counts.get(name, 0) * float(factor)}
        case "ratio", (tag, one, other, left, right):
            values = {name: getattr(each, tag, None) for name, each in tags.items()}
            a, b = (sum(n for x, n in counts.items() if values[x] == v) for v in (one, other))
            if not (a and b) or one == other:
                raise ValueError(f"{change!r}: use two values of {tag} that the mixture has")
            share = int(left) / (int(left) + int(right))
            factor = {one: share * (a + b) / a, other: (1 - share) * (a + b) / b}
            return {x: n * factor[values[x]] for x, n in counts.items() if values[x] in factor}
    raise ValueError(f"unknown ablation arm {change!r}; use one of: {SYNTAX}")


def read_floor(spec: str) -> dict[str, float]:
    """
    Parse "a=5%,b=2%" into bucket -> share. Raises ValueError for anything but shares below 100% in
    total.
    """
    found = [re.fullmatch(r"(.+)=(\d+\.?\d*)%", words) for words in filter(None, spec.split(","))]
    floor = {each[1]: float(each[2]) / 100 for each in found if each}
    if not all(found) or sum(floor.values()) >= 1:
        raise ValueError(f"floor {spec!r} must be shares below 100% in total, as in arc_easy=5%")
    return floor
