"""A lead whose learner and replicas are on GPUs: nodes pull files, so its weights have to be files."""

from types import SimpleNamespace

import pytest

from engine.assembly.devices import DevicePlan
from engine.errors import BadInput
from engine.programs.roles import check_devices


@pytest.mark.parametrize("plan", [DevicePlan(), DevicePlan(devices=(0, 1), learner_ranks=2, replicas=2)])
def test_nodes_join_where_weights_are_files(plan):
    check_devices(SimpleNamespace(learner=None), plan)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (DevicePlan(devices=(0, 1), replicas=1), "from GPU to GPU.*Fix: devices by turns"),
        (DevicePlan(adapters=True), "adapters"),
    ],
)
def test_where_they_are_not_the_run_is_refused_with_what_to_change(plan, said):
    with pytest.raises(BadInput, match=said):
        check_devices(SimpleNamespace(learner=None), plan)


def test_a_learner_over_hosts_has_no_gpus_yet():
    with pytest.raises(BadInput, match="learner_hosts must be 1 with devices"):
        check_devices(SimpleNamespace(learner=object()), DevicePlan(devices=(0,), replicas=1))
