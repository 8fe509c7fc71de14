"""One brain: daemons that share no backend must not attend the nodes of one job, each without knowing of the other.

A daemon that was already up while another one was still heard is not that one started again. And of several endpoints
no two may lead under different names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from rdzv.address import addresses
from rdzv.aside import aside
from rdzv.channels import OPTIONS
from rdzv.endpoints import Endpoint, grpc_target
from rendezvousd.v1 import rendezvous_pb2 as pb

METHOD = "/rendezvousd.v1.Rendezvous/GetDaemon"
# Two daemons count by two clocks, and a daemon may use an answer again for half a second: so much is no proof.
SLACK_S = 2.0
ASK_S = 5.0

REMEDY = "several daemons behind one --rdzv-endpoint must share an etcd (rendezvousd --backend etcd)"


class Brain:
    """The daemon that attends this node, by its answers."""

    def __init__(self) -> None:
        self.daemon_id = ""
        self._heard_at = 0.0
        self._endpoint: Endpoint | None = None

    def hear(self, endpoint: Endpoint, daemon_id: str, up_s: float, now: float) -> str:
        """Return why this daemon is not to be attended; empty: it may be. `up_s`: how long it has been attending."""
        if self.daemon_id and daemon_id != self.daemon_id and up_s > now - self._heard_at + SLACK_S:
            return (
                f"it knows nothing of the daemon at {self._endpoint} that attended this node, though it was up then; "
                + REMEDY
            )
        self.daemon_id, self._heard_at, self._endpoint = daemon_id, now, endpoint
        return ""


async def stranger(endpoints: Sequence[Endpoint], daemon_id: str) -> str:
    """Return what is wrong if a daemon at one of these endpoints leads under another name; empty: none is known to."""
    try:
        listed = await aside(lambda: [each for endpoint in endpoints for each in addresses(endpoint)], within_s=ASK_S)
    except TimeoutError:
        return ""
    if len(listed) == 1:
        return ""
    views = await asyncio.gather(*map(_ask, listed))
    for endpoint, view in zip(listed, views, strict=True):
        if view is not None and view.leads and view.daemon_id not in ("", daemon_id):
            return f"the daemon at {endpoint} knows nothing of the one that attends this node; {REMEDY}"
    return ""


async def _ask(endpoint: Endpoint) -> pb.DaemonView | None:
    async with grpc.aio.insecure_channel(grpc_target(endpoint), options=OPTIONS) as channel:
        call: Any = channel.unary_unary(
            METHOD,
            request_serializer=pb.GetDaemonRequest.SerializeToString,
            response_deserializer=pb.DaemonView.FromString,
        )
        try:
            view: pb.DaemonView = await call(pb.GetDaemonRequest(), timeout=ASK_S)
        except grpc.aio.AioRpcError:
            return None
        return view
