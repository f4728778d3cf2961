"""Makes small SQLite databases, questions about them with reference SQL, and changes to make. Seeded.

Promises
- A database follows from its name alone, on every machine; so do the questions from (split, seed).
- `shop-17` has the columns that a question speaks of. Of `shop.5-17` one column in each table has another name, one of
  COLUMNS; which one is seen only by those who ask that database.
- No question about one database is in both splits: the split is a hash of database and reference.
- Each reference has rows, or changes some. Each question is graded on a second database with other rows too
  (`SqlReward`).
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from engine.types import Prompt

Split = Literal["train", "test"]
SCHEMAS = {
    "shop": "CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, city TEXT);\n"
    "CREATE TABLE product (id INTEGER PRIMARY KEY, name TEXT, price INTEGER);\n"
    "CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer INTEGER, product INTEGER, count INTEGER);",
    "school": "CREATE TABLE pupil (id INTEGER PRIMARY KEY, name TEXT, year INTEGER);\n"
    "CREATE TABLE course (id INTEGER PRIMARY KEY, title TEXT, hours INTEGER);\n"
    "CREATE TABLE grade (pupil INTEGER, course INTEGER, points INTEGER);",
}
COLUMNS = {  # a table's names for one column; the first is the one that questions speak of
    "shop": {
        "customer": ("city", "town", "place", "home"),
        "product": ("price", "cost", "amount", "value"),
        "purchase": ("count", "pieces", "quantity", "number"),
    },
    "school": {"pupil": ("year", "level", "class", "stage"), "grade": ("points", "score", "marks", "result")},
}
NAMES = ("Lea", "Tom", "Mia", "Ben", "Eva", "Max", "Zoe", "Sam", "Ada", "Jan")
TABLES = {"shop": ("customer", "product", "purchase"), "school": ("pupil", "course", "grade")}
CITIES = ("Oslo", "Rome", "Lima", "Bonn")
PRODUCTS = ("lamp", "desk", "chair", "clock", "shelf", "mirror")
COURSES = ("maths", "music", "physics", "history", "art")
ANSWER = "Ask the database with query. Then answer with one SELECT: <answer>SELECT ...</answer>"
CHANGE = "Change the database with execute, and say when it is done."


@lru_cache(maxsize=1024)
def find(name: str) -> bytes:
    """Returns the database of this name. Raises KeyError for an unknown one."""
    kind, _, number = name.partition("-")
    schema = schema_of(kind)
    if not number.isdecimal():
        raise KeyError(name)
    kind = kind.partition(".")[0]
    rng = random.Random(f"{kind}/{number}")
    database = sqlite3.connect(":memory:", isolation_level=None)
    try:
        database.executescript(schema)
        for table, rows in (_shop if kind == "shop" else _school)(rng).items():
            places = ", ".join("?" * len(rows[0]))
            database.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
        return database.serialize()
    finally:
        database.close()


def names_of(kind: str) -> dict[str, str]:
    """Returns what the columns that questions speak of are called in databases of a kind. Raises KeyError.

    >>> names_of("school.6")
    {'year': 'class', 'points': 'score'}
    """
    topic, _, variant = kind.partition(".")
    if not (variant or "0").isdecimal():
        raise KeyError(kind)
    names, rest = {}, int(variant or 0)
    for choices in COLUMNS[topic].values():
        rest, number = divmod(rest, len(choices))
        names[choices[0]] = choices[number]
    return names


def renamed(sql: str, names: Mapping[str, str]) -> str:
    """Returns SQL with other names of columns; functions keep theirs.

    >>> renamed("SELECT count(*) FROM purchase WHERE count < 3", {"count": "pieces"})
    'SELECT count(*) FROM purchase WHERE pieces < 3'
    """
    return re.sub(r"\b\w+\b(?!\()", lambda word: names.get(word[0], word[0]), sql)


def schema_of(kind: str) -> str:
    """Returns the CREATE statements of databases of a kind. Raises KeyError for an unknown one."""
    return renamed(SCHEMAS[kind.partition(".")[0]], names_of(kind))


def _shop(rng: random.Random) -> dict[str, list[tuple[Any, ...]]]:
    customers = [(n, name, rng.choice(CITIES)) for n, name in enumerate(rng.sample(NAMES, 8), 1)]
    products = [(n, name, rng.randint(5, 90)) for n, name in enumerate(PRODUCTS, 1)]
    purchases = [(n, rng.randint(1, 8), rng.randint(1, 6), rng.randint(1, 5)) for n in range(1, rng.randint(20, 40))]
    return {"customer": customers, "product": products, "purchase": purchases}


def _school(rng: random.Random) -> dict[str, list[tuple[Any, ...]]]:
    pupils = [(n, name, rng.randint(5, 9)) for n, name in enumerate(rng.sample(NAMES, 9), 1)]
    courses = [(n, title, rng.randint(1, 5)) for n, title in enumerate(COURSES, 1)]
    grades = [(p, c, rng.randint(0, 15)) for p in range(1, 10) for c in range(1, 6) if rng.random() < 0.7]
    return {"pupil": pupils, "course": courses, "grade": grades or [(1, 1, 7)]}


def questions(split: Split, seed: int, *, changes: float = 0.3, schema: bool = True) -> Iterator[Prompt]:
    """Yields questions of one split without end.

    changes: the share that asks for a change of the database. schema: prompts show it. Without it they name the tables
    only, and columns have other names in one database than in another, so the model has to ask for them.
    """
    rng = random.Random(f"{split}-{seed}")
    number = 0
    while True:
        kind = topic = rng.choice([*SCHEMAS])
        if not schema:
            kind = f"{topic}.{rng.randrange(math.prod(map(len, COLUMNS[topic].values())))}"
        name = f"{kind}-{rng.randrange(1 << 16)}"
        asks = rng.random() >= changes
        text, sql = rng.choice((QUESTIONS if asks else CHANGES)[topic])(rng)
        sql = renamed(sql, names_of(kind))
        digest = hashlib.md5(f"{name}/{sql}".encode(), usedforsecurity=False).digest()
        if (digest[0] < 26) != (split == "test"):
            continue
        answer = {"sql": sql, "also": [f"{kind}-{rng.randrange(1 << 16, 1 << 17)}"]} if asks else {"changes": [sql]}
        if not any(tells(each, sql) for each in (name, *answer.get("also", ()))):
            continue
        shown = schema_of(kind) if schema else f"Tables: {', '.join(TABLES[topic])}."
        content = f"{shown}\n\n{text} {ANSWER if asks else CHANGE}"
        yield Prompt(
            id=f"{split}-{seed}-{number}",
            messages=({"role": "user", "content": content},),
            answer="",
            tools=("query",) if asks else ("query", "execute"),
            source=topic if asks else f"{topic}_changes",
            metadata={"database": name, **answer},
        )
        number += 1


def tells(name: str, sql: str) -> bool:
    """Returns whether a reference has rows, or changes some: where it does not, a model that does nothing is right."""
    database = sqlite3.connect(":memory:", isolation_level=None)
    try:
        database.deserialize(find(name))
        cursor = database.execute(sql)
        return cursor.fetchone() is not None or cursor.rowcount > 0
    finally:
        database.close()


Template = Callable[[random.Random], tuple[str, str]]


def _live_in(rng: random.Random) -> tuple[str, str]:
    city = rng.choice(CITIES)
    return f"How many customers live in {city}?", f"SELECT count(*) FROM customer WHERE city = '{city}'"


def _dearer_than(rng: random.Random) -> tuple[str, str]:
    price = rng.randint(20, 70)
    text = f"Which products cost more than {price}? Give their names, the dearest first, equal prices by name."
    return text, f"SELECT name FROM product WHERE price > {price} ORDER BY price DESC, name"


def _spent(rng: random.Random) -> tuple[str, str]:
    return (
        "How much has each customer spent? Give name and sum of count times price, for those who bought something.",
        "SELECT c.name, sum(u.count * p.price) FROM purchase u JOIN customer c ON c.id = u.customer "
        "JOIN product p ON p.id = u.product GROUP BY c.id",
    )


def _above(rng: random.Random) -> tuple[str, str]:
    year = rng.randint(6, 8)
    return f"Give the names of the pupils from year {year} on.", f"SELECT name FROM pupil WHERE year >= {year}"


def _best(rng: random.Random) -> tuple[str, str]:
    course = rng.choice(COURSES)
    return (
        f"What is the highest number of points in {course}?",
        f"SELECT max(points) FROM grade JOIN course ON course.id = grade.course WHERE title = '{course}'",
    )


def _mean(rng: random.Random) -> tuple[str, str]:
    return (
        "Give each course that has grades with the mean of its points, by title.",
        "SELECT title, avg(points) FROM grade JOIN course ON course.id = grade.course GROUP BY title ORDER BY title",
    )


def _raise_price(rng: random.Random) -> tuple[str, str]:
    product, more = rng.choice(PRODUCTS), rng.randint(1, 20)
    return (
        f"Raise the price of each {product} by {more}.",
        f"UPDATE product SET price = price + {more} WHERE name = '{product}'",
    )


def _forget(rng: random.Random) -> tuple[str, str]:
    count = rng.randint(1, 3)
    return f"Delete all purchases of at most {count} pieces.", f"DELETE FROM purchase WHERE count <= {count}"


def _next_year(rng: random.Random) -> tuple[str, str]:
    year = rng.randint(5, 8)
    return f"Move all pupils of year {year} up by one year.", f"UPDATE pupil SET year = year + 1 WHERE year = {year}"


QUESTIONS: dict[str, tuple[Template, ...]] = {
    "shop": (_live_in, _dearer_than, _spent),
    "school": (_above, _best, _mean),
}
CHANGES: dict[str, tuple[Template, ...]] = {"shop": (_raise_price, _forget), "school": (_next_year,)}
