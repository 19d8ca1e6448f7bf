"""
Stories of the embedded world, generated from rules of cause and effect.

    rule (two outcomes) x person -> Episode: setting, cause, effect, reason, question
    episodes of a split -> documents

Every rule has two outcomes: rain makes the hay wet, sunshine makes it dry. A reader must use the
cause to predict the effect. `split_of` holds out combinations of rule, outcome and person.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from tasks.world.facts import (
    LAND,
    Person,
    Split,
    between,
    people,
    pick,
    pick_n,
    say,
    split_of,
    tell_some,
    titled,
)
from tasks.world.words import blocks, read_data, word_list


@dataclass(frozen=True)
class Episode:
    """One outcome of a rule for one person. A story uses one sentence from each tuple."""

    title: str
    hero: Person
    good: bool
    settings: tuple[str, ...]
    causes: tuple[str, ...]
    effects: tuple[str, ...]
    reason: str
    question: str
    answer: str
    wrong: str
    """The answer for the other outcome."""


def episode_split(title: str, good: bool, name: str) -> Split:
    """The split of a combination of rule, outcome and person."""
    return split_of("story", title, int(good), name)


@cache
def episodes(split: Split) -> tuple[Episode, ...]:
    """All combinations of rule, outcome and person of a split."""
    return tuple(
        make_episode(block, good, hero)
        for block in blocks(read_data("rules.txt"))
        for good in (False, True)
        for hero in people()
        if episode_split(block[0], good, hero.name) == split
    )


@cache
def episodes_of(split: Split, name: str) -> tuple[Episode, ...]:
    """The episodes of a split about one person."""
    return tuple(e for e in episodes(split) if e.hero.name == name)


def make_episode(block: Sequence[str], good: bool, hero: Person) -> Episode:
    """Fill in one rule block for a person."""
    title, *lines = [line.format(**hero.words) for line in block]
    ways = [line.split(": ", 1)[1] for line in lines if line[:2] not in ("- ", "? ")]
    bad_way, good_way = ways[:4], ways[4:]
    cause, effect, reason, answer = good_way if good else bad_way
    return Episode(
        title=title,
        hero=hero,
        good=good,
        settings=tuple(line[2:] for line in lines if line.startswith("- ")),
        causes=tuple(cause.split(" | ")),
        effects=tuple(effect.split(" | ")),
        reason=reason,
        question=next(line[2:] for line in lines if line.startswith("? ")),
        answer=answer,
        wrong=(bad_way if good else good_way)[-1],
    )


# ------------------------------------------------------------------------------------------------
# Documents


def opening(rng: Random, hero: Person) -> str:
    """The opening of a story: time and place."""
    return pick(rng, word_list("openings")).format(
        **hero.words,
        day=say(rng, "days"),
        quiet=pick(rng, ("quiet", "busy", "long", "slow", "strange")),
    )


def ending(rng: Random, e: Episode) -> str:
    """The ending of a story, happy or with a lesson."""
    return say(rng, "happy_ends" if e.good else "sad_ends", **e.hero.words)


def episode_text(rng: Random, e: Episode) -> str:
    """One episode as a paragraph, sometimes with its reason."""
    parts = [pick(rng, e.settings), pick(rng, e.causes), pick(rng, e.effects)]
    return " ".join(parts + ([e.reason] if rng.random() < 0.5 else []))


def story(rng: Random, split: Split) -> str:
    """One episode, sometimes with facts about the hero or a final question."""
    e = pick(rng, episodes(split))
    parts = [opening(rng, e.hero)]
    if rng.random() < 0.6:
        parts.append(tell_some(rng, "person", e.hero.name, 1, 4))
    body = " ".join([*parts, episode_text(rng, e), ending(rng, e)])
    if rng.random() < 0.3:
        body += f"\n\nQuestion: {e.question}\nAnswer: {e.answer}"
    return titled(rng, e.title, body)


def several_stories(rng: Random, split: Split) -> str:
    """Two or three random episodes."""
    parts = []
    for e in sample_episodes(rng, split, between(rng, 2, 3)):
        parts.append(f"{opening(rng, e.hero)} {episode_text(rng, e)} {ending(rng, e)}")
    return titled(rng, f"Stories from {LAND}", "\n\n".join(parts))


def adventures(rng: Random, split: Split) -> str:
    """Up to three episodes of one person."""
    hero = pick(rng, episodes(split)).hero
    links = ("This happened first.", "That was not all.", "And one more thing happened.")
    parts = [f"{opening(rng, hero)} {tell_some(rng, 'person', hero.name, 2, 5)}"]
    found = pick_n(rng, episodes_of(split, hero.name), 3)
    for link, e in zip(links, found, strict=False):
        parts.append(f"{link} {episode_text(rng, e)} {ending(rng, e)}")
    return titled(rng, f"What happened to {hero.name}", "\n\n".join(parts))


def story_questions(rng: Random, split: Split) -> str:
    """Very short stories, each with its question."""
    parts = []
    for e in sample_episodes(rng, split, between(rng, 3, 6)):
        text = f"{pick(rng, e.settings)} {pick(rng, e.causes)}"
        parts.append(f"{text}\nQuestion: {e.question}\nAnswer: {e.answer}")
    return "\n\n".join(parts)


def sample_episodes(rng: Random, split: Split, n: int) -> list[Episode]:
    """n random episodes of a split, with replacement."""
    return [pick(rng, episodes(split)) for _ in range(n)]
