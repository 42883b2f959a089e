"""Six small worlds, each a SQLite database of two tables that follow from a seed.

The main table has a name, a kind, two numbers and a reference; the other one says where the reference leads.
"""

import random
import sqlite3
from dataclasses import dataclass
from pathlib import Path

ROWS, OTHERS = 60, 12
SYLLABLES = ("bel", "dor", "fin", "gal", "hol", "kas", "lun", "mar", "nor", "pel", "ros", "tam", "vik", "zan")


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One schema and the words to ask about it.

    Attributes:
        table: The main table, which is also the plural in questions; `one` is the singular.
        label: Column of names.
        kind: Text column; `kinds` are its values.
        numbers: Two integer columns with their lowest and highest value.
        other: The table that `{one of it}_id` refers to, by `id`; `other_label` is its column of names.
        place: Text column of the other table; `places` are its values.
    """

    table: str
    one: str
    label: str
    kind: str
    kinds: tuple[str, ...]
    numbers: dict[str, tuple[int, int]]
    other: str
    other_label: str
    reference: str
    place: str
    places: tuple[str, ...]

    @property
    def schema(self) -> dict[str, tuple[str, ...]]:
        """Columns by table, in order."""
        return {
            self.table: (self.label, self.kind, *self.numbers, self.reference),
            self.other: ("id", self.other_label, self.place),
        }


DOMAINS = (
    Domain(
        table="films",
        one="film",
        label="title",
        kind="genre",
        kinds=("drama", "comedy", "horror", "western", "crime"),
        numbers={"rating": (10, 99), "minutes": (60, 199)},
        other="studios",
        other_label="studio",
        reference="studio_id",
        place="country",
        places=("France", "Japan", "India", "Chile", "Kenya"),
    ),
    Domain(
        table="books",
        one="book",
        label="name",
        kind="subject",
        kinds=("history", "poetry", "travel", "science", "cooking"),
        numbers={"pages": (80, 999), "copies": (1, 60)},
        other="authors",
        other_label="author",
        reference="author_id",
        place="nation",
        places=("Norway", "Egypt", "Peru", "Canada", "Spain"),
    ),
    Domain(
        table="players",
        one="player",
        label="player",
        kind="position",
        kinds=("keeper", "defender", "winger", "striker", "midfielder"),
        numbers={"goals": (0, 40), "age": (17, 39)},
        other="teams",
        other_label="team",
        reference="team_id",
        place="city",
        places=("Porto", "Leeds", "Turin", "Lyon", "Bremen"),
    ),
    Domain(
        table="products",
        one="product",
        label="product",
        kind="category",
        kinds=("toys", "tools", "garden", "office", "sports"),
        numbers={"price": (5, 250), "stock": (0, 90)},
        other="makers",
        other_label="maker",
        reference="maker_id",
        place="state",
        places=("Texas", "Ohio", "Utah", "Maine", "Iowa"),
    ),
    Domain(
        table="flights",
        one="flight",
        label="code",
        kind="airline",
        kinds=("Swift", "Aero", "Polar", "Comet", "Sunair"),
        numbers={"seats": (60, 380), "delay": (0, 95)},
        other="airports",
        other_label="airport",
        reference="airport_id",
        place="region",
        places=("north", "south", "east", "west", "coast"),
    ),
    Domain(
        table="workers",
        one="worker",
        label="worker",
        kind="role",
        kinds=("engineer", "clerk", "lawyer", "designer", "analyst"),
        numbers={"salary": (20, 180), "years": (1, 35)},
        other="offices",
        other_label="office",
        reference="office_id",
        place="town",
        places=("Bath", "York", "Derby", "Leith", "Wells"),
    ),
)


def names(count: int, rng: random.Random) -> list[str]:
    """Return `count` different invented names."""
    every = [f"{a}{b}".capitalize() for a in SYLLABLES for b in SYLLABLES if a != b]
    return rng.sample(every, count)


def make_database(domain: Domain, folder: Path, *, seed: int) -> Path:
    """Write `{table}.db` anew and return its path."""
    path = folder / f"{domain.table}.db"
    path.unlink(missing_ok=True)
    rng = random.Random(f"{seed}/{domain.table}")
    main, other = domain.schema[domain.table], domain.schema[domain.other]
    with sqlite3.connect(path) as connection:
        connection.execute(
            f"CREATE TABLE {domain.other} ({other[0]} INTEGER PRIMARY KEY, {other[1]} TEXT, {other[2]} TEXT)"
        )
        connection.execute(
            f"CREATE TABLE {domain.table} ({main[0]} TEXT, {main[1]} TEXT, {main[2]} INTEGER, {main[3]} INTEGER, "
            f"{main[4]} INTEGER REFERENCES {domain.other}(id))"
        )
        others = [(n, name, domain.places[n % len(domain.places)]) for n, name in enumerate(names(OTHERS, rng), 1)]
        connection.executemany(f"INSERT INTO {domain.other} VALUES (?, ?, ?)", others)
        ranges = list(domain.numbers.values())
        rows = [
            (name, rng.choice(domain.kinds), *(rng.randint(*span) for span in ranges), rng.randint(1, OTHERS))
            for name in names(ROWS, rng)
        ]
        connection.executemany(f"INSERT INTO {domain.table} VALUES (?, ?, ?, ?, ?)", rows)
    connection.close()
    return path
