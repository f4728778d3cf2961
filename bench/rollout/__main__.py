"""`python -m bench.rollout`: see bench/rollout/rollout.py."""

from bench.rollout.rollout import main

main()
