"""Reads from the command line who leads a run over several machines, and what each of the others runs."""

from __future__ import annotations

import sys
from typing import Any

from engine.console.options import flat, overrides
from engine.nodes.config import LeadConfig, node_command
from engine.nodes.messages import LearnerHosts
from engine.programs.invocation import Machines
from engine.recipe import Recipe
from sandbox.printable import printable


def lead_of(machines: Machines, recipe: Recipe, config: Any) -> LeadConfig | None:
    """Returns how this process leads rollout nodes, None if it does not. Exits with code 2 on a wrong option.

    config: the recipe's.
    """
    if machines.nodes is None:
        return None
    try:
        options = flat(config)
        if "model" not in options:
            raise ValueError(
                f"{recipe.file.name} has no option `model`, which nodes set to their copy of the checkpoint. Fix: "
                "model: Path, for the folder that training begins with"
            )
        return LeadConfig(
            listen=machines.nodes,
            keys=machines.nodes_keys,
            recipe=recipe.file,
            options=tuple(overrides(recipe.config, options)),
            nodes_only=machines.nodes_only,
            deltas=machines.nodes_deltas,
            learner=_learner(machines),
        )
    except ValueError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(2)


def _learner(machines: Machines) -> LearnerHosts | None:
    """Returns the learner's hosts as far as the command line says; the run adds the rest."""
    if machines.learner_hosts == 1:
        return None
    assert machines.learner_at is not None, "Machines checks it"
    return LearnerHosts(hosts=machines.learner_hosts, ranks=1, at=machines.learner_at, module="", run="")


def commands(here: str, lead: LeadConfig | None) -> list[str]:
    """Returns a line for each machine. here: the command of this one."""
    if lead is None:
        return [f"this machine:   {here}"]
    node = node_command(lead.listen, lead.keys)
    lines = [f"lead:           {here}", f"each node:      {node}"]
    if lead.learner is not None:
        lines.append(f"each of {lead.learner.hosts - 1} learner hosts: {node} learner=true")
    return lines
