"""Runs SQL of a model on a database. It runs in the jail; standard library only.

Invariants
- The database is in memory. What a statement does ends with the call, unless `execute` returns the database.
- A statement may neither attach a file nor load an extension, nor change how SQLite works (PRAGMA): the
  authorizer and SQLite's own limits refuse it. The jail bounds time and memory.
- References are never in the same call as what the model wrote.

`recipes.tools.guest.Guest` sends it. A request is a line of JSON, then the database, each byte as a Latin-1 character;
so is the answer of `execute`.
"""

import json
import os
import sqlite3

READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, 33}  # 33: SQLITE_RECURSIVE
NEVER = {
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
    sqlite3.SQLITE_TRANSACTION,
    32,  # SQLITE_SAVEPOINT
    sqlite3.SQLITE_CREATE_VTABLE,
    sqlite3.SQLITE_DROP_VTABLE,
}
TOLD = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"}  # PRAGMAs that tell
FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "zeroblob", "randomblob"}
LONGEST = 1_000_000  # bytes of a text or blob
WHOLE = 400  # characters of a text, and bytes of a blob, that are answered as they are


def read_request():
    """Returns the request and its database: a copy in memory, or a file of the jail that nobody can write to."""
    with open(0, "rb", closefd=False) as stdin:
        head, _, body = stdin.read().decode("utf-8", "surrogatepass").partition("\n")
    request = json.loads(head)
    if "file" in request:
        try:
            with open(request["file"], "rb"):
                pass
        except OSError as error:
            answer({"missing": f"{request['file']}: {error.strerror}"})
        uri = f"file:{''.join(f'%{byte:02x}' for byte in request['file'].encode())}?mode=ro&immutable=1"
        database = sqlite3.connect(uri, uri=True, isolation_level=None)
    else:
        database = sqlite3.connect(":memory:", isolation_level=None)
    # Real databases hold texts in other encodings too.
    database.text_factory = lambda text: text.decode("utf-8", "backslashreplace")
    content = body.encode("latin-1")
    if content:
        database.deserialize(content)
    return request, database


def guard(database, request, reading):
    """Lets a connection do no more than the model may. reading: nothing may be changed."""
    if "file" not in request:
        page = database.execute("PRAGMA page_size").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {max(1, request['most_bytes'] // page)}")
    database.execute("PRAGMA temp_store = MEMORY")
    database.execute("PRAGMA trusted_schema = OFF")
    for limit, value in (
        (sqlite3.SQLITE_LIMIT_LENGTH, LONGEST),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, LONGEST),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 200),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 50),
        (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        database.setlimit(limit, value)
    if reading:
        database.execute("PRAGMA query_only = ON")

    def allowed(action, first, second, schema, trigger):
        if action == sqlite3.SQLITE_PRAGMA:
            return sqlite3.SQLITE_OK if first in TOLD else sqlite3.SQLITE_DENY
        if action in NEVER or (action == sqlite3.SQLITE_FUNCTION and second in FUNCTIONS):
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if not reading or action in READING else sqlite3.SQLITE_DENY

    database.set_authorizer(allowed)


def outcome(database, sql, most_rows):
    """Returns what a statement answers: its columns and first rows, or SQLite's error."""
    try:
        cursor = database.execute(sql)
        columns = [column[0] for column in cursor.description or ()]
        rows = cursor.fetchmany(most_rows + 1)
        changed = cursor.rowcount
        cursor.close()
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"columns": columns, "rows": [[plain(cell) for cell in row] for row in rows], "changed": changed}


def plain(cell):
    """Returns a cell as JSON has it; a long one is replaced by both of its ends, to be shown, and a digest."""
    if isinstance(cell, bytes):
        return {"blob": cell.hex()} if len(cell) <= WHOLE else {"blob": ends(cell.hex()), "digest": digest(cell)}
    if isinstance(cell, str) and len(cell) > WHOLE:
        return {"text": ends(cell), "digest": digest(cell.encode("utf-8", "surrogatepass"))}
    return cell


def ends(text):
    return text[: WHOLE // 2] + text[-WHOLE // 2 :]


def digest(content):
    import hashlib  # only long cells pay for it

    return hashlib.sha256(content).hexdigest()


def answer(message, database=b""):
    data = json.dumps(message).encode() + b"\n" + database.decode("latin-1").encode()
    while data:
        data = data[os.write(1, data) :]
    os._exit(0)


def query():
    """Answers with the rows of one statement that changes nothing."""
    request, database = read_request()
    guard(database, request, reading=True)
    answer(outcome(database, request["sql"], request["most_rows"]))


def execute():
    """Runs one statement and answers with what it says, and with the database afterwards if it succeeded."""
    request, database = read_request()
    guard(database, request, reading=False)
    message = outcome(database, request["sql"], request["most_rows"])
    database.set_authorizer(None)
    content = b"" if "error" in message else database.serialize()
    answer({**message, "files": [["database", len(content)]] if content else []}, content)


def contents():
    """Answers with all rows of all tables, of a database that a trajectory has left or of one that we made."""
    request, database = read_request()
    guard(database, request, reading=True)
    names = outcome(database, "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name", request["most_rows"])
    if "error" in names:
        answer(names)
    tables = {}
    for (name,) in names["rows"]:
        quoted = name.replace('"', '""')
        tables[name] = outcome(database, f'SELECT * FROM "{quoted}"', request["most_rows"])
    answer({"tables": tables})
