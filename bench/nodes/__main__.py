"""`python -m bench.nodes`: see bench/nodes/nodes.py."""

from bench.nodes.nodes import main

main()
