"""
Text data of the embedded world, read from data/: edit a line there to change the world.

    lists.json     name -> words or sentences
    tables.txt     [name], then one row per line with `|` between cells
    relations.txt  [kind of subject], then a block per relation: its name, then statements ("-"),
                   first-person statements ("I") and questions about one of its fields ("?")
    rules.txt      a block per causal rule: its title, settings ("-") and question ("?"); then, for
                   the bad and the good outcome: causes, effects, the reason, and the answer in one
                   sentence
    itself.txt     a block per question about the assistant: its variants, then answers, one per
                   line

In relations, {S} {P} {s} {p} {o} become the name (Mira, Mira's) or a pronoun (She, Her, she, her,
her); {he} and {his} are always pronouns, {name} always the name. Capitalized fields ({Inn})
begin a sentence.
"""

import json
from functools import cache
from pathlib import Path


@cache
def read_data(file: str) -> str:
    """The contents of a file in data/."""
    return (Path(__file__).parent / "data" / file).read_text(encoding="utf-8")


@cache
def text_sections(file: str) -> dict[str, str]:
    """[heading] -> the text below it."""
    found = {}
    for section in read_data(file).removeprefix("[").split("\n["):
        name, text = section.split("]\n", 1)
        found[name] = text.strip()
    return found


@cache
def word_list(name: str) -> list[str]:
    """One list of words or sentences."""
    return json.loads(read_data("lists.json"))[name]


def rows(table: str) -> list[list[str]]:
    """Parse a table with one row per line and `|` between cells."""
    return [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]


def table_rows(name: str) -> list[list[str]]:
    """The rows of a table in tables.txt."""
    return rows(text_sections("tables.txt")[name])


def blocks(text: str) -> list[list[str]]:
    """Split a text at blank lines into blocks of lines."""
    return [block.splitlines() for block in text.strip().split("\n\n")]


def relations(kind: str) -> list[list[str]]:
    """The relation blocks of a kind of subject."""
    return blocks(text_sections("relations.txt")[kind])
