"""What operators and tools ask of the daemon."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from rendezvousd.core.errors import BadRequest, LimitExceeded, NoSuchNode, NotRunning
from rendezvousd.core.events import CloseAsked, NodeRemoved, RestartAsked
from rendezvousd.core.model import Job, NodeUid
from rendezvousd.desk import Desk
from rendezvousd.engine import Engine
from rendezvousd.rpc.convert import cut
from rendezvousd.rpc.status import refusals
from rendezvousd.rpc.views import Views
from rendezvousd.v1 import rendezvous_pb2 as pb

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

# Who is watching one job at a time; each is sent a view of all its nodes for every change.
WATCHERS_MAX = 64
# Changes within this time are one view.
WATCH_WINDOW_S = 0.1
# Names in a refusal, and bytes of each.
NAMES_SHOWN_MAX, NAME_SHOWN_MAX = 5, 80


class Admin:
    """The unary calls of the Rendezvous service, and WatchJob."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._views: Views | None = None

    async def leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        async with refusals(context):
            engine = self._desk.engine
            job = engine.room(request.run_id).job
            uids = _chosen(job, request)
            for uid in uids:
                removed = NodeRemoved(uid=uid, by=context.peer(), reason=_reason(engine, request.reason))
                await engine.tell(request.run_id, removed)
            return pb.LeaveReply(removed=len(uids))

    async def restart(self, request: pb.RestartRequest, context: Context) -> pb.RestartReply:
        async with refusals(context):
            engine = self._desk.engine
            if engine.room(request.run_id).job.running is None:
                raise NotRunning(f"job {request.run_id!r} has no running round to restart")
            asked = RestartAsked(by=context.peer(), reason=_reason(engine, request.reason))
            await engine.tell(request.run_id, asked)
            return pb.RestartReply()

    async def close(self, request: pb.CloseRequest, context: Context) -> pb.CloseReply:
        async with refusals(context):
            engine = self._desk.engine
            reason = _reason(engine, request.reason)
            asked = CloseAsked(by=context.peer(), reason=reason, success=request.success)
            await engine.tell(request.run_id, asked)
            return pb.CloseReply()

    async def get_job(self, request: pb.GetJobRequest, context: Context) -> bytes:
        """Return a JobView, serialised."""
        async with refusals(context):
            views = self._current_views()
            return await views.job(views.engine.room(request.run_id))

    async def list_jobs(self, _request: pb.ListJobsRequest, context: Context) -> bytes:
        """Return a ListJobsReply, serialised."""
        async with refusals(context):
            return await self._current_views().jobs()

    async def watch_job(self, request: pb.GetJobRequest, context: Context) -> AsyncIterator[bytes]:
        """Yield JobViews, serialised."""
        async with refusals(context):
            views = self._current_views()
            room = views.engine.room(request.run_id)
            if len(room.watchers) >= WATCHERS_MAX:
                raise LimitExceeded(f"job {request.run_id!r} has {WATCHERS_MAX} watchers, the most it may have")
            changed = asyncio.Event()
            room.watchers.add(changed)
            try:
                while self._desk.engine.rooms.get(request.run_id) is room:
                    changed.clear()
                    yield await views.job(room)
                    await changed.wait()
                    await asyncio.sleep(WATCH_WINDOW_S)
            finally:
                room.watchers.discard(changed)

    def _current_views(self) -> Views:
        """Return the views of the engine that serves. Raises NotLeader."""
        engine = self._desk.engine
        if self._views is None or self._views.engine is not engine:
            self._views = Views(engine)
        return self._views


def _reason(engine: Engine, text: str) -> str:
    """Return an operator's reason as it is kept: it is in every answer to every node while the round gathers."""
    return cut(text, engine.limits.name_bytes, one_line=True)


def _chosen(job: Job, request: pb.LeaveRequest) -> list[NodeUid]:
    if not request.node_uid and not request.node_name:
        raise BadRequest("say which node: node_uid or node_name")
    if request.node_uid:
        uids = [NodeUid(request.node_uid)] if request.node_uid in job.nodes else []
    else:
        uids = [node.uid for node in job.nodes.values() if node.name == request.node_name]
    if not uids:
        wanted = cut(request.node_uid or request.node_name, NAME_SHOWN_MAX, one_line=True)
        raise NoSuchNode(f"job {job.run_id!r} has no node {wanted!r}; its nodes: {_names(job)}")
    return uids


def _names(job: Job) -> str:
    """Return the names of a few nodes, and how many more there are."""
    shown = heapq.nsmallest(NAMES_SHOWN_MAX, (node.name for node in job.nodes.values()))
    more = len(job.nodes) - len(shown)
    names = ", ".join(cut(name, NAME_SHOWN_MAX, one_line=True) for name in shown)
    return f"{names} and {more} more (GetJob names all)" if more else names or "none"
