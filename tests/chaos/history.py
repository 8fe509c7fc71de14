"""The history of a game: one file, to which every process appends what it did and saw, one JSON object a line.

`t` is CLOCK_MONOTONIC in seconds: all processes of a game run on one machine. Who writes what:

    workers      start    round, uid, rank, world, restart, master, node, launcher, pid, job;
                          older: [node, pid, round] of each worker of an older round that lives
                 resume   step: training goes on after this one; world_uid: the same for all ranks, world
                 step     step, loss (of all ranks together), t0: when it began
                 saved    step: the checkpoint is on the disk
                 done     step, loss
    the game     game     seed, backend, nodes, min_nodes
                 launch, exit   node, launcher: its number; code
                 line     node, launcher, text: what a launcher itself said
                 fault, healed, whole   fault: its number; kind, target, bounds
                 orphans  fault, pids: what a killed launcher has left behind
                 finish   step: training ends after this one
                 left     pids: what lives after all launchers have ended
                 reference   step, loss: of a run that nobody disturbed
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


class Writer:
    """Appends to a history. Every line is one write: those of many processes never mix."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def say(self, event: str, **more: object) -> None:
        line = {"t": time.monotonic(), "event": event, **more}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class Reader:
    """Reads a history while it is being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.events: list[Event] = []  # all that was read so far

    def more(self) -> list[Event]:
        """What was written since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        found = [json.loads(line) for line in whole.splitlines()]
        self.events += found
        return found
