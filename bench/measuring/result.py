"""A result of a bench as a file keeps it: figures by case and metric, their rounds, and where they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.measuring.metric import Kind, Metric, interval

MOST_COLUMNS = 12  # of a table on a terminal of 160 columns

Case = str  # a row of the table; "" where there is only one
Figures = Mapping[Case, Mapping[str, float]]  # one round: case -> metric -> value
Samples = dict[Case, dict[str, list[float]]]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and what else it did. others: share of all cores that other processes used meanwhile."""

    cores: int
    cpu: str
    python: str
    kernel: str
    load_before: float
    load_after: float
    others: float

    @property
    def machine(self) -> str:
        return f"{self.cores} cores of {self.cpu or 'unknown'}"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """disturbed: why no ratio of this run is shown, if so. figures: each metric's summary of its samples.

    simulated: as of a Bench. wall_s: seconds that the whole run took; None where that was not measured.
    """

    bench: str
    command: str
    date: str
    commit: str
    environment: Environment
    config: dict[str, Any]
    rounds: int
    disturbed: str | None
    metrics: dict[str, Metric]
    figures: dict[Case, dict[str, float]]
    samples: Samples
    simulated: bool = False
    wall_s: float | None = None

    @classmethod
    def read(cls, path: Path) -> Result:
        """Raises ValueError naming a file that holds no result."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(f"{path} is no result of a bench: {error}") from None

    def line(self) -> bytes:
        return msgspec.json.encode(self)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(self.line(), indent=1) + b"\n")

    @property
    def machine(self) -> str:
        return self.environment.machine

    def flat(self) -> dict[str, list[float]]:
        """Returns the samples by name: "CASE/METRIC", or "METRIC" where there is one case without a name."""
        return {name_of(case, metric): values for case, of in self.samples.items() for metric, values in of.items()}

    def figure(self, name: str) -> float:
        """Returns a figure by its name in `flat`, or a number of the configuration by "config/FIELD".

        Raises KeyError.
        """
        case, _, metric = name.rpartition("/")
        if case == "config":
            return float(self.config[metric])
        return self.figures[case][metric]


def name_of(case: Case, metric: str) -> str:
    return f"{case}/{metric}" if case else metric


def summarised(samples: Samples, metrics: Mapping[str, Metric]) -> dict[Case, dict[str, float]]:
    return {
        case: {name: metrics[name].summarised(values) for name, values in of.items()} for case, of in samples.items()
    }


class Table(msgspec.Struct, frozen=True, kw_only=True):
    header: list[str]
    rows: list[list[str]]


def tables(result: Result) -> list[Table]:
    """Returns the tables of a result: a row for each case, a column for each metric.

    Cases share a table where one has all metrics of the other. Where a case is alone, or there are more than
    MOST_COLUMNS metrics and fewer cases, the metrics are the rows.
    """
    groups: list[tuple[set[str], list[Case]]] = []
    for case, of in result.figures.items():
        for names, cases in groups:
            if names <= of.keys() or names >= of.keys():
                names.update(of)
                cases.append(case)
                break
        else:
            groups.append((set(of), [case]))
    return [_table(result, [name for name in result.metrics if name in names], cases) for names, cases in groups]


def legend(result: Result) -> list[tuple[str, str]]:
    """Returns (headings, doc) of the metrics; those with the same doc are told together."""
    titles: dict[str, list[str]] = {}
    for metric in result.metrics.values():
        if metric.doc:
            titles.setdefault(metric.doc, []).append(metric.title)
    return [(", ".join(dict.fromkeys(those)), doc) for doc, those in titles.items()]


def _table(result: Result, names: Sequence[str], cases: Sequence[Case]) -> Table:
    if len(cases) == 1:
        [case] = cases
        rows = [[result.metrics[name].title, cell(result, case, name)] for name in names]
        return Table(header=[case, ""], rows=rows)
    if len(names) > MOST_COLUMNS and len(cases) < len(names):
        rows = [[result.metrics[name].title, *(cell(result, case, name) for case in cases)] for name in names]
        return Table(header=["", *cases], rows=rows)
    rows = [[case, *(cell(result, case, name) for name in names)] for case in cases]
    return Table(header=["", *(result.metrics[name].title for name in names)], rows=rows)


def cell(result: Result, case: Case, name: str) -> str:
    """Returns a figure as a table shows it, "" where the case lacks it, "-" for a ratio that is not to be shown."""
    if name not in result.figures[case]:
        return ""
    metric, value = result.metrics[name], result.figures[case][name]
    if metric.kind is not Kind.RATIO:
        return metric.shown(value)
    if result.disturbed:
        return "-"
    low, high = interval(result.samples[case][name])
    shown = [metric.shown(each) for each in (value, low, high)]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} [{shown[1]}, {shown[2]}]"


def gathered(rounds: Iterable[Figures]) -> Samples:
    """Returns the samples of several rounds, which need not have the same cases."""
    samples: Samples = {}
    for figures in rounds:
        for case, of in figures.items():
            for name, value in of.items():
                samples.setdefault(case, {}).setdefault(name, []).append(float(value))
    return samples
