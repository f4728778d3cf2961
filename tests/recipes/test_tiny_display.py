import io
from types import SimpleNamespace

from rich.console import Console

from engine.ports import KvSample
from recipes.tiny_display import Display


def test_a_dumb_terminal_gets_a_line_per_step(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    written = io.StringIO()
    with Display("a run", 10, None, 100, Console(file=written, force_terminal=True, width=100)) as display:
        display.phase("training")
        assert written.getvalue().startswith("training")


def test_each_replica_is_shown_with_its_kv_use_or_as_down():
    fleet = SimpleNamespace(config=SimpleNamespace(replicas=3), live=[0, 2], last={0: KvSample(25, 7, 0, 0)})
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, color_system=None)
    with Display("a run [/b]", 10, fleet, 100, console) as display:
        display.phase("training")
        display.step(1, {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6, "eval/n": 64})
    lines = [line.strip("│ ") for line in written.getvalue().splitlines()]
    assert any(line.startswith("replica 0 KV") and line.endswith("75%  7 running") for line in lines)
    assert "a run [/b]" in written.getvalue()
    assert "replica 1  down" in lines
    assert not any(line.startswith("replica 2") for line in lines), "it serves, and has not stepped yet"
    assert "held-out accuracy  0.500  [0.400, 0.600]  n=64" in lines
