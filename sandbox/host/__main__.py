"""Runs a node's own host, its child: `python -m sandbox.host CONFIG`, a HostConfig as JSON (client/local_host.py)."""

import sys

import msgspec

from sandbox.host.host import HostConfig, run

sys.exit(run(msgspec.json.decode(sys.argv[1], type=HostConfig), is_child=True))
