"""The simulated cluster: each group once, the bound on staleness, the lead's bill, the same again."""

from dataclasses import replace

import pytest

from bench.benches.sim_nodes.cluster import Cluster, LeadCosts, Setting
from bench.placement.workload import Traced, Turn
from bench.simulator.machine import H200
from engine.balancing.kv_aware import KvAware

SETTING = Setting(nodes=3, replicas=2, groups_per_step=6, steps=4, max_staleness=1, machine=H200, learn_s=5.0)


def groups(setting, turns=2, tokens=400):
    turn = Turn(prompt_new_tokens=100, gen_tokens=tokens, tool_latency_s=0.2)
    return [
        [Traced(traj=index, group=lease, turns=(turn,) * turns) for index in range(4)]
        for lease in range(setting.groups_per_step * setting.steps)
    ]


def a_cluster(setting=SETTING, **shape):
    return Cluster(setting, groups(setting, **shape), lambda: KvAware(2000))


def test_each_group_is_granted_once_and_its_tokens_are_counted_once():
    outcome = a_cluster().run()
    assert sum(outcome.grants) == 24
    assert outcome.tokens_per_s * outcome.seconds == pytest.approx(24 * 4 * 2 * 400)
    assert outcome.groups_per_s * outcome.seconds == pytest.approx(24)


def test_the_same_cluster_does_the_same_again():
    assert a_cluster().run() == a_cluster().run()


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_no_token_is_older_than_the_bound_and_the_bound_is_used(max_staleness):
    outcome = a_cluster(replace(SETTING, max_staleness=max_staleness)).run()
    assert outcome.staleness_max == max_staleness


def test_the_lead_pays_for_each_message_and_each_token():
    cheap = a_cluster().run()
    dear = a_cluster(replace(SETTING, lead=LeadCosts(message_s=80e-6, token_s=0.032e-6))).run()
    assert dear.lead_cpu * dear.seconds > 1.5 * cheap.lead_cpu * cheap.seconds
    records = 24 * 4 * 2 + 24
    assert cheap.messages_per_s * cheap.seconds > records


def test_weights_take_the_leads_link_in_turn():
    setting = replace(SETTING, weight_bytes=1e9, rate=1e9, load_s=1.0)
    assert a_cluster(setting).run().sync_s == pytest.approx(3 + 1, abs=0.1)
    assert a_cluster(replace(setting, nodes=6)).run().sync_s == pytest.approx(6 + 1, abs=0.1)


def test_a_lead_that_is_too_slow_holds_the_run_up():
    fast = a_cluster().run()
    slow = a_cluster(replace(SETTING, lead=LeadCosts(message_s=0.5))).run()
    assert slow.groups_per_s < 0.7 * fast.groups_per_s
    assert slow.lead_cpu > 0.7


def test_a_number_of_groups_that_is_not_that_of_the_steps_is_refused():
    with pytest.raises(ValueError, match="6 x 4, got 5"):
        Cluster(SETTING, groups(SETTING)[:5], lambda: KvAware(2000))
