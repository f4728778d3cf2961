"""Generated questions whose prompt does not show the schema, and demonstrations of how to answer them."""

import sqlite3
from collections import Counter
from itertools import islice

import pytest

from engine.console.options import parse
from recipes.tiny.task import Mix
from recipes.tools.generated_databases import COLUMNS, find, names_of, questions
from recipes.tools.sql import Config
from recipes.tools.sql_demonstrations import demonstrations

LOOK = '{"name": "query", "arguments": {"sql": "SELECT * FROM '


def columns(name):
    """The columns of a database by table."""
    database = sqlite3.connect(":memory:")
    database.deserialize(find(name))
    tables = [table for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {table: [row[1] for row in database.execute(f"PRAGMA table_info({table})")] for table in tables}
    database.close()
    return found


def test_a_question_without_schema_can_only_be_answered_by_who_looks():
    seen = set()
    for prompt in islice(questions("train", 3, schema=False), 300):
        metadata, content = prompt.metadata, prompt.messages[0]["content"]
        kind = metadata["database"].partition("-")[0]
        assert content.startswith("Tables: ")
        assert "CREATE" not in content
        topic = kind.partition(".")[0]
        varied = {table: names_of(kind)[choices[0]] for table, choices in COLUMNS[topic].items()}
        for name in (metadata["database"], *metadata.get("also", ())):
            assert all(column in columns(name)[table] for table, column in varied.items())
        [sql] = metadata.get("changes") or [metadata["sql"]]
        seen |= {(topic, column) for column in varied.values() if f" {column} " in sql or f"({column})" in sql}
    wanted = {(topic, each) for topic, tables in COLUMNS.items() for choices in tables.values() for each in choices}
    assert seen >= wanted
    assert columns("shop-17")["product"] == ["id", "name", "price"]


@pytest.mark.parametrize("name", ["shop", "bank-1", "shop.x-1", "shop-1.5", "bank.1-1"])
def test_an_unknown_database_is_a_key_error(name):
    with pytest.raises(KeyError):
        find(name)


def test_demonstrations_follow_the_mix_on_training_questions_only():
    trained = {prompt.messages[0]["content"] for prompt in islice(questions("train", 2, schema=False), 400)}
    kinds = Counter()
    for demonstration in islice(demonstrations(Mix(head=0.5, clean=0.2, err=0.3), 2), 400):
        assert demonstration[0]["content"] in trained
        assert [message["role"] for message in demonstration if message["role"] != "tool"][-1] == "assistant"
        looks = [LOOK in message["content"] for message in demonstration if message["role"] == "assistant"]
        kinds["clean" if looks[0] else "err" if any(looks) else "head"] += 1
    assert kinds["head"] == pytest.approx(200, abs=40)
    assert kinds["clean"] == pytest.approx(80, abs=30)


def test_rows_of_a_file_always_come_with_their_schema(capsys, tmp_path):
    given = [f"{name}={tmp_path}" for name in ("data", "held_out", "databases")]
    with pytest.raises(SystemExit):
        parse(Config, [*given, "schema=false", "rollout.max_tokens=512"])
    assert "schema must be true with data" in capsys.readouterr().err
