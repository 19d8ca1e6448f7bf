"""
Stories of the embedded world, generated from rules of cause and effect.

    rule (two outcomes) x person -> Episode: setting, cause, effect, reason, question
    episodes of a split -> documents

Every rule has two outcomes: rain makes the hay wet, sunshine makes it dry. A reader must use the
cause to predict the effect. `split_of` holds out combinations of rule, outcome and person.
"""

from dataclasses import dataclass
from functools import cache

from tasks.world.facts import (
    Draw,
    Paragraphs,
    Split,
    Subject,
    blocks,
    read_data,
    split_of,
    subjects,
    titled,
    word_list,
)


@dataclass(frozen=True)
class Episode:
    """One outcome of a rule for one person. A story uses one sentence from each list."""

    title: str
    hero: Subject
    good: bool
    settings: list[str]
    question: str
    causes: list[str]
    effects: list[str]
    reason: str
    answer: str
    other_causes: list[str]
    """The causes of the other outcome."""
    wrong: str
    """The answer for the other outcome."""


@cache
def episodes(split: Split) -> list[Episode]:
    """All combinations of rule, outcome and person of a split."""
    return [
        make_episode(rule, good, hero)
        for rule in blocks(read_data("rules.txt"))
        for good in (False, True)
        for hero in subjects("person")
        if split_of("story", rule[0], int(good), hero.name) == split
    ]


def draw_episode(rng: Draw) -> Episode:
    """A random episode of the split."""
    return rng.pick(episodes(rng.split))


def make_episode(rule: list[str], is_good: bool, hero: Subject) -> Episode:
    """Fill in one rule block for a person."""
    lines = [line.split(": ", 1)[-1].format(**vars(hero)).split(" | ") for line in rule]
    [title], settings, [question], *ways = lines
    bad, good = ways[:4], ways[4:]
    (causes, effects, [reason], [answer]), other = (good, bad) if is_good else (bad, good)
    return Episode(
        title,
        hero,
        is_good,
        settings,
        question,
        causes,
        effects,
        reason,
        answer,
        other[0],
        *other[3],
    )


# ---- Parts ---------------------------------------------------------------------------------------


def opening(rng: Draw, hero: Subject) -> str:
    """The opening of a story: time and place."""
    return rng.pick(word_list("openings")).format(
        **vars(hero), day=rng.subject("day").name, quiet=rng.pick(word_list("kinds_of_day"))
    )


def beginning(rng: Draw, e: Episode) -> str:
    """Setting and cause."""
    return f"{rng.pick(e.settings)} {rng.pick(e.causes)}"


def episode_text(rng: Draw, e: Episode) -> str:
    """One episode as a paragraph, sometimes with its reason."""
    text = f"{beginning(rng, e)} {rng.pick(e.effects)}"
    return f"{text} {e.reason}" if rng.random() < 0.5 else text


def adventure(rng: Draw, e: Episode) -> str:
    """An episode with its ending, happy or with a lesson."""
    ending = "happy_ends" if e.good else "sad_ends"
    return f"{episode_text(rng, e)} {rng.say(ending, **vars(e.hero))}"


def full_story(rng: Draw, e: Episode) -> str:
    """An opening and an episode with its ending."""
    return f"{opening(rng, e.hero)} {adventure(rng, e)}"


# ---- Documents -----------------------------------------------------------------------------------


def story(rng: Draw) -> Paragraphs:
    """One episode, sometimes with facts about the hero or a final question."""
    e = draw_episode(rng)
    text = opening(rng, e.hero)
    if rng.random() < 0.6:
        text += " " + e.hero.tell(rng, 1, 4)
    text = f"{text} {adventure(rng, e)}"
    asked = f"Question: {e.question}\nAnswer: {e.answer}" if rng.random() < 0.3 else ""
    return titled(rng, e.title, text, asked)


def several_stories(rng: Draw) -> Paragraphs:
    """Two or three random episodes."""
    found = [draw_episode(rng) for _ in range(rng.between(2, 3))]
    parts = [full_story(rng, e) for e in found]
    return titled(rng, "Stories from Lowen", *parts)


def adventures(rng: Draw) -> Paragraphs:
    """Up to three episodes of one person."""
    hero = draw_episode(rng).hero
    parts = [f"{opening(rng, hero)} {hero.tell(rng, 2, 5)}"]
    found = rng.pick_n([e for e in episodes(rng.split) if e.hero is hero], 3)
    linked = zip(word_list("links"), found, strict=False)
    parts += [f"{link} {adventure(rng, e)}" for link, e in linked]
    return titled(rng, f"What happened to {hero.name}", *parts)


def story_questions(rng: Draw) -> Paragraphs:
    """Very short stories, each with its question."""
    for e in [draw_episode(rng) for _ in range(rng.between(3, 6))]:
        yield f"{beginning(rng, e)}\nQuestion: {e.question}\nAnswer: {e.answer}"
