"""Databases of recipes/tools: whole episodes of scripted models, graded in real jails."""

import asyncio
import json
import sqlite3
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
import pytest_asyncio

from engine.contracts import check_world
from engine.errors import BadInput
from engine.ports import GraderUnavailable
from engine.telemetry.metrics import tool_error_share
from recipes.tiny.task import Mix
from recipes.tools.database import DatabaseFile, Databases, SqlLimits
from recipes.tools.generated_databases import find, questions, tells
from recipes.tools.guest import TOOLS
from recipes.tools.soundness import question_check, require_sound, verdicts_of
from recipes.tools.spider import DatabaseFolder, read_questions
from recipes.tools.sql_demonstrations import demonstrations
from recipes.tools.sql_reward import SqlReward, WrongReference, same_rows
from sandbox import Sandbox, SandboxConfig
from tests.support.fakes import a_prompt
from tests.support.tool_worlds import episode, tool

pytestmark = pytest.mark.asyncio(loop_scope="module")
COUNT = {"database": "shop-1", "sql": "SELECT count(*) FROM customer WHERE city = 'Oslo'", "also": ["shop-70001"]}
ORDERED = {"database": "shop-1", "sql": "SELECT name FROM product ORDER BY name"}
RAISED = {"database": "shop-1", "changes": ["UPDATE product SET price = price + 3 WHERE name = 'lamp'"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box():
    async with Sandbox(SandboxConfig(slots=4, tiers=(TOOLS,))) as sandbox:
        yield sandbox


def question(metadata, number=0):
    return replace(a_prompt(number, "How many?"), metadata=metadata)


async def graded(box, metadata, *turns, **options):
    trajectory = await episode(Databases(box, find), question(metadata), *turns)
    return await SqlReward(box, find, **options)(trajectory), trajectory


@pytest.mark.smoke
async def test_a_model_that_asks_and_answers_gets_1(box):
    look = [
        tool("query", sql="PRAGMA table_info(customer)"),
        tool("query", sql="SELECT name, city FROM customer LIMIT 2"),
    ]
    answer = "<answer>SELECT count(id) AS n FROM customer WHERE city LIKE 'oslo';</answer>"
    reward, trajectory = await graded(box, COUNT, look, answer)
    assert reward == 1.0
    info, rows = trajectory.tool_uses
    assert [use.outcome for use in (info, rows)] == ["ok", "ok"]
    assert "city" in info.response
    assert rows.response.splitlines()[0] == "name | city"
    assert len(rows.response.splitlines()) == 3
    assert trajectory.states == {"database": b""}


@pytest.mark.parametrize(
    "answer",
    [
        "<answer>SELECT count(*) FROM customer</answer>",
        "<answer>SELECT coun(*) FROM customer</answer>",
        "<answer></answer>",
        "<answer>DELETE FROM customer</answer>",
        "SELECT count(*) FROM customer WHERE city = 'Oslo'",
        "There are 2.",
        "<answer>SELECT count(*) FROM customer WHERE city = 'Oslo'; SELECT 1</answer>",
        "<answer>WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT max(n) FROM r</answer>",
    ],
)
async def test_a_wrong_answer_gets_0(box, answer):
    assert (await graded(box, COUNT, answer))[0] == 0.0


async def test_a_number_that_is_right_by_chance_is_not_enough(box):
    right = sqlite3.connect(":memory:")
    right.deserialize(find("shop-1"))
    [(count,)] = right.execute(COUNT["sql"]).fetchall()
    right.deserialize(find("shop-70001"))
    assert right.execute(COUNT["sql"]).fetchall() != [(count,)], "the second database must differ for this test"
    right.close()
    answer = f"<answer>SELECT {count}</answer>"
    assert (await graded(box, {**COUNT, "also": []}, answer))[0] == 1.0
    assert (await graded(box, COUNT, answer))[0] == 0.0


NOBODY = {"database": "shop-1", "sql": "SELECT id, name FROM customer WHERE city = 'Nowhere'"}


@pytest.mark.parametrize("answer", ["", "-- nothing", "SELECT 1 WHERE 0"])
async def test_an_answer_without_rows_is_wrong_even_if_the_reference_has_none(box, answer):
    assert (await graded(box, NOBODY, f"<answer>{answer}</answer>"))[0] == 0.0


async def test_a_reference_that_asks_for_nothing_gives_no_grade(box):
    with pytest.raises(GraderUnavailable, match="p0"):
        await graded(box, NOBODY, "<answer>SELECT 1, 2 WHERE 0</answer>")
    with pytest.raises(GraderUnavailable, match="p0"):
        await graded(box, {"database": "shop-1", "changes": ["UPDATE product SET price = 1 WHERE id = 99"]}, "Done.")
    assert (await graded(box, NOBODY, "<answer>SELECT id, name FROM customer</answer>"))[0] == 0.0


@pytest.mark.parametrize("split", ["train", "test"])
async def test_every_generated_question_asks_for_something(split):
    for prompt in islice(questions(split, 1), 300):
        metadata = prompt.metadata
        [sql] = metadata.get("changes") or [metadata["sql"]]
        assert any(tells(name, sql) for name in [metadata["database"], *metadata.get("also", ())]), prompt


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.1 + 0.2 - 0.3, 0, True),
        (1e-7, 0, False),
        (1e-7, 2e-7, False),
        (1 / 3, 0.333333, True),
        (1, "1", False),
        (None, 0, False),
        (2**53 + 1, 2**53, False),
        ({"blob": "00"}, "00", False),
    ],
)
async def test_cells_are_the_same_within_six_digits(one, other, same):
    assert same_rows([[one]], [[other]], ordered=False) is same


async def test_the_order_counts_where_the_reference_has_one_or_as_the_recipe_says(box):
    backwards = "<answer>SELECT name FROM product ORDER BY name DESC</answer>"
    assert (await graded(box, ORDERED, backwards))[0] == 0.0
    assert (await graded(box, ORDERED, backwards, order="never"))[0] == 1.0
    unordered = {**ORDERED, "sql": "SELECT name FROM product"}
    assert (await graded(box, unordered, backwards))[0] == 1.0
    assert (await graded(box, unordered, backwards, order="always"))[0] == 0.0


async def test_a_change_is_graded_by_what_it_leaves(box):
    change = tool(
        "execute", sql="UPDATE product SET price = price + 3 WHERE id = (SELECT id FROM product WHERE name = 'lamp')"
    )
    reward, trajectory = await graded(box, RAISED, change, [tool("query", sql="SELECT 1")], "Done.")
    assert (reward, trajectory.tool_uses[0].response) == (1.0, "1 rows changed")
    for wrong in (
        [],
        [change, change],
        [tool("execute", sql="UPDATE product SET price = price + 3")],
        [change, tool("execute", sql="CREATE TABLE more (id)")],
        [tool("execute", sql="DROP TABLE product")],
        [tool("query", sql="UPDATE product SET price = price + 3 WHERE name = 'lamp'")],
    ):
        reward, _ = await graded(box, RAISED, *([wrong] if wrong else []), "I have done it.")
        assert reward == 0.0, wrong
    assert find("shop-1") == find.__wrapped__("shop-1"), "what is shared has not changed"


async def test_a_statement_that_fails_changes_nothing_and_is_told(box):
    turn = [
        tool("execute", sql="INSERT INTO customer VALUES (1, 'Twice', 'Oslo')"),
        tool("execute", sql="INSERT INTO custommer VALUES (1)"),
        tool("execute", sql="BEGIN"),
        tool("query", sql="SELECT 1; SELECT 2"),
        tool("query", sql=3),
        tool("query"),
        tool("query", sql=""),
    ]
    trajectory = await episode(Databases(box, find), question(RAISED), turn, "Done.")
    assert [use.outcome for use in trajectory.tool_uses] == ["error"] * 6 + ["ok"]
    assert "UNIQUE" in trajectory.tool_uses[0].response
    assert "no such table" in trajectory.tool_uses[1].response
    assert trajectory.states == {"database": b""}


async def test_a_column_that_is_not_there_is_an_error_of_the_tool_and_counted(box):
    wrong = tool("query", sql="SELECT count(*) FROM customer WHERE town = 'Oslo'")
    reward, trajectory = await graded(box, COUNT, wrong, [tool("query", sql="SELECT * FROM customer LIMIT 1")], "None.")
    failed, looked = trajectory.tool_uses
    assert (failed.outcome, failed.response) == ("error", "OperationalError: no such column: town")
    assert (looked.outcome, looked.response.splitlines()[0]) == ("ok", "id | name | city")
    rewarded = replace(trajectory, reward=reward)
    assert tool_error_share([rewarded]) == 0.5


@pytest.mark.parametrize(
    ("mix", "right"),
    [(Mix(head=0, clean=1, err=0), 1.0), (Mix(head=0, clean=0, err=1), 1.0), (Mix(head=1, clean=0, err=0), None)],
)
async def test_a_demonstration_reads_as_a_rollout_does_and_is_right_if_it_looks(box, mix, right):
    asked = islice(questions("train", 5, schema=False), 40)
    for prompt, (user, *messages) in zip(asked, demonstrations(mix, 5), strict=False):
        assert user == prompt.messages[0]
        turns = [message["content"] for message in messages if message["role"] == "assistant"]
        trajectory = await episode(Databases(box, find), prompt, *turns)
        replies = [message["content"] for message in messages if message["role"] == "tool"]
        assert [use.response for use in trajectory.tool_uses] == replies
        if right is not None:
            assert await SqlReward(box, find)(trajectory) == right


async def test_members_of_a_group_change_copies_of_their_own(box):
    async def member(number):
        turns = [
            tool("execute", sql=f"UPDATE product SET price = {number}"),
            tool("query", sql="SELECT max(price) FROM product"),
        ]
        return (await episode(Databases(box, find), question(RAISED), turns, "x", sample=number)).tool_uses[-1].response

    assert await asyncio.gather(*map(member, range(6))) == [f"max(price)\n{n}" for n in range(6)]


async def test_what_is_read_is_bounded(box):
    world = Databases(box, find, SqlLimits(rows=3, output_chars=60))
    turn = [
        tool("query", sql="WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 99) SELECT n FROM r"),
        tool("query", sql="SELECT printf('%.*c', 500000, 'x')"),
    ]
    rows, long = (await episode(world, question(COUNT), turn, "x")).tool_uses
    assert rows.response.splitlines() == ["n", "1", "2", "3", "(more rows)"]
    assert len(long.response) <= 60


@pytest.mark.parametrize("split", ["train", "test"])
async def test_references_of_the_generated_questions_are_right_and_others_are_not(box, split):
    reward, asked = SqlReward(box, find), list(islice(questions(split, 3), 24))
    assert len({prompt.id for prompt in asked}) == 24
    assert len(Counter(prompt.source for prompt in asked)) == 4
    for prompt in asked:
        metadata = prompt.metadata
        if "sql" in metadata:
            right, wrong = [f"<answer>{metadata['sql']}</answer>"], ["<answer>SELECT 'no'</answer>"]
        else:
            right, wrong = [tool("execute", sql=metadata["changes"][0]), "Done."], ["Done."]
        assert await reward(await episode(Databases(box, find), prompt, *right)) == 1.0, prompt
        if "sql" in metadata:
            assert await reward(await episode(Databases(box, find), prompt, *wrong)) == 0.0, prompt


@pytest.mark.parametrize(("middle", "value"), [("b", 1.0), ("c", 0.0)])
async def test_long_texts_are_compared_whole_and_answered_by_their_ends(box, middle, value):
    long = "printf('%.*c', 300000, 'a') || '{}' || printf('%.*c', 300000, 'a')"
    reference = {"database": "shop-1", "sql": f"SELECT {long.format('b')}, CAST({long.format('b')} AS BLOB)"}
    sql = f"SELECT {long.format(middle)}, CAST({long.format(middle)} AS BLOB)"
    reward, trajectory = await graded(box, reference, tool("query", sql=sql), f"<answer>{sql}</answer>")
    assert reward == value
    assert trajectory.tool_uses[0].response.splitlines()[1].startswith("aaaa")


async def test_an_answer_has_no_more_rows_than_the_reference_and_one(box):
    noted = Noted(box)
    many = "WITH RECURSIVE r(n) AS (SELECT 8 UNION ALL SELECT n + 1 FROM r LIMIT 10000) SELECT n FROM r"
    trajectory = await episode(Databases(box, find), question(COUNT), f"<answer>{many}</answer>")
    assert await SqlReward(noted, find)(trajectory) == 0.0
    assert max(len(result.stdout) for result in noted.results) < 1000


class Noted:
    """A sandbox that keeps its results."""

    def __init__(self, box):
        self.box, self.results = box, []

    async def run(self, *arguments, **options):
        self.results.append(await self.box.run(*arguments, **options))
        return self.results[-1]


async def test_an_answer_in_a_block_within_its_tag_is_read(box):
    assert (await graded(box, COUNT, f"<answer>\n```sql\n{COUNT['sql']};\n```\n</answer>"))[0] == 1.0


async def test_texts_in_another_encoding_are_read_and_compared(box, tmp_path):
    place = tmp_path / "database" / "names"
    place.mkdir(parents=True)
    database = sqlite3.connect(place / "names.sqlite")
    database.execute("CREATE TABLE person (name TEXT)")
    database.execute("INSERT INTO person VALUES (CAST(x'4dfc6c6c6572' AS TEXT)), (CAST(x'4df66c6c6572' AS TEXT))")
    database.commit()
    database.close()
    find_name = DatabaseFolder(tmp_path / "database", 1 << 20).find
    prompt = question({"database": "names", "sql": "SELECT name FROM person WHERE rowid = 1"})
    for number, value in ((1, 1.0), (2, 0.0)):
        sql = f"SELECT name FROM person WHERE rowid = {number}"
        looks = await episode(Databases(box, find_name), prompt, tool("query", sql=sql), f"<answer>{sql}</answer>")
        assert looks.tool_uses[0].outcome == "ok"
        assert await SqlReward(box, find_name)(looks) == value


async def test_a_file_that_cannot_be_opened_in_memory_is_named(tmp_path):
    path, databases = spider(tmp_path)
    place = tmp_path / "database" / "pets" / "pets.sqlite"
    changed = sqlite3.connect(place)
    changed.execute("PRAGMA journal_mode = WAL")
    changed.close()
    with pytest.raises(BadInput, match="WAL"):
        list(read_questions(path, databases))
    for content, word in ((b"", "empty"), (b"text" * 100, "no SQLite")):
        place.write_bytes(content)
        with pytest.raises(BadInput, match=word):
            list(read_questions(path, DatabaseFolder(tmp_path / "database", 1 << 20)))


async def test_a_reference_that_does_not_run_is_named(box):
    with pytest.raises(WrongReference, match=r"p0.*no such table"):
        await graded(box, {"database": "shop-1", "sql": "SELECT 1 FROM nowhere"}, "<answer>SELECT 1</answer>")
    with pytest.raises(ValueError, match=r"p0.*unknown"):
        await graded(box, {**COUNT, "database": "shop"}, "x")


def spider(folder, *, rows=None, size=3):
    place = folder / "database" / "pets"
    place.mkdir(parents=True)
    for name, count in (("pets", size), ("pets_2", size + 2)):
        database = sqlite3.connect(place / f"{name}.sqlite")
        database.execute("CREATE TABLE pet (id INTEGER PRIMARY KEY, kind TEXT)")
        database.executemany("INSERT INTO pet VALUES (?, 'dog')", [(n,) for n in range(count)])
        database.commit()
        database.close()
    row = {"db_id": "pets", "question": "How many?", "query": "SELECT count(*) FROM pet"}
    (folder / "dev.json").write_text(json.dumps([row] if rows is None else rows))
    return folder / "dev.json", DatabaseFolder(folder / "database", 1 << 20)


async def test_rows_of_spider_are_graded_on_every_database_of_their_folder(box, tmp_path):
    path, databases = spider(tmp_path)
    [prompt] = read_questions(path, databases)
    assert "CREATE TABLE pet" in prompt.messages[0]["content"]
    reward = SqlReward(box, databases.find)
    for answer, value in (("SELECT count(id) FROM pet", 1.0), ("SELECT 3", 0.0)):
        trajectory = await episode(Databases(box, databases.find), prompt, f"<answer>{answer}</answer>")
        assert await reward(trajectory) == value


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([], "no rows"),
        (["x"], "object"),
        ([{"db_id": "pets", "question": "?"}], "query or SQL"),
        ([{"db_id": "../pets", "question": "?", "query": "SELECT 1"}], "db_id"),
        ([{"db_id": "cats", "question": "?", "query": "SELECT 1"}], "cats"),
        ([{"db_id": "pets", "question": "?", "query": {"sel": 1}}], "query"),
    ],
)
async def test_a_row_that_is_no_question_is_named(tmp_path, rows, word):
    path, databases = spider(tmp_path, rows=rows)
    with pytest.raises(BadInput, match=word):
        list(read_questions(path, databases))


async def test_a_database_above_the_bound_is_asked_where_it_lies(tmp_path):
    """It has more bytes than a call may carry or a jail may write, and is graded as any other."""
    path, _ = spider(tmp_path, size=300_000)
    folder = DatabaseFolder(tmp_path / "database", 100)
    assert (tmp_path / "database" / "pets" / "pets.sqlite").stat().st_size > 3 << 20
    [prompt] = read_questions(path, folder)
    assert isinstance(folder.find("pets"), DatabaseFile)
    assert "CREATE TABLE pet" in prompt.messages[0]["content"]
    turn = [
        tool("query", sql="SELECT count(*) FROM pet"),
        tool("query", sql="INSERT INTO pet VALUES (-1, 'cat')"),
        tool("query", sql="ATTACH '/data/pets/pets_2.sqlite' AS other"),
    ]
    limits = SqlLimits(database_bytes=100)
    async with Sandbox(SandboxConfig(slots=2, tiers=(TOOLS,), data=folder.folder)) as jail:
        reward = SqlReward(jail, folder.find, limits)
        for answer, value in (("SELECT count(id) FROM pet", 1.0), ("SELECT 300000", 0.0)):
            trajectory = await episode(Databases(jail, folder.find, limits), prompt, turn, f"<answer>{answer}</answer>")
            assert [use.outcome for use in trajectory.tool_uses] == ["ok", "error", "error"]
            assert trajectory.tool_uses[0].response.splitlines()[1] == "300000"
            assert trajectory.states == {"database": b""}
            assert await reward(trajectory) == value


async def test_a_large_database_cannot_be_changed_and_that_is_said(box, tmp_path):
    spider(tmp_path)
    folder = DatabaseFolder(tmp_path / "database", 100)
    changing = question({"database": "pets", "changes": ["DELETE FROM pet"]})
    with pytest.raises(ValueError, match=r"p0.*pets\.sqlite.*database_bytes"):
        await episode(Databases(box, folder.find), changing, "x")
    asking = await episode(Databases(box, folder.find), replace(changing, tools=("query",)), "x")
    with pytest.raises(ValueError, match=r"p0.*pets\.sqlite"):
        await SqlReward(box, folder.find)(asking)


async def test_a_host_without_the_folder_is_no_fault_of_the_model(box, tmp_path):
    spider(tmp_path)
    folder = DatabaseFolder(tmp_path / "database", 100)
    prompt = replace(question({"database": "pets", "sql": "SELECT count(*) FROM pet"}), tools=("query",))
    world = Databases(box, folder.find)
    asked = await episode(world, prompt, tool("query", sql="SELECT 1"), "x")
    assert [use.outcome for use in asked.tool_uses] == ["lost"]
    answered = await episode(world, prompt, "<answer>SELECT 3</answer>")
    with pytest.raises(GraderUnavailable, match=r"pets\.sqlite"):
        await SqlReward(box, folder.find)(answered)


@pytest.mark.parametrize("why", ["a link", "a mode", "a folder's mode"])
async def test_a_file_that_the_jail_cannot_read_is_named(tmp_path, why):
    path, _ = spider(tmp_path)
    place = tmp_path / "database" / "pets" / "pets.sqlite"
    match why:
        case "a link":
            place.rename(tmp_path / "elsewhere.sqlite")
            place.symlink_to(tmp_path / "elsewhere.sqlite")
        case "a mode":
            place.chmod(0o600)
        case _:
            place.parent.chmod(0o700)
    with pytest.raises(BadInput, match="jail"):
        list(read_questions(path, DatabaseFolder(tmp_path / "database", 100)))


async def test_a_check_names_the_references_that_do_not_run_or_ask_for_nothing(box):
    prompts = [
        replace(question(metadata), id=name)
        for name, metadata in {
            "sound": COUNT,
            "changes": RAISED,
            "nothing": NOBODY,
            "broken": {**COUNT, "sql": "SELECT 1 FROM nowhere"},
            "broken change": {**RAISED, "changes": ["DELETE FROM nowhere"]},
            "endless": {
                **COUNT,
                "sql": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT max(n) FROM r",
            },
        }.items()
    ]
    verdicts = await verdicts_of(prompts, question_check(SqlReward(box, find)))
    found = {verdict.task: (bool(verdict.fault), bool(verdict.note)) for verdict in verdicts}
    assert found == {
        "sound": (False, False),
        "changes": (False, False),
        "nothing": (False, True),
        "broken": (True, False),
        "broken change": (True, False),
        "endless": (True, False),
    }
    with pytest.raises(BadInput, match=r"3 of 6.*nowhere"):
        require_sound(verdicts)


async def test_a_database_is_a_world(box):
    await check_world(Databases(box, find), question(COUNT), "execute", {"sql": "DELETE FROM purchase WHERE id = 1"})
