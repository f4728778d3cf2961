"""`python -m sandbox.http`: see sandbox/http/server.py."""

from sandbox.http.server import main

main()
