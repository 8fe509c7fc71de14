"""What a daemon says of itself to whoever asks."""

from __future__ import annotations

import importlib.metadata
from typing import Any, TypeAlias

import grpc

from rendezvousd.desk import Desk
from rendezvousd.v1 import rendezvous_pb2 as pb

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class About:
    """Answers GetDaemon, also while another daemon leads."""

    def __init__(self, desk: Desk, backend: str) -> None:
        self._desk = desk
        self._backend = backend
        self._version = importlib.metadata.version("rendezvousd")

    async def get_daemon(self, _request: pb.GetDaemonRequest, _context: Context) -> pb.DaemonView:
        desk = self._desk
        view = pb.DaemonView(
            daemon_id=desk.daemon_id,
            version=self._version,
            backend=self._backend,
            leads=desk.attends,
            leader=desk.leader,
            up_ms=int(desk.up_s() * 1000),
            explain=desk.explain(),
        )
        if desk.attends:
            view.jobs = len(desk.engine.rooms)
            view.nodes = sum(len(room.job.nodes) for room in desk.engine.rooms.values())
        return view
