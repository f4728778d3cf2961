"""The page without a mouse, on a small screen, and for a screen reader: axe-core finds nothing in any page."""

import asyncio

import pytest

from tests.real.engine.view.test_pages import STRUCTURE, has_structure, opened, viewed
from tests.support import browser
from tests.support.browser import chromium
from tests.support.paths import ROOT
from tests.support.viewed_runs import metrics, run_under_way, write_viewed_run

AXE = ROOT / "requirements" / "node_modules" / "axe-core" / "axe.min.js"
pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason=browser.MISSING)

VIOLATIONS = """axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) =>
    violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 200)}`)))"""


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed. Fix: make lint-page")
async def test_axe_finds_nothing_in_any_page_light_or_dark(tmp_path):
    write_viewed_run(tmp_path / "run")
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/now?run=0&first=1", width=1280)
        await page.until("document.querySelector('main')?.dataset.drawn")
        await page.evaluate(f"{AXE.read_text()};1")
        for _ in ("light", "dark"):
            for name in STRUCTURE:
                await opened(page, name)
                await has_structure(page, name)
                assert await page.evaluate(VIOLATIONS) == [], name
            await page.evaluate("document.querySelector('#theme').click()")
        assert page.complaints == []


@pytest.mark.parametrize("width", [390, 700, 950])
async def test_no_page_is_wider_than_a_small_screen(width, tmp_path):
    write_viewed_run(tmp_path / "run")
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/now?run=0&first=1", width=width)
        await page.until("document.querySelector('main')?.dataset.drawn")
        for name in STRUCTURE:
            await opened(page, name)
            await has_structure(page, name)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, name


async def test_the_readers_place_is_kept_when_a_page_is_drawn_anew(tmp_path):
    write_viewed_run(tmp_path / "run")
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/time?run=0", height=500)
        await page.until("document.querySelector('#losses tbody tr')")
        await page.evaluate("scrollTo(0, 300); document.querySelector('[aria-label=\"step before\"]').focus()")
        drawn = await page.evaluate("document.querySelector('main').dataset.drawn")
        await page.evaluate("document.activeElement.click()")
        await page.until(f"document.querySelector('main').dataset.drawn !== '{drawn}'")
        assert await page.evaluate("[scrollY, document.activeElement.ariaLabel]") == [300, "step before"]
        await opened(page, "groups")
        assert await page.evaluate("scrollY") == 0, "another page begins at its top"


async def test_what_is_typed_stays_while_new_rows_come(tmp_path):
    with run_under_way(tmp_path / "run", steps=2) as folder:
        async with viewed(tmp_path / "run", follow=True) as address, chromium(tmp_path) as web:
            page = await web.open(f"{address}#/learning?run=0")
            await page.until("document.querySelector('main input')")
            await page.evaluate("document.querySelector('main input').focus()")
            for step, letter in enumerate("kvp", start=3):
                await page.command("Input.insertText", text=letter)
                drawn = await page.evaluate("document.querySelector('main').dataset.drawn")
                await asyncio.to_thread(folder.step, step, metrics(step))
                await page.until(f"document.querySelector('main').dataset.drawn !== '{drawn}'")
            assert await page.evaluate("document.activeElement.value") == "kvp"


async def test_a_step_of_the_strip_is_opened_by_keyboard(tmp_path):
    write_viewed_run(tmp_path / "run")
    async with viewed(tmp_path / "run") as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/now?run=0")
        await page.until("document.querySelector('#strip a')")
        await page.evaluate("document.querySelectorAll('#strip a')[1].focus()")
        for kind in ("keyDown", "keyUp"):
            await page.command("Input.dispatchKeyEvent", type=kind, key="Enter", windowsVirtualKeyCode=13, text="\r")
        await page.until("document.querySelector('main').dataset.page === 'time'")
        assert "step=2" in await page.evaluate("location.hash")
