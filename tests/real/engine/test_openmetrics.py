"""GET /metrics of a run whose replicas are scripted, and the dashboard that reads it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from engine import metric_names as metric
from engine.assembly.config import TrainingConfig
from engine.assembly.openmetrics import SCRAPE, row_metrics, scraped
from engine.pipeline.pipeline import Pipeline, Stage
from engine.replica.port import KvSample
from engine.rollout.rollout import RolloutConfig
from engine.run.journal import Journal
from engine.run.run_folder import RunFolder
from engine.stages.group import GroupConfig, GroupMaker
from engine.telemetry.idle_clock import CAUSES
from engine.telemetry.meanings import documented
from sandbox.http.listener import CannotListen
from tests.support.fakes import a_prompt
from tests.support.job import job_of
from tests.support.node import ANSWER, END, Setup, call
from tests.support.paths import ROOT, TINY
from tests.support.viewed_runs import metrics as made_row

TELEMETRY = ROOT / "engine" / "telemetry"
OPEN_METRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}
OWN = 'mine/"quoted"\n\\line'
ROW = {
    **made_row(2),
    "idle/long_tail_s": 0.25,
    "tools/wait/python_s": 0.5,
    "stage/judge/busy_s": 1.5,
    "host/blocked_at/mine.py:7 dozes": 0.3,
    "reward/gsm8k": 0.5,
    "learner/mine": 3.0,
    OWN: 4.0,
}

Families = dict[str, Any]


async def scrape(url: str, **headers: str) -> str:
    async with aiohttp.ClientSession() as client, client.get(url, headers={**OPEN_METRICS, **headers}) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        return text


def parsed(text: str) -> Families:
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(families: Families, name: str) -> dict[tuple[str, ...], float]:
    """By the labels' values, in the order of the labels' names."""
    samples = families[name].samples
    return {tuple(value for _, value in sorted(sample.labels.items())): sample.value for sample in samples}


@asynccontextmanager
async def a_run(tmp_path: Path, name: str = "mine") -> AsyncIterator[SimpleNamespace]:
    """A run that made one group of four, each with a call of Python, and trained two steps."""
    group = GroupConfig(samples=4)
    config = TrainingConfig(
        checkpoint=TINY, steps=9, prompts_per_step=2, group=group, rollout=RolloutConfig(), learner=None
    )
    async with Setup([call("print(6 * 7)") + END], [ANSWER]) as node:
        with RunFolder.open(tmp_path, name) as folder:
            job = job_of(config, folder, fleet=node.fleet)
            job.timeline = node.timeline
            job._rollouts.append(node.rollouts)

            async def right(trajectory: Any) -> float:
                return 1.0

            maker = GroupMaker(rollouts=node.rollouts, reward=right, config=group, timeline=node.timeline)

            async def judge(inbox: Any, outbox: Any) -> None:
                await maker(a_prompt(), 0, 0, journal=Journal())
                await outbox.put("judged")

            pipeline = Pipeline([Stage(name='ju"dge', run=judge)])
            job.stats = pipeline.stats
            await pipeline.run()
            node.fleet.last[0] = KvSample(free_blocks=10, running=2, waiting=1, preempted=0)
            yield SimpleNamespace(job=job, node=node, folder=folder)


@asynccontextmanager
async def served(run: SimpleNamespace) -> AsyncIterator[str]:
    async with scraped(run.folder, 0) as metrics:
        assert parsed(await scrape(metrics.url)) == {}, "nothing has started"
        metrics.follow(run.job.sources())
        yield metrics.url


async def test_what_prometheus_reads(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run, served(run) as url:
        before = parsed(await scrape(url))
        assert "rocstar_step_reward" not in before, "no step is trained: a gap, no 0"
        assert values(before, "rocstar_run_step") == {(): 0}
        run.job.recorder.step(1, made_row(1))
        run.job.recorder.step(2, ROW)
        run.job.recorder.step(3, {name: value for name, value in made_row(3).items() if name != "reward"})
        text = await scrape(url)
        families = parsed(text)
        assert text.endswith("# EOF\n")
        assert values(families, "rocstar_run_step") == {(): 3}
        assert values(families, "rocstar_run_steps") == {(): 9}
        assert 0 <= values(families, "rocstar_run_step_age_seconds")[()] < 5
        assert values(families, "rocstar_run_tool_calls") == {("ok", "python"): 4}
        assert values(families, "rocstar_run_rollouts_ended") == {("answer",): 4}
        assert set(values(families, "rocstar_run_rollouts").values()) == {0}
        assert values(families, "rocstar_run_tokens")[()] == run.node.rollouts.tokens_sampled > 0
        assert {cause for cause, _ in values(families, "rocstar_run_replica_seconds")} <= {"busy", *CAUSES}
        assert values(families, "rocstar_run_stage_items") == {('ju"dge',): 1}
        assert len(values(families, "rocstar_run_stage_seconds")) == 3
        assert 0 < values(families, "rocstar_run_kv_used_ratio")[("0",)] < 1
        assert "rocstar_step_reward" not in families, "the newest step has no reward: the one before does not count"
        assert values(families, "rocstar_step_eval_accuracy") == {(): made_row(2)["eval/accuracy"]}
        for family in families.values():
            assert family.documentation, family.name
            assert not family.unit or family.name.endswith(f"_{family.unit}")


async def test_the_metrics_of_a_row(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run, served(run) as url:
        run.job.recorder.step(2, ROW)
        families = parsed(await scrape(url))
        assert values(families, "rocstar_step_idle_seconds")[("long_tail",)] == 0.25
        assert values(families, "rocstar_step_tools_wait_seconds") == {("python",): 0.5}
        assert values(families, "rocstar_step_stage_busy_seconds") == {("judge",): 1.5}
        blocked_at = {("mine.py:7 dozes",): 0.3, ("mine.py:12 clean",): 0.25}
        assert values(families, "rocstar_step_host_blocked_at") == blocked_at
        assert values(families, "rocstar_step_reward_by_source") == {("gsm8k",): 0.5}
        assert values(families, "rocstar_step_learner") == {("mine",): 3.0}
        assert values(families, "rocstar_step_own") == {(OWN,): 4.0}
        assert families["rocstar_step_tokens_per_second"].unit == ""
        assert families["rocstar_step_tools_latency_p50_milliseconds"].unit == "milliseconds"
        meaning = next(entry.text for entry in documented() if entry.name == metric.TIME_STEP_S)
        assert families["rocstar_step_time_step_seconds"].documentation == meaning


def test_no_two_metrics_have_one_name() -> None:
    """Each documented name, whatever it has in place of `*`, is a family of its own."""
    names = [entry.name.replace("*", "x") for entry in documented()]
    assert len(list(row_metrics(dict.fromkeys(names, 1.0)))) == len(names) > 100


async def test_runs_do_not_collide_and_are_found(tmp_path: Path) -> None:
    async with a_run(tmp_path, "a") as one, a_run(tmp_path, "b") as other:
        async with served(one) as first, served(other) as second:
            assert first != second
            targets = [json.loads(run.folder.path.joinpath(SCRAPE).read_bytes())[0] for run in (one, other)]
            assert [f"http://{target['targets'][0]}/metrics" for target in targets] == [first, second]
            assert [target["labels"] for target in targets] == [{"run": "a"}, {"run": "b"}]
            with pytest.raises(CannotListen, match="choose another port"):
                async with scraped(other.folder, int(first.rpartition(":")[2].partition("/")[0])):
                    pass
        with pytest.raises(aiohttp.ClientConnectionError):
            await scrape(first)
        assert not one.folder.path.joinpath(SCRAPE).exists()


async def test_a_page_of_another_site_reads_nothing(tmp_path: Path) -> None:
    async with (
        a_run(tmp_path) as run,
        served(run) as url,
        aiohttp.ClientSession() as client,
        client.get(url, headers={"Host": "evil.example"}) as answer,
    ):
        assert answer.status == 403


async def test_a_scrape_is_short_at_real_size(tmp_path: Path) -> None:
    """64 replicas and 16,384 rollouts under way: nothing of a scrape takes 50 ms of the loop."""
    async with a_run(tmp_path) as run, served(run) as url:
        run.job.recorder.step(2, ROW)
        now = run.job.timeline.now()
        for replica in range(1, 64):
            run.job.timeline.idle.replica(replica, now)
        rollouts = [
            run.job.timeline.in_flight.rollout(f"p{number}", sample=number % 32, lease=number // 32)
            for number in range(16_384)
        ]
        for rollout in rollouts:
            rollout.__enter__()
        await scrape(url)
        longest = 0.0

        async def tick() -> None:
            nonlocal longest
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0)
                longest = max(longest, time.perf_counter() - before)

        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(tick())
            for _ in range(5):
                await scrape(url)
            ticking.cancel()
        assert longest < 0.05


async def test_the_dashboard_and_the_alerts_ask_for_what_a_run_exports(tmp_path: Path) -> None:
    board = json.loads((TELEMETRY / "grafana.json").read_text())
    alerts = yaml.safe_load((TELEMETRY / "alerts.yml").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    async with a_run(tmp_path) as run, served(run) as url:
        documented_names = [entry.name.replace("*", "x") for entry in documented()]
        run.job.recorder.step(2, {**dict.fromkeys(documented_names, 1.0), **ROW})
        exported = {sample.name for family in parsed(await scrape(url)).values() for sample in family.samples}
    assert len(asked) > 20
    for expression in asked:
        names = re.findall(r"\brocstar_\w+|\bup\b", expression)
        assert names, expression
        assert set(names) - {"up"} <= exported, expression
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
