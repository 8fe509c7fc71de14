"""The store that torch's agents exchange their workers' ranks and their ends through.

The daemon has dealt the ranks, and knows who is done. So no other node is asked: the store of one round is this node's
own, and gives the answers that such an exchange would lead to. Nodes run by rdzvrun, which take no part in the
exchange, are therefore in the same world as any other. What else is put into it stays on this node.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, HashStore
from torch.distributed.elastic.rendezvous import RendezvousStateError

from rdzv.model import Assignment
from rdzv.plugin.node import Node
from rdzv.plugin.settings import ROLE, SLOTS, Settings

ROLE_INFO = "torchelastic/role_info/"  # + group rank: what a node's agent has; written by each agent
ASSIGNED = "torchelastic/assigned_ranks/"  # + group rank: the ranks of its workers; computed by that of group rank 0
DONE = "torchelastic/agent/terminal_state/num_members"  # counted up by each agent whose workers have succeeded
ALL_DONE = "torchelastic/agent/terminal_state/last_member"  # waited for by each of them


class AgentStore(HashStore):  # type: ignore[misc]  # torch is not typed here
    """The store of one round on one node."""

    def __init__(self, node: Node, seat: Assignment, settings: Settings) -> None:
        super().__init__()
        self._node, self._seat, self._settings = node, seat, settings

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value. Raises RendezvousStateError if the agent has not the workers that the daemon was told of."""
        if key == f"{ROLE_INFO}{self._seat.group_rank}":
            self._check(json.loads(value))
        super().set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value, which for this node's ranks is the daemon's."""
        if key == f"{ASSIGNED}{self._seat.group_rank}":
            seat = self._seat
            return json.dumps([seat.first_rank, seat.world_size, seat.role_first_rank, seat.role_world_size]).encode()
        if key == ALL_DONE:  # as older agents wait for it
            self.wait([key])
            return b""
        value: bytes = super().get(key)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values. What other agents have is not known; what the agent computes of it is not used."""
        mine = f"{ROLE_INFO}{self._seat.group_rank}"
        wanted = [mine if key.startswith(ROLE_INFO) else key for key in keys]
        values: list[bytes] = super().multi_get(wanted)
        return values

    def add(self, key: str, amount: int) -> int:
        """Return the new sum. The agent counts itself among those that are done: the daemon hears it."""
        if key == DONE:
            self._node.succeeded()
        total: int = super().add(key, amount)
        return total

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when the keys are there. When all are done, or the others go on without this node, the daemon says."""
        limit = self.timeout if timeout is None else timeout
        if ALL_DONE not in keys:
            super().wait(keys, limit)
        elif not self._node.others_are_done(limit.total_seconds()):
            raise DistStoreError(f"other nodes of the job still run after {limit.total_seconds():g} s")

    def _check(self, info: Any) -> None:
        told, settings = self._seat.slots, self._settings
        if info["local_world_size"] != told:
            raise RendezvousStateError(
                f"the daemon was told of {told} workers on this node, and there are {info['local_world_size']}: "
                f"give --rdzv-conf {SLOTS}={info['local_world_size']}"
            )
        if info["role"] != settings.role:
            raise RendezvousStateError(
                f"the daemon was told that the role of this node is {settings.role}, and it is {info['role']}: "
                f"give --rdzv-conf {ROLE}={info['role']}"
            )
