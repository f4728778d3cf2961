"""`python -m sandbox.host`: see sandbox/host/host.py."""

from sandbox.host.host import main

main()
