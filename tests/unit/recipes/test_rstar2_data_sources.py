"""Where rows come from: arrays of JSON, and the hub with its ways to say no."""

import json

import pytest
from huggingface_hub import errors

from engine.errors import BadInput
from recipes.rstar2.parts.preparation import sources
from recipes.rstar2.parts.preparation.sources import Hub, Sources, download, find, open_source

HUB = Hub(id="someone/problems", files=("en/*.parquet", "more.jsonl"))


def array(path, rows, **form):
    path.write_text(json.dumps(rows, **form), encoding="utf-8")
    return path


ROWS = [{"text": 'é😀 ] } " \\ ,'}, {"n": [1, {"x": []}], "text": ""}, {"text": "x" * 300}]


@pytest.mark.parametrize("form", [{}, {"indent": 2}, {"ensure_ascii": False, "indent": 1}])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_the_elements_of_an_array_are_its_rows_however_it_is_read(tmp_path, monkeypatch, form, chunk):
    monkeypatch.setattr(sources, "_CHUNK", chunk)
    source = open_source(array(tmp_path / "a.json", ROWS, **form))
    assert [source.row(number) for number in range(len(source))] == ROWS
    assert source.name == "a"


def test_lines_of_json_in_a_file_of_the_same_suffix_are_read_as_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"x": 1}\n{"x": 2}\n')
    assert len(open_source(path)) == 2


@pytest.mark.parametrize("cut", [1, 2, 5, 100, 340])
def test_an_array_that_is_cut_off_is_refused_by_its_row(tmp_path, cut):
    path = array(tmp_path / "a.json", ROWS)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(BadInput, match=rf"{path}, row \d: .*cut off.*Fix: "):
        open_source(path)


def test_an_element_that_is_no_object_is_refused_by_its_row(tmp_path):
    path = array(tmp_path / "a.json", [{"x": 1}, 2])
    with pytest.raises(BadInput, match=rf"{path}, row 1: "):
        open_source(path).row(1)


def test_a_broken_string_is_refused_by_its_row_and_does_not_hide_the_others(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"x": "1"}, {"x": "two\nlines"}, {"x": "3"}]')
    source = open_source(path)
    with pytest.raises(BadInput, match=rf"{path}, row 1: "):
        source.row(1)
    assert source.row(2) == {"x": "3"}


def test_a_csv_file_is_read_by_its_columns(tmp_path):
    path = tmp_path / "gpqa_diamond.csv"
    path.write_bytes(b'\xef\xbb\xbfQuestion,Correct Answer\r\n"Which,\none?",right\r\n2nd,"say ""no"""\r\n')
    source = open_source(path)
    rows = [source.row(number) for number in range(len(source))]
    assert rows[0] == {"Question": "Which,\none?", "Correct Answer": "right"}
    assert rows[1] == {"Question": "2nd", "Correct Answer": 'say "no"'}


@pytest.mark.parametrize("content", [b"", b"Question\r\n", b'Question\r\n"cut', b"Question\r\n\xff\r\n"])
def test_a_csv_file_that_cannot_be_read_is_refused(tmp_path, content):
    path = tmp_path / "gpqa.csv"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=rf"{path}.*Fix: "):
        open_source(path)


def test_rows_of_several_sources_are_numbered_one_after_the_other(tmp_path):
    made = [open_source(array(tmp_path / f"{name}.json", [{"x": f"{name}{n}"} for n in range(3)])) for name in "abc"]
    found = [(source.name, number, row["x"]) for source, number, row in Sources(made).rows(range(2, 7))]
    assert found == [("a", 2, "a2"), ("b", 0, "b0"), ("b", 1, "b1"), ("b", 2, "b2"), ("c", 0, "c0")]


# The hub


class FakeHub:
    """Has these files, or raises."""

    def __init__(self, folder, names=(), error=None):
        self.folder, self.error, self.asked = folder, error, []
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def __call__(self, hub_id, **options):
        self.asked.append((hub_id, options))
        if self.error:
            raise self.error
        return str(self.folder)


def test_the_sets_own_files_are_fetched_where_no_source_is_given(tmp_path):
    hub = FakeHub(tmp_path, ["more.jsonl", "en/1.parquet", "en/0.parquet", "cn/0.parquet", "README.md"])
    names = [str(path.relative_to(tmp_path)) for path in find([], HUB, "dapo", hub)]
    assert names == ["en/0.parquet", "en/1.parquet", "more.jsonl"]
    [(asked, options)] = hub.asked
    assert asked == HUB.id
    assert options["allow_patterns"] == list(HUB.files)
    assert options["repo_type"] == "dataset"


def test_a_local_copy_of_the_data_set_is_read_as_the_hubs(tmp_path):
    FakeHub(tmp_path / "copy", ["en/0.parquet", "cn/0.parquet", "README.md"])
    assert find([str(tmp_path / "copy")], HUB, "dapo") == [tmp_path / "copy" / "en" / "0.parquet"]
    other = FakeHub(tmp_path / "other", ["mine.parquet"]).folder
    assert find([str(other)], HUB, "dapo") == [other]


def test_another_id_of_the_hub_can_be_given_and_a_path_comes_first(tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "hub", ["x/y.parquet"])
    assert [path.name for path in find(["else/where"], HUB, "dapo", hub)] == ["y.parquet"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "else" / "where").mkdir(parents=True)
    assert [str(path) for path in find(["else/where"], HUB, "dapo", hub)] == ["else/where"]


class Gated(errors.GatedRepoError):
    def __init__(self):
        """Without the response of a server."""


class NotFound(errors.RepositoryNotFoundError):
    def __init__(self):
        """Without the response of a server."""


def test_a_gated_data_set_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(BadInput, match=rf"source: {HUB.id} is gated.*HF_TOKEN.*source=") as refused:
        download(HUB, FakeHub(tmp_path, error=Gated()))
    assert "\n" not in str(refused.value)


def test_a_data_set_that_is_not_there_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(BadInput, match=rf"source: .*{HUB.id}.*HF_TOKEN.*source="):
        download(HUB, FakeHub(tmp_path, error=NotFound()))


@pytest.mark.parametrize("error", [errors.OfflineModeIsEnabled("off\nline"), OSError("no network"), RuntimeError("")])
def test_a_hub_that_cannot_be_reached_is_one_line_with_what_to_do(tmp_path, error):
    with pytest.raises(BadInput, match=rf"source: {HUB.id} .*source=") as refused:
        download(HUB, FakeHub(tmp_path, error=error))
    assert "\n" not in str(refused.value)


def test_a_data_set_whose_files_were_renamed_is_refused_by_their_names(tmp_path):
    with pytest.raises(BadInput, match=r"en/\*\.parquet.*source="):
        download(HUB, FakeHub(tmp_path, ["other.parquet"]))


def test_a_set_that_is_on_no_hub_needs_a_source():
    with pytest.raises(BadInput, match=r"euler.*source="):
        find([], None, "euler")
