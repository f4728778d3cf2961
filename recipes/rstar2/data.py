"""Prepares data: problems to train and evaluate on, conversations to fine-tune on.

    python recipes/rstar2/data.py set=dapo                                    # from the Hugging Face hub
    python recipes/rstar2/data.py set=mawps source=mawps.jsonl train_rows=1600 output=data/mawps
    python recipes/rstar2/data.py set=openmath against=data/math500,data/aime24 output=data/openmath
    python recipes/rstar2/data.py set=release source=data/dapo/train.parquet,data/openmath/train.parquet output=data/rl

writes train.parquet and test.parquet into the output folder (whichever has rows), in the row format of rStar2-Agent's
release or in the SFT format, with dropped.jsonl (each row that is not used, and why) and report.json (counts, hashes,
the command). Rows stream through, so memory is bounded. The same command resumes work that was interrupted.

The sets and how their rows are read are in `recipes/rstar2/parts/preparation/`.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.atomic_files import CannotWrite, write_whole
from engine.console.options import flat, parse
from engine.console.progress import Bar
from engine.data.prompts import read_prompts
from engine.errors import BadInput
from engine.run.identity import Identity, describe
from recipes.rstar2.parts.preparation.rows import Dropped, Place, Row, WrongField
from recipes.rstar2.parts.preparation.rules import (
    Agreement,
    Contamination,
    Duplicates,
    Rule,
    huge_answer,
    no_answer,
    no_question,
    not_an_integer,
    not_text,
    sifted,
)
from recipes.rstar2.parts.preparation.sets import SETS, DataSet, SetName
from recipes.rstar2.parts.preparation.shards import DROPPED, REPORT, TEST, TRAIN, Shards, assemble, read_report
from recipes.rstar2.parts.preparation.sources import Source, Sources, find, open_source
from sandbox.printable import printable
from sandbox.require import at_least, none_or, require, within

USABLE: Sequence[Rule] = (not_text, no_question, no_answer)


@dataclass(frozen=True, kw_only=True)
class Config:
    set: Annotated[SetName, "which data set"] = "dapo"
    source: Annotated[tuple[str, ...], "files, folders or ids of the hub; none: where the set is on the hub"] = ()
    output: Annotated[Path | None, "folder to write; none: data/SET"] = None
    train_rows: Annotated[int | None, "rows drawn by seed for train.parquet, the others are held out; none: all"] = None
    integers: Annotated[bool | None, "only integer answers; none: as the set's use in the report"] = None
    against: Annotated[tuple[Path, ...], "test sets; rows that share 8 words in a row with them are dropped"] = ()
    answers: Annotated[Path | None, "samples.jsonl of recipes/rstar2/filter.py on these rows"] = None
    agree: Annotated[int, "how many of a row's answers must equal its reference"] = 2
    protocol: Annotated[Literal["report", "release"], "whose Python tool conversations call"] = "report"
    broken_calls: Annotated[float, "share of demonstrations whose first call fails and is repaired"] = 0.0
    limit: Annotated[int | None, "the first rows of the source only"] = None
    seed: Annotated[int, "decides which rows are held out, the order of options, and which calls fail"] = 0
    fresh: Annotated[bool, "anew, in place of what the output folder holds"] = False

    def __post_init__(self) -> None:
        for name, least in {"train_rows": 0, "limit": 1, "agree": 1}.items():
            value = getattr(self, name)
            require(name, value, none_or(at_least(least)))
        require("broken_calls", self.broken_calls, within("[0, 1]"))
        if self.broken_calls and self.set != "gsm8k_demonstrations":
            raise ValueError(
                f"broken_calls must be 0 for {self.set}, got {self.broken_calls}: only the calls of demonstrations "
                "are made here. Fix: set=gsm8k_demonstrations"
            )
        for path in (*self.against, *filter(None, [self.answers])):
            if not path.exists():
                raise ValueError(f"{path} does not exist")
        kind = SETS[self.set].kind
        if kind == "evaluation":
            for name in ("train_rows", "integers", "against", "answers"):
                if getattr(self, name) not in (None, ()):
                    raise ValueError(f"{name}: no row of an evaluation set is left out, and {self.set} is one")
        elif kind == "chat" and (self.integers is not None or self.answers is not None):
            raise ValueError(f"integers and answers are for problems, and {self.set} holds conversations")

    @property
    def data_set(self) -> DataSet:
        return SETS[self.set]

    @property
    def folder(self) -> Path:
        return self.output or Path("data") / self.set


def prepare(config: Config, console: Console | None = None, argv: Sequence[str] = ()) -> Mapping[str, Any]:
    """Writes the set, or goes on with it, and returns what report.json holds. argv: the command line, for the report.

    Raises BadInput for what is given, and CannotWrite.
    """
    console = console or Console()
    started = time.monotonic()
    sources = open_sources(config)
    identity = _identity(config, sources)
    report = read_report(config.folder)
    if report is not None and not config.fresh:
        _check_same(config.folder, report["identity"], identity)
        return report
    rows = len(sources) if config.limit is None else min(config.limit, len(sources))
    with _working_folder(config, identity) as folder:
        shards = Shards(folder, rows)
        _work(config, sources, shards, console)
        (config.folder / REPORT).unlink(missing_ok=True)
        for name in (TRAIN, TEST, DROPPED):
            (config.folder / name).unlink(missing_ok=True)
        train_rows = 0 if config.data_set.kind == "evaluation" else config.train_rows
        outcome = assemble(shards, config.folder, train_rows=train_rows, conversations=config.data_set.kind == "chat")
        if not outcome.files:
            reasons = ", ".join(f"{count} {reason}" for reason, count in outcome.dropped.items())
            raise BadInput(
                f"source: no row of {rows} can be used ({reasons}), see {config.folder / DROPPED}. "
                f"Fix: check that the source is {config.set}, and the options"
            )
        report = {
            "set": config.set,
            **asdict(outcome),
            "sources": [str(source.path) for source in sources.sources],
            "command": shlex.join(argv),
            "identity": identity.values,
            "wall_s": round(time.monotonic() - started, 1),
        }
        write_whole(config.folder / REPORT, [json.dumps(report, indent=2).encode(), b"\n"])
        shutil.rmtree(folder)
    return report


def open_sources(config: Config) -> Sources:
    """Opens what `source` names, or the set's own data on the hub. Raises BadInput."""
    paths = find(config.source, config.data_set.hub, config.set)
    sources = [open_source(path, config.data_set.columns) for path in paths]
    twice = {name for name, count in Counter(source.name for source in sources).items() if count > 1}
    if config.answers is not None and twice:
        raise BadInput(f"answers: rows of two sources have one id, as both are named {min(twice)}. Fix: rename one")
    in_folder = [replace(source, name=f"{source.path.parent.name}-{source.name}") for source in sources]
    return Sources(
        [there if source.name in twice else source for source, there in zip(sources, in_folder, strict=True)]
    )


def _identity(config: Config, sources: Sources) -> Identity:
    """Returns what decides the rows: options, and the names and contents of files."""
    given = Identity(flat(config), free=("source", "output", "fresh"))
    against = [[path.name, open_source(test_file(path)).sha256()] for path in config.against]
    answers = None if config.answers is None else open_source(config.answers).sha256()
    source = [[source.name, source.sha256()] for source in sources.sources]
    return Identity({**given.values, "against": against, "answers": answers, "source": source})


def _check_same(folder: Path, there: Mapping[str, Any], identity: Identity) -> None:
    if differences := identity.differences(there):
        raise BadInput(
            f"output: {folder} holds rows that were prepared otherwise: {describe(differences)}. "
            "Fix: give another output=, or fresh=true to replace them"
        )


@contextmanager
def _working_folder(config: Config, identity: Identity) -> Iterator[Path]:
    """Opens the folder of the shards for one process at a time, and deletes shards of other options.

    Raises BadInput where the output folder holds something else.
    """
    folder = config.folder / ".unfinished"
    if not folder.exists() and not config.fresh and read_report(config.folder) is None:
        foreign = [name for name in (TRAIN, TEST) if (config.folder / name).exists()]
        if foreign:
            raise BadInput(
                f"output: {config.folder} holds a {foreign[0]} that this program did not write. "
                "Fix: give another output=, or fresh=true to replace it"
            )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(f"output: another process writes {config.folder}. Fix: wait for it") from error
        plan, text = folder / "plan.json", json.dumps(identity.values, sort_keys=True)
        if config.fresh or not plan.exists() or plan.read_text() != text:
            for path in folder.glob("shard-*"):
                path.unlink()
            write_whole(plan, [text.encode()])
        yield folder


def _work(config: Config, sources: Sources, shards: Shards, console: Console) -> None:
    """Makes the shards that are not there yet."""
    rules = rules_of(config, shards)
    total, done = sum(map(len, shards.ranges)), shards.done_rows

    def results(numbers: range) -> Iterator[tuple[str, Row | Dropped]]:
        for source, number, row in sources.rows(numbers):
            place = Place(
                id=f"{source.name}-{number}",
                index=number,
                seed=config.seed,
                protocol=config.protocol,
                broken_calls=config.broken_calls,
            )
            yield place.id, sifted(_convert(config.data_set, source, row, place), rules)

    if done:
        console.print(f"going on: {done:,} of {total:,} rows are prepared", highlight=False)
    with _progress(console) as progress:
        task = progress.add_task(config.set, total=total, completed=done)
        shards.fill(results, seed=config.seed, on_rows=lambda rows: progress.update(task, completed=rows))


def _convert(data_set: DataSet, source: Source, row: Mapping[str, Any], place: Place) -> Row | Dropped:
    """Converts a row of the source. Raises BadInput naming file, row and field."""
    try:
        converted = data_set.convert(row, place)
        if data_set.kind == "evaluation" and isinstance(unusable := sifted(converted, USABLE), Dropped):
            raise WrongField(f"a row of an evaluation set cannot be left out, and this one has {unusable.reason}")
        return converted
    except WrongField as error:
        columns = ", ".join(source.table.columns)
        raise BadInput(
            f"{source.table.where(place.index)}: {error} (the file has {columns}). "
            "Fix: give a file as the data card of the set describes it, or rename its columns"
        ) from error


def rules_of(config: Config, shards: Shards) -> list[Rule]:
    """Returns all rules that rows must pass, those that compare with other rows last. Raises BadInput."""
    data_set = config.data_set
    if data_set.kind == "evaluation":
        return []
    rules = [not_text, no_question, *data_set.rules]
    if data_set.integers if config.integers is None else config.integers:
        rules += [not_an_integer, huge_answer]
    if config.answers is not None:
        rules.append(Agreement(read_answers(config.answers), config.agree))
    if config.against:
        rules.append(contamination(config.against))
    return [*rules, Duplicates(shards.marks())]


def contamination(paths: Sequence[Path], n: int = 8) -> Contamination:
    """Returns the rule against all rows of test sets, as this program writes them or as they are. Raises BadInput."""
    rule = Contamination(n)
    for path in paths:
        file = test_file(path)
        name = path.name if file != path else None
        try:
            for prompt in read_prompts(file, name=name):
                rule.add(prompt.messages[-1]["content"], name=prompt.id)
        except ValueError as error:
            raise BadInput(f"against: {error}") from error
    return rule


def test_file(path: Path) -> Path:
    """Returns the test file of a folder that this program wrote, and any other path as it is."""
    return path / TEST if (path / TEST).exists() else path


def read_answers(path: Path) -> dict[str, list[str | None]]:
    """Returns a model's answers to each problem by its id. Raises BadInput."""
    source = open_source(path)
    answers_by_id = {}
    for number in range(len(source)):
        row = source.row(number)
        answers = row.get("answers")
        if not isinstance(row.get("id"), str) or not isinstance(answers, list):
            where = source.table.where(number)
            raise BadInput(f"{where}: answers: a row must have id and answers. Fix: give samples.jsonl of filter.py")
        answers_by_id[row["id"]] = answers
    return answers_by_id


def _progress(console: Console) -> Bar:
    return Bar(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


def table(report: Mapping[str, Any]) -> Table:
    """Returns a table of what became of the rows."""
    counts = Table("", "rows", title=report["set"])
    counts.columns[1].justify = "right"
    counts.add_row("in", f"{report['rows_in']:,}")
    for reason, count in report["dropped"].items():
        counts.add_row(f"dropped: {reason}", f"{count:,}")
    for name, file in report["files"].items():
        counts.add_row(f"out: {name}", f"{file['rows']:,}")
    return counts


def main(argv: Sequence[str]) -> int:
    config = parse(Config, argv, description=__doc__)
    console = Console()
    try:
        report = prepare(config, console, ["python", "recipes/rstar2/data.py", *argv])
    except BadInput as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except (CannotWrite, OSError) as error:
        print(printable(f"data: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = shlex.join(["python", sys.argv[0], *argv])
        print(f"data: interrupted; finished parts are kept. To go on: {again}", file=sys.stderr)
        return 130
    console.print(table(report))
    console.print(f"{config.folder}", markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
