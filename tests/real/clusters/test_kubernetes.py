"""recipes/clusters/kubernetes.yaml: Kubernetes' published schemas take its jobs, and our programs take its commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.commands.node import Options
from engine.console.options import parse, parse_all
from engine.programs.invocation import Invocation, Machines
from recipes.quickstart import Config
from sandbox import keys
from sandbox.host.host import HostConfig
from tests.support.packages import own_environment
from tests.support.paths import ROOT

# The fields of a JobSet v1alpha2, from its CRD (kubernetes-sigs/jobset, config/components/crd/bases, August 2026).
SPEC = {"replicatedJobs", "successPolicy", "failurePolicy", "startupPolicy", "network", "suspend", "coordinator"}
SUCCESS = {"operator": {"All", "Any"}, "targetReplicatedJobs": None}
REPLICATED = {"name", "groupName", "replicas", "dependsOn", "template"}
VALIDATE = """
import json, sys
import kubernetes_validate
for document in json.load(sys.stdin):
    kubernetes_validate.validate(document, "1.33", strict=True)
"""

CLAIM, JOBSET = yaml.safe_load_all((ROOT / "recipes/clusters/kubernetes.yaml").read_text())
JOBS = {job["name"]: job for job in JOBSET["spec"]["replicatedJobs"]}
LEAD = f"{JOBSET['metadata']['name']}-lead-0-0.{JOBSET['metadata']['name']}"  # JobSet's name of the lead's pod


def pod(name: str) -> dict[str, Any]:
    return JOBS[name]["template"]["spec"]["template"]["spec"]


def container(name: str) -> dict[str, Any]:
    [only] = pod(name)["containers"]
    return only


def as_jobs() -> list[dict[str, Any]]:
    """Returns the jobs that a JobSet makes of its templates."""
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job["template"]["spec"]}
        for name, job in JOBS.items()
    ]


@pytest.mark.timeout(600)
def test_the_published_schemas_take_it() -> None:
    python = own_environment("kubernetes", "kubernetes-validate==1.37.0") / "bin" / "python"

    def validate(documents: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
        text = json.dumps(documents)
        command = [str(python), "-c", VALIDATE]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    ended = validate([CLAIM, *as_jobs()])
    assert ended.returncode == 0, ended.stderr[-3000:]
    wrong = as_jobs()
    wrong[0]["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    assert validate(wrong).returncode != 0


def test_its_own_fields_are_those_of_a_jobset() -> None:
    assert (JOBSET["apiVersion"], JOBSET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(JOBSET["spec"]) <= SPEC
    assert set(JOBSET["spec"]["successPolicy"]) <= set(SUCCESS)
    assert JOBSET["spec"]["successPolicy"]["operator"] in SUCCESS["operator"]
    assert set(JOBSET["spec"]["successPolicy"]["targetReplicatedJobs"]) <= set(JOBS)
    for job in JOBS.values():
        assert set(job) <= REPLICATED
        for needed in job.get("dependsOn", []):
            assert needed["name"] in JOBS
            assert needed["status"] in {"Ready", "Complete"}


def test_our_programs_take_its_options(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys")

    def options(name: str) -> list[str]:
        return [word.replace("/keys", str(tmp_path / "keys")) for word in container(name)["args"]]

    [invocation, _, machines] = parse_all([Invocation, Config, Machines], options("lead"))
    [mount] = [mount for mount in container("lead")["volumeMounts"] if mount["mountPath"] == str(invocation.runs)]
    assert {"name": mount["name"], "persistentVolumeClaim": {"claimName": CLAIM["metadata"]["name"]}} in pod("lead")[
        "volumes"
    ]
    port = machines.nodes.rpartition(":")[2]
    assert container("lead")["readinessProbe"]["tcpSocket"]["port"] == int(port)
    for name in ("nodes", "learners", "sandboxes"):
        secret = next(volume for volume in pod(name)["volumes"] if volume["name"] == "keys")["secret"]
        assert {item["key"] for item in secret["items"]} == {"host.key", "node.pub"}
    for name in ("nodes", "learners"):
        node = parse(Options, options(name))
        assert node.lead == f"tcp://{LEAD}:{port}"
        assert node.learner == (name == "learners")
    assert parse(HostConfig, options("sandboxes")).connect == f"tcp://{LEAD}:5555"
    grace = pod("nodes")["terminationGracePeriodSeconds"]
    assert parse(Options, options("nodes")).grace_s + 10 <= grace, "a node that has drained still has to end"


@pytest.mark.parametrize(("number", "code"), [(None, 0), (None, 2), (signal.SIGTERM, 143)])
def test_a_pod_of_a_drained_node_is_replaced_and_that_of_an_ended_run_is_not(
    tmp_path: Path, number: signal.Signals | None, code: int
) -> None:
    """An exit code of 0 would complete it."""
    stub = tmp_path / ".venv/bin/rocstar"
    stub.parent.mkdir(parents=True)
    body = (
        f"exit {code}" if number is None else "trap 'touch drained; exit 0' TERM; echo up; while :; do sleep 0.02; done"
    )
    stub.write_text(f'#!/bin/bash\necho "$@" >arguments\n{body}\n')
    stub.chmod(0o755)
    command = [*container("nodes")["command"], *container("nodes")["args"]]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, env={**os.environ, "HOSTNAME": "pod"}
    ) as process:
        if number is not None:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(number)
        assert process.wait(30) == code
    assert (tmp_path / "drained").exists() == (number is not None)
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments == ["node", f"lead=tcp://{LEAD}:5700", "keys=/keys", "name=pod", "ready_file=/tmp/ready"]
