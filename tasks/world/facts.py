"""
Facts of the embedded world: a small invented land called Lowen, the same for every seed.

    words -> entities (`people`, `towns`, ...) -> `facts()` -> `telling`

A fact is one relation of one subject ("the color of Mira's boat"), with several sentences and
questions. `split_of` determines by a hash what training documents may contain: every fact is stated
in all splits, but a training document never asks a question held out for "val" or "test".
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from tasks.world.words import relations, rows, table_rows, word_list

T = TypeVar("T")
Split = Literal["train", "val", "test"]

# After these relations, "she" could mean the friend and "it" the animal, the inn or the festival
AMBIGUOUS = frozenset("friend animal pet landmark festival month inn road".split())

LAND = "Lowen"
LAND_SEED = "lowen-1"  # determines who lives where; another seed gives another land


@dataclass(frozen=True)
class Town:
    """`miles` is the length of the road to `next_town`."""

    name: str
    site: str
    landmark: str
    product: str
    festival: str
    month: str
    day: str
    inn: str
    flag: str
    next_town: str
    miles: int


@dataclass(frozen=True)
class Person:
    """They own a `thing` of color `colour`; `pet` is the name of their `animal`."""

    name: str
    he: Literal["he", "she"]
    town: str
    trade: str
    food: str
    thing: str
    colour: str
    animal: str
    pet: str
    friend: str
    pastime: str

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def his(self) -> str:
        return "his" if self.he == "he" else "her"

    @property
    def words(self) -> dict[str, str]:
        """Values for the templates of sentences: the fields, the pronouns, "a dog"."""
        return {
            **vars(self),
            "He": self.He,
            "his": self.his,
            "His": self.his.capitalize(),
            "him": "him" if self.he == "he" else "her",
            "a_animal": an(self.animal),
        }


@dataclass(frozen=True)
class Trade:
    """`do` and `does` describe the work: "bake bread", "bakes bread"."""

    name: str
    do: str
    does: str
    place: str
    tool: str


@dataclass(frozen=True)
class Goods:
    """An item that a trade sells for `price` pennies."""

    name: str
    plural: str
    price: int
    trade: str

    def some(self, n: int) -> str:
        """'1 bun', '3 buns'."""
        return f"{n} {self.name if n == 1 else self.plural}"


@dataclass(frozen=True)
class Animal:
    """`cry` is the verb for its sound; `bed` is where it sleeps."""

    name: str
    plural: str
    young: str
    cry: str
    eats: str
    bed: str


@dataclass(frozen=True)
class Dish:
    """Made from `first`, `second` and `third`. `be` is "are" for pancakes."""

    name: str
    first: str
    second: str
    third: str
    way: str
    be: Literal["is", "are"]

    @property
    def ingredients(self) -> str:
        """'plums, flour and honey'."""
        return f"{self.first}, {self.second} and {self.third}"


@dataclass(frozen=True)
class Season:
    """`work` is what people do in that season: "cut the hay"."""

    name: str
    months: str
    weather: str
    work: str


@dataclass(frozen=True)
class EverydayThing:
    """A thing, its material and its use."""

    name: str
    material: str
    use: str


@dataclass(frozen=True)
class FieldQuestion:
    """One question about a fact. `questions.field_values` lists the possible answers."""

    text: str
    answer: str
    field: str


@dataclass(frozen=True)
class Fact:
    """One relation of one subject as text. The questions are asked only in `split`."""

    kind: str
    """Kind of subject: person, town, goods, trade, animal, dish, everyday, opposite, season, month
    or day."""
    relation: str
    subject: str
    named: tuple[str, ...]
    """Sentences that name the subject."""
    short: tuple[str, ...]
    """Sentences with a pronoun, for use within a paragraph. May be empty."""
    own: tuple[str, ...]
    """Sentences in the first person. May be empty."""
    questions: tuple[FieldQuestion, ...]
    split: Split


def split_of(kind: str, *key: str | int) -> Split:
    """
    The split of a combination, chosen by a hash of its key: 80% train, 10% val, 10% test.

    All calculations, combinations and questions of the world use this rule, so the key alone
    determines what is held out.
    """
    digest = hashlib.sha256("|".join([kind, *map(str, key)]).encode()).digest()
    bucket = int.from_bytes(digest[:4], "big") % 10
    return "val" if bucket == 0 else "test" if bucket == 1 else "train"


def pick(rng: random.Random, values: Sequence[T]) -> T:
    """
    A random element.

    Uses only `random()`, the one method that is stable across Python versions.
    """
    return values[int(rng.random() * len(values))]


def say(rng: random.Random, sentences: str, **fields: Any) -> str:
    """A random sentence from a list with its fields filled in."""
    return pick(rng, word_list(sentences)).format(land=LAND, **fields)


def pick_n(rng: random.Random, values: Sequence[T], n: int) -> list[T]:
    """n different elements (all if there are fewer), in random order."""
    return sorted(values, key=lambda _: rng.random())[:n]


def between(rng: random.Random, low: int, high: int) -> int:
    """A random integer from low to high, inclusive."""
    return low + int(rng.random() * (high - low + 1))


def an(noun: str) -> str:
    """The noun with "a" or "an", chosen by spelling, which is right for every word used here."""
    return f"an {noun}" if noun[0] in "aeio" else f"a {noun}"


def upper_first(text: str) -> str:
    """Capitalize the first letter only."""
    return text[0].upper() + text[1:]


@cache
def trades() -> tuple[Trade, ...]:
    """All trades, each with three people."""
    return tuple(Trade(*row) for row in table_rows("trades"))


@cache
def animals() -> tuple[Animal, ...]:
    """All kinds of animals, each kept by four people."""
    return tuple(Animal(*row) for row in table_rows("animals"))


@cache
def dishes() -> tuple[Dish, ...]:
    """All dishes, each the favorite of four people."""
    return tuple(
        Dish(*cells, be="is" if be == "is" else "are") for *cells, be in table_rows("dishes")
    )


@cache
def goods() -> tuple[Goods, ...]:
    """All goods with a price."""
    return tuple(Goods(a, b, int(price), trade) for a, b, price, trade in table_rows("goods"))


@cache
def seasons() -> tuple[Season, ...]:
    """The four seasons."""
    return tuple(Season(*row) for row in table_rows("seasons"))


@cache
def everyday_things() -> tuple[EverydayThing, ...]:
    """Things found in every house."""
    return tuple(EverydayThing(*row) for row in table_rows("everyday"))


@cache
def opposites() -> tuple[tuple[str, str], ...]:
    """Pairs of opposite words."""
    return tuple((first, second) for first, second in table_rows("opposites"))


def deal(rng: random.Random, values: Sequence[T], n: int) -> list[T]:
    """n values in random order, each equally often, so all answers are equally likely."""
    copies = (list(values) * (n // len(values) + 1))[:n]
    return sorted(copies, key=lambda _: rng.random())


@cache
def towns() -> tuple[Town, ...]:
    """The towns in the order of the ring road."""
    rng = random.Random(LAND_SEED + " towns")
    names = word_list("towns")
    n = len(names)
    fields = "sites landmarks products festivals months days inns colours".split()
    columns = [deal(rng, word_list(field), n) for field in fields]
    miles = deal(rng, range(3, 3 + n), n)
    following = names[1:] + names[:1]
    return tuple(
        Town(name, *cells, next_town=following[i], miles=miles[i])
        for i, (name, *cells) in enumerate(zip(names, *columns, strict=True))
    )


@cache
def people() -> tuple[Person, ...]:
    """Four people of different trades per town. Things of one kind differ in color."""
    rng = random.Random(LAND_SEED + " people")
    women, things, colours = word_list("women"), word_list("things"), word_list("colours")
    n = len(women + word_list("men"))
    names = deal(rng, women + word_list("men"), n)
    # Full rounds of all trades, in groups of four: no trade occurs twice in a town
    kinds = [t.name for t in trades()]
    work = [trade for _ in range(n // len(kinds)) for trade in deal(rng, kinds, len(kinds))]
    foods = deal(rng, [d.name for d in dishes()], n)
    pastimes = deal(rng, word_list("pastimes"), n)
    beasts = deal(rng, [a.name for a in animals()], n)
    pets = deal(rng, word_list("pets"), n)
    owned = deal(rng, range(n), n)
    pairs = deal(rng, names, n)
    friend = dict(zip(pairs[::2] + pairs[1::2], pairs[1::2] + pairs[::2], strict=True))
    found = []
    for i, name in enumerate(names):
        copy, kind = divmod(owned[i], len(things))
        found.append(
            Person(
                name=name,
                he="she" if name in women else "he",
                town=towns()[i // 4].name,
                trade=work[i],
                food=foods[i],
                thing=things[kind],
                colour=colours[(kind + 2 * copy) % len(colours)],
                animal=beasts[i],
                pet=pets[i],
                friend=friend[name],
                pastime=pastimes[i],
            )
        )
    return tuple(found)


@cache
def person(name: str) -> Person:
    """The person of that name. Raises KeyError for an unknown name."""
    return {p.name: p for p in people()}[name]


@cache
def town(name: str) -> Town:
    """The town of that name. Raises KeyError for an unknown name."""
    return {t.name: t for t in towns()}[name]


@cache
def people_of(town_name: str) -> tuple[Person, ...]:
    """The people who live in a town."""
    return tuple(p for p in people() if p.town == town_name)


def calendar(names: Sequence[str]) -> list[dict[str, Any]]:
    """Months or days, each with the two that follow it."""
    n = len(names)
    return [
        {"name": name, "after": names[(i + 1) % n], "later": names[(i + 2) % n]}
        for i, name in enumerate(names)
    ]


@cache
def subjects() -> dict[str, list[dict[str, Any]]]:
    """kind -> the fields of each subject of that kind."""
    trade_of = {t.name: t for t in trades()}
    found: dict[str, list[dict[str, Any]]] = {
        "person": [asdict(trade_of[p.trade]) | asdict(p) for p in people()],
        "town": [asdict(t) for t in towns()],
        "goods": [asdict(g) for g in goods()],
        "trade": [asdict(t) for t in trades()],
        "animal": [asdict(a) for a in animals()],
        "dish": [asdict(d) | {"ingredients": d.ingredients} for d in dishes()],
        "season": [asdict(s) for s in seasons()],
        "month": calendar(word_list("months")),
        "everyday": [asdict(t) for t in everyday_things()],
        "opposite": [
            {"name": x, "opposite": y} for a, b in opposites() for x, y in ((a, b), (b, a))
        ],
        "day": calendar(word_list("days")),
    }
    for all_fields in found.values():
        for fields in all_fields:
            plain = {k: str(v) for k, v in fields.items()}
            fields |= {"a_" + k: an(v) for k, v in plain.items()}
            fields |= {"the_" + k: "the " + v for k, v in plain.items()}
            fields |= {"at_" + k: "at the " + v for k, v in plain.items()}
            fields |= {"to_" + k: "to " + v for k, v in plain.items()}
            fields |= {upper_first(k): upper_first(str(v)) for k, v in fields.items()}
    return found


@cache
def facts() -> tuple[Fact, ...]:
    """All facts about Lowen."""
    return tuple(
        make_fact(kind, block, fields)
        for kind, all_fields in subjects().items()
        for fields in all_fields
        for block in relations(kind)
    )


@cache
def fact(kind: str, subject: str, relation: str) -> Fact:
    """One fact. Raises KeyError if there is none."""
    return {f.relation: f for f in facts_about(kind, subject)}[relation]


@cache
def facts_about(kind: str, subject: str) -> tuple[Fact, ...]:
    """The facts about one subject, in the order of its relations."""
    return tuple(f for f in facts() if (f.kind, f.subject) == (kind, subject))


@cache
def summaries(kind: Literal["person", "town"], subject: str) -> tuple[str, ...]:
    """Sentences that combine several facts about a person or a town."""
    fields = asdict(town(subject)) if kind == "town" else person(subject).words
    return tuple(t.format(**fields) for t in word_list(f"{kind}_summaries"))


def make_fact(kind: str, block: Sequence[str], fields: dict[str, Any]) -> Fact:
    """Fill in one relation block for one subject."""
    relation, *lines = block
    name = fields["name"]
    he = fields.get("he", "it")
    his, him = {"he": ("his", "him"), "she": ("her", "her"), "it": ("its", "it")}[he]
    steady = fields | {"he": he, "his": his}
    as_name = {"S": name, "s": name, "o": name, "P": f"{name}'s", "p": f"{name}'s"}
    as_pronoun = {"S": he.capitalize(), "s": he, "o": him, "P": his.capitalize(), "p": his}
    statements = [line[2:] for line in lines if line.startswith("- ")]
    # Friends and opposites are mutual: both directions share one key
    key = sorted([name, fields[relation]]) if relation in ("friend", "opposite") else [name]
    return Fact(
        kind=kind,
        relation=relation,
        subject=name,
        named=tuple(text.format(**steady, **as_name) for text in statements),
        short=tuple(
            text.format(**steady, **as_pronoun)
            for text in statements
            if any(mark in text for mark in ("{S}", "{s}", "{o}", "{P}", "{p}"))
        ),
        own=tuple(line[2:].format(**steady) for line in lines if line.startswith("I ")),
        questions=tuple(
            FieldQuestion(text.format(**steady), str(fields[field]), field)
            for text, field in rows("\n".join(line[2:] for line in lines if line[0] == "?"))
        ),
        split=split_of("question", kind, relation, *key),
    )


# ------------------------------------------------------------------------------------------------
# Facts as running text


def telling(rng: random.Random, known: Sequence[Fact]) -> str:
    """Facts about one subject as text: the name first, then mostly pronouns if unambiguous."""
    sentences = []
    clear = False
    for fact_ in known:
        short = fact_.short if clear and rng.random() < 0.75 else ()
        sentences.append(pick(rng, short or fact_.named))
        clear = fact_.relation not in AMBIGUOUS
    return " ".join(sentences)


def tell_some(rng: random.Random, kind: str, subject: str, low: int, high: int) -> str:
    """Between `low` and `high` facts about one subject in random order, as running text."""
    return telling(rng, pick_n(rng, facts_about(kind, subject), between(rng, low, high)))


def titled(rng: random.Random, title: str, body: str) -> str:
    """The body, with a title half of the time."""
    return f"{title}\n\n{body}" if rng.random() < 0.5 else body
