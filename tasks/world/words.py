"""
Text data of the embedded world, read from data/: edit a line there to change the world.

    lists.json     name -> words or sentences
    tables.txt     [kind of subject], names of the columns, then one subject per line;
                   other tables: [name], then one row per line
    relations.txt  [kind of subject], then a block per relation: its name, then statements ("-"),
                   first-person statements ("I") and questions with their answers ("?")
    rules.txt      a block per causal rule: its title, settings and question; then, for the bad and
                   the good outcome: causes, effects, the reason, and the answer in one sentence
    itself.txt     a block per question about the assistant: its variants, then answers, one per
                   line

Cells and variants are separated by `|`. In relations, {S} {P} {s} {p} {o} become the name (Mira,
Mira's) or a pronoun (She, Her, she, her, her); {he} and {his} are always pronouns, {name} always
the name. {a_animal} has an article; capitalized fields ({Inn}) begin a sentence. In word problems,
{a} and {b} are people, {0} and {1} goods or towns, {x} and {y} the numbers drawn, and {z} their sum
or product; each step contains one calculation.
"""

import json
from functools import cache
from pathlib import Path


@cache
def read_data(file: str) -> str:
    """The contents of a file in data/."""
    return (Path(__file__).parent / "data" / file).read_text(encoding="utf-8")


@cache
def word_list(name: str) -> list[str]:
    """One list of words or sentences."""
    return json.loads(read_data("lists.json"))[name]


def blocks(text: str) -> list[list[str]]:
    """Split a text at blank lines into blocks of lines."""
    return [block.splitlines() for block in text.strip().split("\n\n")]


@cache
def text_sections(file: str) -> dict[str, str]:
    """[heading] -> the text below it."""
    sections = read_data(file).removeprefix("[").split("\n[")
    return dict(section.split("]\n", 1) for section in sections)


def table_rows(name: str) -> list[list[str]]:
    """The rows of a table."""
    return [line.split(" | ") for line in text_sections("tables.txt")[name].strip().splitlines()]
