"""`python -m bench.sim_nodes`: see bench/sim_nodes/sim_nodes.py."""

from bench.sim_nodes.sim_nodes import main

main()
