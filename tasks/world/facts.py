"""
The facts of the embedded world: a small invented land called Lowen, the same for every seed.

    words -> who lives where, with what (`people`, `towns`, ...) -> `facts()` -> `telling`

A fact is one relation of one subject ("the colour of Mira's boat"), told in several sentences
and asked in several questions. `split_of` decides by a hash what training documents may contain:
every fact is told in all splits, but a question held out for "val" or "test" is never asked in a
training document. Knows nothing of documents, exercises, stories or tokens.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from tasks.world.words import relations, rows, table, word_list

T = TypeVar("T")
Split = Literal["train", "val", "test"]

# After these, "she" could mean the friend and "it" the animal, the inn or the festival
AMBIGUOUS = frozenset("friend animal pet landmark festival month inn road".split())

LAND = "Lowen"
LAND_SEED = "lowen-1"  # deals out who lives where; another seed is another land


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
    """`thing` is what they own, and `colour` its colour; `pet` is the name of their `animal`."""

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
    def him(self) -> str:
        return "him" if self.he == "he" else "her"


@dataclass(frozen=True)
class Trade:
    """`do` and `does` are the work, as in "bake bread" and "bakes bread"."""

    name: str
    do: str
    does: str
    place: str
    tool: str


@dataclass(frozen=True)
class Goods:
    """What a trade sells, one for `price` pennies."""

    name: str
    plural: str
    price: int
    trade: str

    def some(self, n: int) -> str:
        """'1 bun', '3 buns'."""
        return f"{n} {self.name if n == 1 else self.plural}"


@dataclass(frozen=True)
class Animal:
    """`cry` is what it does when it is heard, `bed` where it sleeps."""

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
    """`work` is what people do then, as in "cut the hay"."""

    name: str
    months: str
    weather: str
    work: str


@dataclass(frozen=True)
class EverydayThing:
    """A thing, what it is made of, and what people use it for."""

    name: str
    material: str
    use: str


@dataclass(frozen=True)
class Question:
    """One way to ask for a fact. `choices(fact.kind, field)` holds the possible answers."""

    text: str
    answer: str
    field: str


@dataclass(frozen=True)
class Fact:
    """One relation of one subject, in words. `split` says who may ask the questions."""

    kind: str
    """What the subject is: person, town, goods, trade, animal, dish, everyday, opposite, season,
    month or day."""
    relation: str
    subject: str
    named: tuple[str, ...]
    """Sentences that name the subject."""
    short: tuple[str, ...]
    """Sentences with a pronoun, for the middle of a paragraph. May be empty."""
    own: tuple[str, ...]
    """Sentences in the first person. May be empty."""
    questions: tuple[Question, ...]
    split: Split


def split_of(kind: str, *key: str | int) -> Split:
    """
    Where a combination belongs: 80% train, 10% val, 10% test, by a hash of its name.

    Whatever is computed, combined or asked anywhere in the world goes through this one rule, so
    what is held out can be told from the key alone.
    """
    digest = hashlib.sha256("|".join([kind, *map(str, key)]).encode()).digest()
    bucket = int.from_bytes(digest[:4], "big") % 10
    return "val" if bucket == 0 else "test" if bucket == 1 else "train"


def pick(rng: random.Random, values: Sequence[T]) -> T:
    """
    A random element.

    Of Python's generator, only `random()` is promised to give the same numbers in every version.
    """
    return values[int(rng.random() * len(values))]


def say(rng: random.Random, sentences: str, **fields: Any) -> str:
    """A random sentence of a word list with its fields filled in."""
    return pick(rng, word_list(sentences)).format(land=LAND, **fields)


def sample(rng: random.Random, values: Sequence[T], n: int) -> list[T]:
    """n different elements (all of them where there are fewer), in random order."""
    return sorted(values, key=lambda _: rng.random())[:n]


def between(rng: random.Random, low: int, high: int) -> int:
    """A random integer from low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


def an(noun: str) -> str:
    """The noun with its indefinite article. Every word of the world obeys the spelling rule."""
    return f"an {noun}" if noun[0] in "aeio" else f"a {noun}"


def upper_first(text: str) -> str:
    """Capital at the beginning, the rest unchanged."""
    return text[0].upper() + text[1:]


@cache
def trades() -> tuple[Trade, ...]:
    """All trades, each with three people."""
    return tuple(Trade(*row) for row in table("trades"))


@cache
def animals() -> tuple[Animal, ...]:
    """All kinds of animals, each kept by four people."""
    return tuple(Animal(*row) for row in table("animals"))


@cache
def dishes() -> tuple[Dish, ...]:
    """All dishes, each the favourite of four people."""
    return tuple(Dish(*cells, be="is" if be == "is" else "are") for *cells, be in table("dishes"))


@cache
def goods() -> tuple[Goods, ...]:
    """Everything that has a price."""
    return tuple(Goods(a, b, int(price), trade) for a, b, price, trade in table("goods"))


@cache
def seasons() -> tuple[Season, ...]:
    """The four seasons."""
    return tuple(Season(*row) for row in table("seasons"))


@cache
def everyday_things() -> tuple[EverydayThing, ...]:
    """Things found in every house, and what they are for."""
    return tuple(EverydayThing(*row) for row in table("everyday"))


@cache
def opposites() -> tuple[tuple[str, str], ...]:
    """Pairs of words that mean the opposite of each other."""
    return tuple((first, second) for first, second in table("opposites"))


def deal(rng: random.Random, values: Sequence[str], n: int) -> list[str]:
    """n values in random order, each equally often, so that no answer is likelier than another."""
    copies = (list(values) * (n // len(values) + 1))[:n]
    return sorted(copies, key=lambda _: rng.random())


@cache
def towns() -> tuple[Town, ...]:
    """The towns, in the order of the ring road that joins them."""
    rng = random.Random(LAND_SEED + " towns")
    names = word_list("towns")
    n = len(names)
    fields = "sites landmarks products festivals months days inns colours".split()
    columns = [deal(rng, word_list(field), n) for field in fields]
    miles = [int(m) for m in deal(rng, [str(m) for m in range(3, 3 + n)], n)]
    following = names[1:] + names[:1]
    return tuple(
        Town(name, *cells, next_town=following[i], miles=miles[i])
        for i, (name, *cells) in enumerate(zip(names, *columns, strict=True))
    )


@cache
def people() -> tuple[Person, ...]:
    """Four people of four trades in every town. Things of one kind differ in colour."""
    rng = random.Random(LAND_SEED + " people")
    women, things, colours = word_list("women"), word_list("things"), word_list("colours")
    n = len(women + word_list("men"))
    names = deal(rng, women + word_list("men"), n)
    # Whole rounds of all trades, cut in fours: never the same trade twice in a town
    kinds = [t.name for t in trades()]
    work = [trade for _ in range(n // len(kinds)) for trade in deal(rng, kinds, len(kinds))]
    foods = deal(rng, [d.name for d in dishes()], n)
    pastimes = deal(rng, word_list("pastimes"), n)
    beasts = deal(rng, [a.name for a in animals()], n)
    pets = deal(rng, word_list("pets"), n)
    owned = deal(rng, [str(i) for i in range(n)], n)
    pairs = deal(rng, names, n)
    friend = dict(zip(pairs[::2] + pairs[1::2], pairs[1::2] + pairs[::2], strict=True))
    found = []
    for i, name in enumerate(names):
        copy, kind = divmod(int(owned[i]), len(things))
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
    """The person of that name. Raises KeyError for a stranger."""
    return {p.name: p for p in people()}[name]


@cache
def town(name: str) -> Town:
    """The town of that name. Raises KeyError for an unknown one."""
    return {t.name: t for t in towns()}[name]


@cache
def people_of(town_name: str) -> tuple[Person, ...]:
    """Who lives in a town."""
    return tuple(p for p in people() if p.town == town_name)


def calendar(names: Sequence[str]) -> list[dict[str, Any]]:
    """Months or days with the two that follow them."""
    n = len(names)
    return [
        {"name": name, "after": names[(i + 1) % n], "later": names[(i + 2) % n]}
        for i, name in enumerate(names)
    ]


@cache
def subjects() -> dict[str, list[dict[str, Any]]]:
    """kind -> the fields of each subject of that kind."""
    trade_of = {t.name: t for t in trades()}
    told: dict[str, list[dict[str, Any]]] = {
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
    for all_fields in told.values():
        for fields in all_fields:
            plain = {k: str(v) for k, v in fields.items()}
            fields |= {"a_" + k: an(v) for k, v in plain.items()}
            fields |= {"the_" + k: "the " + v for k, v in plain.items()}
            fields |= {"at_" + k: "at the " + v for k, v in plain.items()}
            fields |= {"to_" + k: "to " + v for k, v in plain.items()}
            fields |= {upper_first(k): upper_first(str(v)) for k, v in fields.items()}
    return told


@cache
def choices(kind: str, field: str) -> tuple[str, ...]:
    """Every value of a field over the subjects of a kind, sorted: an answer and its rivals."""
    return tuple(sorted({str(fields[field]) for fields in subjects()[kind]}))


@cache
def facts() -> tuple[Fact, ...]:
    """Everything there is to know about Lowen."""
    return tuple(
        make_fact(kind, block, fields)
        for kind, all_fields in subjects().items()
        for fields in all_fields
        for block in relations(kind)
    )


@cache
def fact(kind: str, subject: str, relation: str) -> Fact:
    """One fact. Raises KeyError where there is none."""
    return {f.relation: f for f in facts_about(kind, subject)}[relation]


@cache
def facts_about(kind: str, subject: str) -> tuple[Fact, ...]:
    """The facts of one subject, in the order of its relations."""
    return tuple(f for f in facts() if (f.kind, f.subject) == (kind, subject))


@cache
def summaries(kind: Literal["person", "town"], subject: str) -> tuple[str, ...]:
    """Sentences that tell several facts of a person or a town at once."""
    if kind == "town":
        return tuple(t.format(**asdict(town(subject))) for t in word_list("town_summaries"))
    p = person(subject)
    words = asdict(p) | {"He": p.He, "his": p.his, "a_animal": an(p.animal)}
    return tuple(text.format(**words) for text in word_list("person_summaries"))


def make_fact(kind: str, block: Sequence[str], fields: dict[str, Any]) -> Fact:
    """One relation block filled in for one subject."""
    relation, *lines = block
    name = fields["name"]
    he = fields.get("he", "it")
    his, him = {"he": ("his", "him"), "she": ("her", "her"), "it": ("its", "it")}[he]
    steady = fields | {"he": he, "his": his}
    as_name = {"S": name, "s": name, "o": name, "P": f"{name}'s", "p": f"{name}'s"}
    as_pronoun = {"S": he.capitalize(), "s": he, "o": him, "P": his.capitalize(), "p": his}
    told = [line[2:] for line in lines if line.startswith("- ")]
    # Friends and opposites are mutual: both directions are one question
    key = sorted([name, fields[relation]]) if relation in ("friend", "opposite") else [name]
    return Fact(
        kind=kind,
        relation=relation,
        subject=name,
        named=tuple(text.format(**steady, **as_name) for text in told),
        short=tuple(
            text.format(**steady, **as_pronoun)
            for text in told
            if any(mark in text for mark in ("{S}", "{s}", "{o}", "{P}", "{p}"))
        ),
        own=tuple(line[2:].format(**steady) for line in lines if line.startswith("I ")),
        questions=tuple(
            Question(text.format(**steady), str(fields[field]), field)
            for text, field in rows("\n".join(line[2:] for line in lines if line[0] == "?"))
        ),
        split=split_of("question", kind, relation, *key),
    )


# ------------------------------------------------------------------------------------------------
# Facts as running text


def telling(rng: random.Random, known: Sequence[Fact]) -> str:
    """Facts of one subject in a row: the name first, then mostly pronouns where they are clear."""
    sentences = []
    clear = False
    for fact_ in known:
        short = fact_.short if clear and rng.random() < 0.75 else ()
        sentences.append(pick(rng, short or fact_.named))
        clear = fact_.relation not in AMBIGUOUS
    return " ".join(sentences)


def tell_some(rng: random.Random, kind: str, subject: str, low: int, high: int) -> str:
    """Between low and high facts of one subject, in random order, as running text."""
    return telling(rng, sample(rng, facts_about(kind, subject), between(rng, low, high)))


def titled(rng: random.Random, title: str, body: str) -> str:
    """The body, half of the time under a title."""
    return f"{title}\n\n{body}" if rng.random() < 0.5 else body
