"""The replica's half of "gloo": the engine pulls published weights from the learner over a connection of its own.

It runs inside the engine process. The learner's half, which takes the requests, is `algo.weights.layout.Pulled`.

Invariants
- The group of a pull has two members and lives for one update, so a replica that dies or comes late affects no other.
- A bucket is received while the one before it is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.replica.weight_transfer import HostWeightTransfer, Published

PULL_S = 60.0  # as long as the learner waits

Entry = tuple[str, str, list[int]]  # name, dtype, shape


def ask(info: Published, members: int, first: bool = True) -> tuple[dist.Store, list[list[Entry]]]:
    """Asks the learner for weights. Returns the store of a group in which it is rank 0, and the buckets it will send.

    first: whether this member asks the learner to send; the others ask only for the layout.
    """
    folder = Path(info.path.partition("://")[2])
    group = f"{info.reader}-{info.version}"
    wanted = {"asks": first, "group": group, "version": info.version, "members": members}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PULL_S)
        connection.connect(str(folder / "pulls"))
        connection.sendall(json.dumps(wanted).encode() + b"\n")
        with connection.makefile("rb") as answer:
            buckets = json.load(answer)
    store = dist.FileStore(str(folder / f"pull-{group}"), members)
    store.set_timeout(timedelta(seconds=PULL_S))
    return store, buckets


class GlooWeightTransfer(HostWeightTransfer):
    """Backend "gloo"."""

    def receive_weights(self, update_info: Published) -> None:
        worker = f"{update_info.reader}-{self.parallel_config.rank}"  # each of a replica's processes pulls by itself
        store, buckets = ask(dataclasses.replace(update_info, reader=worker), members=2)
        group = dist.ProcessGroupGloo(store, 1, 2, _options())
        memory, coming = _receive(group, buckets[0])
        for number, bucket in enumerate(buckets, 1):
            coming.wait()
            loaded = memory
            if number < len(buckets):
                memory, coming = _receive(group, buckets[number])
            self.load(views(loaded, bucket))
        store.set("done", "")


def _options() -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=PULL_S)
    return options


def _bytes(entry: Entry) -> int:
    return math.prod(entry[2]) * getattr(torch, entry[1]).itemsize


def size_bytes(bucket: list[Entry]) -> int:
    return sum(map(_bytes, bucket))


def _receive(group: Any, bucket: list[Entry]) -> tuple[Tensor, Any]:
    memory = torch.empty(size_bytes(bucket), dtype=torch.uint8)
    return memory, group.recv([memory], 0, 0)


def views(memory: Tensor, bucket: list[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a bucket, which lie in memory (uint8) one after the other."""
    end = 0
    for entry in bucket:
        name, dtype, shape = entry
        start, end = end, end + _bytes(entry)
        yield name, memory[start:end].view(getattr(torch, dtype)).view(shape)
