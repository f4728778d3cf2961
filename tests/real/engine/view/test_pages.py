"""Every page in a real browser, of a recorded run, of one under way, and out of an exported file.

What is asked of a page is its structure: which headings, canvases and rows are there. How it looks is for people.
"""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from bench.placement.policies import POLICIES
from engine.commands.view import opened as opened_questions
from engine.recording.in_flight import NAME
from engine.view.export import export
from engine.view.programs import SELECTIONS
from engine.view.questions import Questions
from engine.view.run_files import RunFiles
from engine.view.server import serve
from tests.support import browser, recorded_run
from tests.support.browser import chromium
from tests.support.paths import ROCSTAR
from tests.support.viewed_runs import metrics, run_under_way, write_viewed_run

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason=browser.MISSING)

# What must be on each page of a run that was recorded: a selector, and how many of it at least.
STRUCTURE = {
    "now": {
        "#verdict .sentence": 1,
        "#lost .bar": 3,
        "#strip": 1,
        "#figures .spark": 5,
        "details .figure": 12,
        "#staleness .bar": 1,
    },
    "flight": {"#under-way tbody tr": 6, "#ended tbody tr": 1, ".flight-states i": 6},
    "time": {
        "#by-step canvas": 1,
        "canvas#lanes": 1,
        "#losses tbody tr": 6,
        "#timeline .legend span": 6,
        "#blocked tbody tr": 1,
    },
    "groups": {
        "#groups .item.head": 4,
        "#groups .item.members": 16,
        ".members .length i": 16,
        "#selections button": len(SELECTIONS),
    },
    "trajectory": {
        "#conversation .message": 3,
        "#conversation .call": 2,
        "#tokens span": 60,
        "#token-view canvas": 2,
        ".turn-actions[data-actions-of-turn]": 2,
    },
    "learning": {"#curves canvas": 10, "#curves .legend svg": 10, "#by-position canvas": 1, "#by-position .empty": 1},
    "placement": {"#kv canvas": 2, "#rules tbody tr": 2, "#decisions .item": 15, "#counterfactual button": 1},
    "sandbox": {".chart canvas": 4, "#outcomes tbody tr": 2, "#slowest details": 12, "#latencies": 1},
    "runs": {"#found-runs tbody tr": 1},
    "run": {"#summary tbody tr": 3, "#waste tbody tr": 3, "#options tbody tr": 5, "#resume": 1},
}


@asynccontextmanager
async def viewed(*paths, follow=False):
    """The address of a page over these runs."""
    async with serve(Questions([RunFiles(path) for path in paths], follow=follow), 0, ROCSTAR) as url:
        yield f"{url}/"


async def opened(page, name, **words):
    """Goes to a page and waits until it is drawn."""
    query = "&".join(f"{key}={value}" for key, value in {"run": 0, **words}.items())
    drawn = await page.evaluate("document.querySelector('main')?.dataset.drawn ?? ''")
    await page.evaluate(f"location.hash = '#/{name}?{query}'")
    main = "document.querySelector('main').dataset"
    await page.until(f"{main}.drawn !== '{drawn}' && {main}.page === '{name}'")


async def count(page, selector):
    return await page.evaluate(f"document.querySelectorAll({selector!r}).length")


async def has_structure(page, name):
    for selector, least in STRUCTURE[name].items():
        await page.until(f"document.querySelectorAll({selector!r}).length >= {least}")  # curves come a frame later


async def test_each_page_of_a_recorded_run_has_its_parts_and_asks_nobody_else(tmp_path):
    write_viewed_run(tmp_path / "run")
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/now?run=0&first=1")
        await page.until("document.querySelector('main')?.dataset.drawn")
        for name in STRUCTURE:
            await opened(page, name)
            await has_structure(page, name)
            missing = await page.evaluate("[...document.querySelectorAll('.empty b')].map((one) => one.textContent)")
            assert name == "run" or missing == [], name  # of made-up runs no checkpoint is written
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith((address, "data:"))] == []


async def test_a_page_that_is_open_follows_a_run_that_goes_on(tmp_path):
    with run_under_way(tmp_path / "run", steps=2) as folder:
        async with viewed(tmp_path / "run", follow=True) as address, chromium(tmp_path) as web:
            page = await web.open(address)
            await page.until("document.querySelector('#strip')")
            await asyncio.to_thread(folder.step, 3, metrics(3))
            await page.until("document.querySelector('#strip h2').textContent.endsWith('3')")
            await opened(page, "groups")
            await asyncio.to_thread(folder.step, 4, metrics(4))
            await page.until("document.querySelector('#newer')")  # where somebody reads, it is only said
            for name in STRUCTURE:
                await opened(page, name)
            assert page.complaints == []


async def test_every_page_of_a_run_without_steps_says_what_is_missing(tmp_path):
    with run_under_way(tmp_path / "run", steps=0):
        async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
            page = await web.open(address)
            await page.until("document.querySelector('main')?.dataset.drawn")
            for name in STRUCTURE:
                await opened(page, name, again=1)
                assert name == "runs" or await count(page, ".empty") > 0, name
                assert await page.evaluate("[...document.querySelectorAll('.empty')].every((one) => one.textContent)")
            assert page.complaints == []


async def test_metrics_are_found_by_name_and_meaning_and_what_is_typed_stays(tmp_path):
    with run_under_way(tmp_path / "run", steps=2) as folder:
        async with viewed(tmp_path / "run", follow=True) as address, chromium(tmp_path) as web:
            page = await web.open(f"{address}#/learning?run=0")
            await page.until("document.querySelector('#search')")
            found = "[...document.querySelectorAll('#found code')].map((one) => one.textContent)"
            for text, names in (
                ("^time/le", ["time/learn_s"]),
                ("seconds wait tool", ["idle/tool_wait_s"]),
                ("no such metric", []),
                ("learner ent[", []),
                ("kv_peak", ["kv_peak/replica0"]),
            ):
                await page.evaluate(
                    "(document.querySelector('#search').focus(), document.querySelector('#search').select())"
                )
                await page.command("Input.insertText", text=text)
                assert set(names) <= set(await page.evaluate(found)), text
                assert names or await page.evaluate(found) == [], text
            drawn = await page.evaluate("document.querySelector('main').dataset.drawn")
            await asyncio.to_thread(folder.step, 3, metrics(3) | {"mine/own": 1.0})
            await page.until(f"document.querySelector('main').dataset.drawn !== '{drawn}'")
            await page.until("document.activeElement.id === 'search'")
            assert await page.evaluate("document.querySelector('#search').value") == "kv_peak"
            await page.evaluate("document.querySelector('#found .match').click()")
            title = "document.querySelector('#chosen .plot-title')?.textContent ?? ''"
            await page.until(f"({title}).startsWith('kv_peak/replica0')")
            assert "largest share of a replica" in await page.evaluate(title)
            assert "charts=kv_peak" in await page.evaluate("location.hash")
            again = await web.open(await page.evaluate("location.href"))
            await again.until(f"({title}).startsWith('kv_peak/replica0')")
            assert await again.evaluate("document.querySelector('#search').value") == "kv_peak"
            assert page.complaints == again.complaints == []


async def test_several_runs_are_overlaid_and_compared(tmp_path):
    write_viewed_run(tmp_path / "one")
    write_viewed_run(tmp_path / "two", recorded=0, seed=1)
    async with viewed(tmp_path / "one", tmp_path / "two") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/learning?run=0")
        await page.until("document.querySelector('#curves .legend svg')")
        assert await count(page, "#comparison tbody tr") == 2
        assert await page.evaluate("document.querySelector('#curves .chart .legend').children.length") == 2
        await opened(page, "learning", seeds="mean")  # the two differ by their seed only
        await page.until("document.querySelector('#curves .chart .legend').children.length === 1")
        await opened(page, "run", other=1)
        names = "[...document.querySelectorAll('#difference tbody td:first-child')].map((one) => one.textContent)"
        assert await page.evaluate(names) == ["seed"]
        assert await count(page, "#waterfall tbody tr") >= 2
        await opened(page, "run", run=1)
        await opened(page, "placement", run=1)
        assert "record" in await page.evaluate("document.querySelector('.empty').textContent")
        assert page.complaints == []


async def test_runs_are_found_opened_and_overlaid_from_a_list(tmp_path):
    for name in ("a", "b"):
        write_viewed_run(tmp_path / name, recorded=0)
    questions = await opened_questions([tmp_path], follow=False)
    async with serve(questions, 0, ROCSTAR) as url, chromium(tmp_path / "profile") as web:
        page = await web.open(f"{url}/")
        await page.until("document.querySelectorAll('#found-runs tbody tr').length === 2")
        write_viewed_run(tmp_path / "new", recorded=0)
        rows = "[...document.querySelectorAll('#found-runs tbody tr')].map((one) => one.children[1].textContent)"
        await page.until(f"({rows})[0] === 'new'")
        await page.evaluate("document.querySelector('#found-runs input').click()")
        await page.until("document.querySelectorAll('header .runs button').length === 2")
        await page.until("document.querySelector('#found-runs input').checked")
        await opened(page, "learning", beside="0,1")
        await page.until("document.querySelectorAll('#comparison tbody tr').length === 2")
        await opened(page, "runs")
        await page.evaluate("document.querySelector('#found-runs a').click()")
        await page.until("document.querySelector('main').dataset.page === 'now'")
        assert await page.evaluate("document.title") == "Now · new"
        assert page.complaints == []
        write_viewed_run(tmp_path / "odd", recorded=0)
        tmp_path.joinpath("odd", "config.json").write_text("[")
        await opened(page, "runs")
        await page.until(f"({rows})[0] === 'odd'")
        await page.evaluate("document.querySelector('#found-runs a').click()")
        await page.until("document.querySelector('#run-list .problem').textContent.includes('config.json')")


async def test_thousands_of_trajectories_are_scrolled_with_few_rows_in_the_document(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=1, groups=256, samples=16)
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/groups?run=0")
        await page.until("document.querySelector('#groups .item')")
        height = await page.evaluate("document.querySelector('#groups').scrollHeight")
        assert height == (4096 + 256) * 24
        for share in (0.25, 0.5, 1.0, 0.75, 0.1):
            await page.evaluate(f"document.querySelector('#groups').scrollTop = {share * height}")
            shown = f"Math.floor({min(share * height, height - 680)} / 24 + 10) * 24"  # a row in the middle
            tops = "[...document.querySelectorAll('#groups .item')].map((item) => parseInt(item.style.top))"
            await page.until(f"({tops}).includes({shown})")
            assert await count(page, "#groups .item") < 60
        assert page.complaints == []


async def test_a_stretch_that_is_dragged_over_is_what_the_table_counts(tmp_path):
    write_viewed_run(tmp_path / "run")
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/time?run=0")
        await page.until("document.querySelector('#losses tbody tr')")
        causes = "[...document.querySelectorAll('#losses tbody tr')].map((row) => row.children[0].textContent)"
        everything = await page.evaluate(causes)
        left, top, width = await page.evaluate(
            "(({left, top, width}) => [left, top, width])(document.querySelector('#lanes').getBoundingClientRect())"
        )
        to = left + 128 + 0.1 * (width - 128)  # the first fifth of a second, in which both replicas are busy
        for kind, x in (("mousePressed", left + 129), ("mouseMoved", to), ("mouseReleased", to)):
            await page.command(
                "Input.dispatchMouseEvent", type=kind, x=x, y=top + 60, button="left", buttons=1, clickCount=1
            )
        await page.until(f"({causes}).length === 1")
        assert len(everything) == 6
        assert (await page.evaluate(causes))[0] in everything


async def test_a_program_is_run_again_from_the_page(tmp_path):
    write_viewed_run(tmp_path / "run")
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/sandbox?run=0")
        await page.until("document.querySelector('#slowest details')")
        await page.evaluate(
            "(() => { const one = document.querySelector('#slowest details'); one.open = true;"
            " one.querySelector('button').click(); })()"
        )
        assert await page.until(
            "[...document.querySelectorAll('#slowest h3')].some((h) => h.textContent.startsWith('now'))"
        )
        assert "42" in await page.evaluate("document.querySelector('#slowest details').textContent")
        assert page.complaints == []


async def test_a_step_is_run_under_other_policies_from_the_page(tmp_path):
    write_viewed_run(tmp_path / "run", kv_blocks=200, replicas=2)
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/placement?run=0&step=2")
        await page.until("document.querySelector('#counterfactual button')")
        await page.evaluate("document.querySelector('#counterfactual button').click()")
        assert await page.until("document.querySelectorAll('#rivals tbody tr').length") == len(POLICIES)
        assert page.complaints == []


async def test_light_and_dark_differ_and_the_choice_is_remembered(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=0)
    ground = "getComputedStyle(document.body).backgroundColor"
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(address)
        await page.until("document.querySelector('#theme')")
        before = await page.evaluate(ground)
        await page.evaluate("document.querySelector('#theme').click()")
        after = await page.evaluate(ground)
        assert before != after
        again = await web.open(address)
        await again.until("document.querySelector('#theme')")
        assert await again.evaluate(ground) == after


async def test_an_exported_file_shows_every_page_without_a_server(tmp_path):
    write_viewed_run(tmp_path / "run")
    export(Questions([RunFiles(tmp_path / "run")]), tmp_path / "run.html")
    async with chromium(tmp_path) as web:
        page = await web.open((tmp_path / "run.html").as_uri())
        await page.until("document.querySelector('main')?.dataset.drawn")
        for name in STRUCTURE.keys() - {"flight", "runs"}:
            await opened(page, name, again=1)
            await has_structure(page, name)
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


async def test_a_click_on_a_turn_of_the_timeline_opens_its_trajectory(tmp_path):
    write_viewed_run(tmp_path / "run")
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/time?run=0&step=2")
        await page.until("document.getElementById('lanes')?.width > 300")
        # Trajectory 1 samples for the first fifth of a second of two; its lane is the second one
        # below the rows of both replicas and of the weights that they load.
        x, y = await page.evaluate(
            "(() => { const lanes = document.getElementById('lanes'); lanes.scrollIntoView({ block: 'center' });"
            "const box = lanes.getBoundingClientRect();"
            "return [box.left + 128 + 0.05 * (box.width - 128),"
            "box.top + 36 + 2 * (16 + 1 + 30 + 8) + 25 + 14 + 7]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await page.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        await page.until("location.hash.startsWith('#/trajectory') && location.hash.includes('sample=1')")
        assert "step=2" in await page.evaluate("location.hash")
        assert page.complaints == []


WRONG = {
    "#/trajectory?run=0&step=8": "Step 8 is not recorded. These steps are: 1, 2, 3.",
    "#/trajectory?run=0&step=3&group=99&sample=0": "no group 99. Its groups are: 0, 1, 2, 3.",
    "#/trajectory?run=0&step=3&group=1&sample=9": "Group 1 has no sample 9. Its samples are: 0, 1, 2, 3.",
    "#/groups?run=9": "no run 9 on this page. These are open: 0 (run).",
    "#/nowhere?run=0": "no page nowhere. The pages are: now, learning",
}


async def test_an_address_of_what_is_not_there_says_what_is(tmp_path):
    write_viewed_run(tmp_path / "run")
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/trajectory?run=0&step=3&group=2", width=390)
        place = "document.querySelector('#page .toolbar .mono')?.textContent"
        await page.until(f"({place})?.includes('train-3-2 #0')")  # the first sample of a group unless one is named
        tab = "document.querySelector('nav [aria-current]').getBoundingClientRect()"
        assert await page.evaluate(f"({tab}).left >= 0 && ({tab}).right <= innerWidth + 1")
        for wrong, says in WRONG.items():
            await page.evaluate(f"location.hash = {wrong!r}")
            await page.until(f"document.querySelector('#page > .empty')?.textContent.includes({says!r})")
        assert page.complaints == []


async def test_groups_are_found_while_a_prompt_is_typed(tmp_path):
    write_viewed_run(tmp_path / "run")
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/groups?run=0&step=3")
        await page.until("document.querySelector('#groups')")
        await page.evaluate("document.querySelector('#prompt').focus()")
        await page.command("Input.insertText", text="train-3-1")
        await page.until("document.querySelectorAll('#groups .item.head').length === 1")
        assert await page.evaluate("document.activeElement.value") == "train-3-1"
        assert "prompt=train-3-1" in await page.evaluate("location.hash")
        assert page.complaints == []


async def test_a_group_that_is_flat_by_its_selector_alone_says_so(tmp_path, monkeypatch):
    made = recorded_run._trajectory

    def with_a_lone_success(step, sample, *, flat):
        trajectory = made(step, sample, flat=flat)
        return replace(trajectory, reward=1.0) if flat and sample == 3 and step == 3 else trajectory

    monkeypatch.setattr(recorded_run, "_trajectory", with_a_lone_success)
    write_viewed_run(tmp_path / "run")
    tip = """(() => {
        document.querySelector('#groups .badge.warn').dispatchEvent(new MouseEvent('mousemove'));
        return document.querySelector('.tip:not([hidden])')?.textContent ?? '';
    })()"""
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/groups?run=0&step=2")
        await page.until("document.querySelector('#groups .badge.warn')")
        assert await page.evaluate(tip) == ""
        await opened(page, "groups", step=3)
        assert (await page.evaluate(tip)).startswith("flat among those that the selector kept")


async def test_runs_are_compared_at_a_step_that_both_evaluated(tmp_path):
    write_viewed_run(tmp_path / "one", steps=4, recorded=0)
    write_viewed_run(tmp_path / "two", steps=3, recorded=0, seed=1)
    write_viewed_run(tmp_path / "three", steps=1, recorded=0, seed=2)
    async with viewed(*(tmp_path / name for name in ("one", "two", "three"))) as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/learning?run=0")
        await page.until("document.querySelector('#comparison tbody')")
        last = "[...document.querySelectorAll('#comparison tbody td:last-child')].map((one) => one.textContent)"
        _, two, three = await page.evaluate(last)
        assert two.startswith("0.0 ± ")
        assert two.endswith("both at step 2")
        assert three == "–", "it was not evaluated"
        assert page.complaints == []


async def test_a_damaged_summary_is_named_on_the_page(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=0)
    summary = tmp_path / "run" / "summary.json"
    summary.write_bytes(summary.read_bytes()[:-5])
    (tmp_path / "run" / NAME).unlink()
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/run?run=0")
        await page.until("document.querySelector('#summary')?.textContent.includes('The summary is damaged')")
        assert "summary.json" in await page.evaluate("document.querySelector('.problem').textContent")
        await opened(page, "flight")
        await page.until("document.querySelector('#flight .empty')?.textContent.includes('The run has ended')")
        assert page.complaints == []
