"""The page's files: whole in themselves, or written into one file."""

import json
import re

import pytest

from engine.atomic_files import CannotWrite
from engine.commands.view import main
from engine.view.export import export
from engine.view.page import STATIC, modules, plot_folder
from engine.view.questions import Questions
from engine.view.run_files import RunFiles
from tests.support.viewed_runs import write_viewed_run

OUTSIDE = re.compile(r"""(?:src|href|url|import|from|fetch)\s*[=(]?\s*["'(]\s*(?:https?:)?//""")


@pytest.fixture
def questions(tmp_path):
    write_viewed_run(tmp_path / "run")
    return Questions([RunFiles(tmp_path / "run")])


def test_each_module_that_is_imported_is_there():
    for path in modules().values():
        for name in re.findall(r'from "([^"]+)"', path.read_text()):
            assert name in modules(), f"{path.name} imports {name}"


def test_no_line_of_a_module_is_longer_than_100_columns():
    for path in modules().values():
        assert all(len(line) <= 100 for line in path.read_text().splitlines()), path.name


def test_no_file_of_the_page_loads_anything_from_elsewhere():
    for path in STATIC.rglob("*.*"):
        assert not OUTSIDE.search(path.read_text()), path.name


def test_no_text_of_a_run_is_ever_read_as_html():
    for path in modules().values():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", path.read_text()), path


def test_no_text_of_a_run_ends_the_element_that_it_is_exported_in(tmp_path):
    write_viewed_run(tmp_path / "run", model="</script><script>alert(1)</script>")
    export(Questions([RunFiles(tmp_path / "run")]), tmp_path / "run.html")
    held = (tmp_path / "run.html").read_text().split('id="answers">')[1].split("</script>")[0]
    assert json.loads(held)["about?run=0"]["config"]["model"] == "</script><script>alert(1)</script>"


def test_an_exported_file_holds_all_that_it_needs(questions, tmp_path):
    path = tmp_path / "run.html"
    assert export(questions, path) == path.stat().st_size
    page = path.read_text()
    assert not OUTSIDE.search(page.replace((plot_folder() / "uPlot.iife.js").read_text(), ""))
    assert "/static/" not in page
    for address in (
        "groups?run=0&step=3",
        "members?run=0&step=3&group=1",
        "trajectory?run=0&step=3&group=1&sample=0",
        "timeline?run=0&first=3&last=3",
    ):
        assert f'"{address}"' in page


def test_an_export_tells_how_far_it_is_and_leaves_nothing_if_it_is_interrupted(questions, tmp_path):
    told = []
    export(questions, tmp_path / "run.html", lambda done, parts: told.append((done, parts)))
    assert told == [(done, len(told)) for done in range(1, len(told) + 1)]

    def interrupt(done, parts):
        if done == parts:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(questions, tmp_path / "other.html", interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.html"]


NOWHERE = [["nowhere", "export=run.html"], ["run", "nowhere", "export=run.html"]]


@pytest.mark.parametrize("words", [*NOWHERE, ["run/config.json"], ["run", "export=no/such/folder.html"]])
def test_wrong_input_ends_with_status_2_and_one_line(words, tmp_path, monkeypatch, capsys):
    write_viewed_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "nowhere" in line or "no/such" in line or "config.json" in line


def test_a_bad_place_for_an_export_is_refused_before_anything_is_computed(questions, tmp_path):
    told = []
    for path in (tmp_path / "no" / "run.html", tmp_path):
        with pytest.raises(CannotWrite, match="export="):
            export(questions, path, lambda done, parts: told.append((done, parts)))
    assert told == []
