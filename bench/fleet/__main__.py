"""`python -m bench.fleet`: see bench/fleet/fleet.py."""

from bench.fleet.fleet import main

main()
