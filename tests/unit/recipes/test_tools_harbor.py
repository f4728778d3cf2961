"""Tasks in the shape of Harbor: what becomes a prompt, and what is refused by the name of what it needs."""

import pytest

from engine.errors import BadInput
from recipes.tools.harbor import read_task, read_tasks
from recipes.tools.inside.workspace import ROOT
from recipes.tools.snapshot import Bounds

TOML = "version = '1.0'\n[metadata]\ncategory = 'programming'\n[verifier]\ntimeout_sec = 9.0\n[environment]\ncpus = 1\n"
DOCKERFILE = """# the base
FROM python:3.12-slim
WORKDIR /app
COPY app/ /app/
COPY data.csv other.csv ./data/
COPY a.py /app/b.py
"""
TEST = "from b import f\n\ndef test_it():\n    assert f(1) == 2\n    assert open('/app/out.txt').read() == '/app'\n"


def task(folder, **changed):
    files = {
        "task.toml": TOML,
        "instruction.md": "Write b.py.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/app/src/c.py": "C = 1\n",
        "environment/data.csv": "a,b\n",
        "environment/other.csv": "c\n",
        "environment/a.py": "def f(x): ...\n",
        "tests/test.sh": "pytest /tests\n",
        "tests/test_outputs.py": TEST,
        "solution/solve.sh": "cp x y\n",
    }
    for name, text in {**files, **{key.replace("__", "/"): text for key, text in changed.items()}}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def test_a_task_becomes_a_prompt(tmp_path):
    [prompt] = read_tasks(task(tmp_path / "write-b").parent)
    assert prompt.id == "write-b"
    assert prompt.messages[0]["content"] == "Write b.py."
    metadata = prompt.metadata
    assert sorted(metadata["files"]) == ["b.py", "data/data.csv", "data/other.csv", "src/c.py"]
    assert (metadata["root"], metadata["verifier_s"]) == ("/app", 9.0)
    [(name, source)] = metadata["tests"].items()
    assert name == "test_outputs.py"
    assert f"open('{ROOT}/out.txt')" in source


def test_a_task_without_a_dockerfile_begins_with_all_files_of_its_environment(tmp_path):
    changed = {"environment/Dockerfile": None}
    prompt = read_task(task(tmp_path / "t", **changed))
    assert sorted(prompt.metadata["files"]) == ["a.py", "app/src/c.py", "data.csv", "other.csv"]


def test_files_of_the_solution_are_the_reference_unless_a_script_makes_them(tmp_path):
    files = {"solution/b.py": "def f(x): return 2\n", "solution/src/c.py": "C = 2\n"}
    scripted = read_task(task(tmp_path / "scripted", **files))
    assert "solution" not in scripted.metadata
    prompt = read_task(task(tmp_path / "plain", **files, **{"solution/solve.sh": None}))
    assert prompt.metadata["solution"] == {"b.py": files["solution/b.py"], "src/c.py": files["solution/src/c.py"]}


@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        ("environment/Dockerfile", DOCKERFILE + "RUN apt-get install -y gcc\n", "apt-get install"),
        ("environment/Dockerfile", "FROM ubuntu:24.04\n", "ubuntu"),
        ("environment/Dockerfile", "FROM python:3.12\nENTRYPOINT server\n", "ENTRYPOINT"),
        ("environment/Dockerfile", "FROM python:3.12\nWORKDIR /app\nCOPY a.py /etc/\n", "WORKDIR"),
        ("environment/Dockerfile", "FROM python:3.12\nWORKDIR /app\nCOPY ../../x .\n", "leaves the folder"),
        ("environment/Dockerfile", "FROM python:3.12\nWORKDIR /app\nCOPY --from=x a b\n", "COPY --from"),
        ("environment/docker-compose.yaml", "services: {}\n", "docker-compose"),
        ("task.toml", "[environment]\ndocker_image = 'x/y:1'\n", "docker_image"),
        ("task.toml", "[environment]\ngpus = 1\n", "gpus"),
        ("task.toml", "[[environment.mcp_servers]]\nname = 'x'\n", "mcp_servers"),
        ("task.toml", "[verifier]\ntimeout_sec = -1\n", "timeout_sec"),
        ("task.toml", "[verifier]\nenv = { KEY = '1' }\n", "verifier.env"),
        ("task.toml", "[[steps]]\nname = 'x'\n", "steps"),
        ("task.toml", "[", "no TOML"),
        ("task.toml", "verifier = 1\n", "table"),
        ("instruction.md", " \n", "empty"),
        ("tests/test_outputs.py", None, "test.sh alone"),
        ("tests/test_outputs.py", "def test_it(tmp_path): pass\n", "tmp_path"),
        ("tests/test_outputs.py", "import pytest\n@pytest.fixture\ndef x(): ...\ndef test_it(): ...\n", "fixture"),
        ("tests/test_outputs.py", "import pytest\n@pytest.mark.skip\ndef test_it(): ...\n", "mark.skip"),
        ("environment/Dockerfile", "FROM python-ml:1\n", "python-ml"),
        ("environment/Dockerfile", "FROM python:3.12\nWORKDIR app\nCOPY a.py .\n", "WORKDIR app"),
        ("environment/Dockerfile", "FROM python:3.12\nWORKDIR /\nCOPY a.py .\n", "WORKDIR /"),
        ("environment/Dockerfile", "FROM python:3.12\nWORKDIR $HOME\n", "HOME"),
        ("environment/Dockerfile", DOCKERFILE + "WORKDIR /app/src\n", "WORKDIR /app/src"),
        ("environment/Dockerfile", "FROM python:3.12\nWORKDIR /app\nCOPY a.py ../x\n", "outside"),
        ("environment/.dockerignore", "a.py\n", "dockerignore"),
        ("task.toml", "[verifier]\ntimeout_sec = true\n", "timeout_sec"),
        ("tests/test_outputs.py", "class TestX:\n    def test_a(self): ...\ndef test_b(): ...\n", "TestX"),
        ("tests/test_outputs.py", "async def test_a(): ...\ndef test_b(): ...\n", "test_a is async"),
        ("tests/test_outputs.py", "from pytest import fixture\ndef test_b(): ...\n", "fixture"),
        ("tests/test_outputs.py", "from pytest import mark\n@mark.skip\ndef test_b(): ...\n", "mark.skip"),
        ("tests/test_outputs.py", "import pytest as p\n@p.fixture\ndef x(): ...\ndef test_b(): ...\n", "own name"),
        ("tests/test_outputs.py", "def test_it(*, tmp_path): ...\n", "tmp_path"),
        ("tests/test_outputs.py", "if True:\n    def test_it(tmp_path): ...\n", "tmp_path"),
        ("tests/test_outputs.py", "x = 1\n", "no function"),
        ("tests/test_outputs.py", "def test_it(:\n", "line 1"),
        ("tests/expected.json", "{}", "expected.json"),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_name(tmp_path, file, text, word):
    with pytest.raises(BadInput, match=word.replace(".", r"\.")):
        read_task(task(tmp_path / "t", **{file: text}))


def test_a_module_that_python_has_too_is_refused_where_tests_import_it(tmp_path):
    own = {"environment/app/statistics.py": "def mean(x): ...\n"}
    assert "statistics.py" in read_task(task(tmp_path / "a", **own)).metadata["files"]
    tests = {"tests/test_outputs.py": "from statistics import mean\ndef test_it(): ...\n"}
    assert read_task(task(tmp_path / "b", **tests))
    with pytest.raises(BadInput, match=r"statistics\.py"):
        read_task(task(tmp_path / "c", **own, **tests))


@pytest.mark.parametrize("base", ["python", "docker.io/library/python@sha256:0a", "x/t-bench/python-3-13:2025 AS app"])
def test_other_names_of_pythons_image_are_read(tmp_path, base):
    assert read_task(task(tmp_path / "t", **{"environment/Dockerfile": f"FROM {base}\nWORKDIR /app/\n"}))


def test_what_is_no_text_too_large_or_a_link_is_refused(tmp_path):
    folder = task(tmp_path / "t")
    with pytest.raises(BadInput, match="at most 2 files"):
        read_task(folder, Bounds(files=2))
    (folder / "environment/app/x.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="no UTF-8"):
        read_task(folder)
    (folder / "environment/app/x.bin").unlink()
    (folder / "environment/app/link").symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match="is a link"):
        read_task(folder)


def test_an_empty_folder_and_the_older_format_are_named(tmp_path):
    with pytest.raises(BadInput, match="no tasks"):
        list(read_tasks(tmp_path))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "task.yaml").write_text("instruction: x\n")
    with pytest.raises(BadInput, match="first Terminal-Bench"):
        list(read_tasks(tmp_path))
