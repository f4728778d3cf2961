"""`python -m bench.sim_fleet`: see bench/sim_fleet/sim_fleet.py."""

from bench.sim_fleet.sim_fleet import main

main()
