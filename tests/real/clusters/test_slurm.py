"""recipes/clusters/slurm.sh with an srun that runs everything here: who runs what, what is started again or ended."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPTS = sorted((ROOT / "recipes" / "clusters").glob("*.sh"))
HOSTS = ("alpha", "beta", "gamma", "delta")
SRUN = """#!/bin/bash
for word; do case $word in --nodelist=*) host=${word#*=} ;; esac; done
while [[ $1 == --* ]]; do echo "$1" >>options; shift; done
echo "$host $*" >>log
ROCSTAR_HOST=$host exec "$@"
"""
SCONTROL = f"#!/bin/sh\nprintf '%s\\n' {' '.join(HOSTS)}\n"
ROCSTAR = """#!/bin/bash
case $1 in
    keys) mkdir "$2" ;;
    sandbox-host) echo $$ >sandbox.pid; exec sleep 600 ;;
    node) case $* in
        *learner=true*) ;;
        *) [ -e "failed.$ROCSTAR_HOST" ] || { touch "failed.$ROCSTAR_HOST"; exit 1; }
            touch "joined.$ROCSTAR_HOST"; exec sleep 600 ;;
        esac ;;
esac
"""


@pytest.fixture
def submitted(tmp_path):
    """Returns a function that runs the script on four hosts. lead: the program of the lead. It returns the exit code
    and who ran what, without the options of srun.
    """
    for name, program in (("srun", SRUN), ("scontrol", SCONTROL), (".venv/bin/rocstar", ROCSTAR)):
        write(tmp_path / name, program)

    def run(lead, **variables):
        write(tmp_path / ".venv/bin/python", f"#!/bin/bash\n{lead}\n")
        here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x", "AGAIN_S": "0.1", **variables}
        command = ["bash", str(ROOT / "recipes/clusters/slurm.sh"), "recipes/quickstart.py", "steps=4"]
        ended = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **here}, capture_output=True, text=True, timeout=60, check=False
        )
        return ended.returncode, sorted((tmp_path / "log").read_text().splitlines()), ended.stderr

    return run


def write(path: Path, program: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(program)
    path.chmod(0o755)


def test_the_first_host_leads_and_a_node_that_fails_is_started_again(submitted, tmp_path):
    joined = "while ! ls joined.beta joined.gamma joined.delta; do sleep 0.05; done >/dev/null 2>&1"
    code, ran, errors = submitted(joined, NODE="replicas=8 slots=64")
    assert code == 0
    node = ".venv/bin/rocstar node lead=tcp://alpha:5700 keys=keys"
    nodes = [f"{host} {node} name={host} replicas=8 slots=64" for host in HOSTS[1:]]
    lead = "alpha .venv/bin/python recipes/quickstart.py steps=4 nodes=tcp://0.0.0.0:5700 nodes_keys=keys"
    assert ran == sorted([lead, *nodes, *nodes]), "each once more"
    assert "beta: ended with exit code 1 (failures so far: 1), and is started again" in errors
    assert (tmp_path / "keys").is_dir()
    options = (tmp_path / "options").read_text().split()
    assert {option.partition("=")[0] for option in options} == {"--nodes", "--ntasks", "--cpu-bind", "--nodelist"}, (
        "with --exact a step of one task has one core"
    )


def test_hosts_of_the_learner_and_of_tool_calls_are_told_to_the_lead(submitted, tmp_path):
    code, ran, _ = submitted("while ! ls joined.gamma sandbox.pid; do sleep 0.05; done", LEARNERS="1", SANDBOXES="1")
    assert code == 0
    ways = ["learner_hosts=2 learner_at=alpha:29400", "sandbox_listen=tcp://0.0.0.0:5555 sandbox_keys=keys"]
    [lead] = [line for line in ran if line.startswith("alpha")]
    assert lead.endswith(" ".join(ways))
    assert "beta .venv/bin/rocstar node lead=tcp://alpha:5700 keys=keys learner=true" in ran
    assert "delta .venv/bin/rocstar sandbox-host connect=tcp://alpha:5555 keys=keys" in ran
    pid = (tmp_path / "sandbox.pid").read_text().strip()
    until = time.monotonic() + 10
    while Path("/proc", pid).exists():
        assert time.monotonic() < until, f"what does not end by itself is ended: {pid!r}"
        time.sleep(0.01)


@pytest.mark.parametrize(("lead", "times", "code"), [("exit 2", 1, 2), ("exit 130", 1, 130), ("exit 1", 10, 1)])
def test_a_lead_that_cannot_go_on_ends_the_job_with_its_exit_code(submitted, lead, times, code):
    ended, ran, _ = submitted(lead)
    assert ended == code
    assert sum(line.startswith("alpha") for line in ran) == times


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_clean(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", script], check=True)
