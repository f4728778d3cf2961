"""`python -m bench.streaming`: see bench/streaming/streaming.py."""

from bench.streaming.streaming import main

main()
