"""`python -m bench.sandbox`: see bench/sandbox/sandbox.py."""

from bench.sandbox.sandbox import main

main()
