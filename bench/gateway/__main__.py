"""`python -m bench.gateway`: see bench/gateway/gateway.py."""

from bench.gateway.gateway import main

main()
