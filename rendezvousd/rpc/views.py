"""A job as people and tools see it: rendered once for all who look at it, as bytes, without holding up the nodes.

A view shows at least what was durable when it was asked for. What only counts time in it (`silent_ms`, `age_ms`, the
countdown of the explanation) is up to FRESH_S old. Concatenated protobufs merge, so a view is made of pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar
from weakref import WeakKeyDictionary

from immutables import Map

from rendezvousd.core.model import Job, Node, NodeUid, Stance
from rendezvousd.delivery import Room
from rendezvousd.engine import Engine
from rendezvousd.rpc.convert import HELD_PHASES, cause_pb, ended_pb, known_pb
from rendezvousd.v1 import rendezvous_pb2 as pb

T = TypeVar("T")

# For how long a view of a job that has not changed is used.
FRESH_S = 0.5
# Nodes rendered at a time; then others may run. About a millisecond.
SLICE = 128
# After a view of a job, the next one of it is made no sooner than after so many times the CPU time that it took: while
# a large job changes all the time, those who watch it take at most a fifth of the daemon's time.
REST = 4.0

_JOBS_TAG = bytes([pb.ListJobsReply.DESCRIPTOR.fields_by_name["jobs"].number << 3 | 2])


@dataclass(slots=True)
class _View:
    """The newest view of a job, whole."""

    job: Job
    number: int  # of the views of this room, from 1
    data: bytes
    stale_at: float  # seconds of the event loop, as all instants here
    rests_until: float


@dataclass(slots=True)
class _Head:
    """The view of a job without its nodes."""

    job: Job
    data: bytes
    stale_at: float


class Views:
    """The views of one engine's jobs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._views: WeakKeyDictionary[Room, _View] = WeakKeyDictionary()
        self._heads: WeakKeyDictionary[Room, _Head] = WeakKeyDictionary()
        self._making: WeakKeyDictionary[Room, asyncio.Task[None]] = WeakKeyDictionary()
        self._begun: WeakKeyDictionary[Room, int] = WeakKeyDictionary()

    async def job(self, room: Room) -> bytes:
        """Return the JobView of a job with its nodes, members by group rank first, then the others by arrival."""
        loop = asyncio.get_running_loop()
        least = self._begun.get(room, 0) + 1  # a view begun later shows all that is there now
        while True:
            kept = self._views.get(room)
            if kept is not None:
                unchanged = kept.job is room.job and loop.time() < kept.stale_at
                if unchanged or kept.number >= least:
                    return kept.data
            making = self._making.get(room)
            if making is None:
                making = self._making[room] = asyncio.create_task(self._make(room, kept))
            await asyncio.shield(making)  # it is made for others as well

    async def jobs(self) -> bytes:
        """Return the ListJobsReply with all jobs by run id, without their nodes, and those that are not served."""
        rooms = [self.engine.rooms[run_id] for run_id in sorted(self.engine.rooms)]
        pieces: list[bytes] = []
        for slice_ in _slices(rooms):
            for room in slice_:
                data = self._head(room)
                pieces += (_JOBS_TAG, _varint(len(data)), data)
            await asyncio.sleep(0)
        for run_id in sorted(self.engine.unserved.keys() - self.engine.rooms.keys()):
            data = self._unserved(run_id)
            pieces += (_JOBS_TAG, _varint(len(data)), data)
        return b"".join(pieces)

    def _unserved(self, run_id: str) -> bytes:
        """Return the view of a job of which there is only the reason why it is not served."""
        return pb.JobView(run_id=run_id, explain=self.engine.unserved[run_id]).SerializeToString()

    def _head(self, room: Room) -> bytes:
        now, kept = asyncio.get_running_loop().time(), self._heads.get(room)
        if kept is not None and kept.job is room.job and now < kept.stale_at:
            return kept.data
        try:
            data: bytes = _head_view(self.engine, room).SerializeToString()
        except Exception as error:  # noqa: BLE001 -- it is logged there
            self.engine.fail(room.job.run_id, "was shown", error)
            data = self._unserved(room.job.run_id)
        self._heads[room] = _Head(room.job, data, now + FRESH_S)
        return data

    async def _make(self, room: Room, last: _View | None) -> None:
        loop = asyncio.get_running_loop()
        try:
            if last is not None and (rest_s := last.rests_until - loop.time()) > 0:
                await asyncio.sleep(rest_s)
            number = self._begun[room] = self._begun.get(room, 0) + 1
            job, began_at, took_s = room.job, loop.time(), -time.perf_counter()
            pieces = [self._head(room)]
            index = job.running.index if job.running is not None else Map[NodeUid, int]()
            order = sorted(job.nodes.values(), key=lambda n: (n.uid not in index, index.get(n.uid, n.arrival)))
            for slice_ in _slices(order):
                if len(pieces) > 1:
                    took_s += time.perf_counter()
                    await asyncio.sleep(0)
                    took_s -= time.perf_counter()
                pieces.append(_nodes_view(self.engine, job, index, slice_).SerializeToString())
            took_s += time.perf_counter()
            self._views[room] = _View(
                job, number, b"".join(pieces), stale_at=began_at + FRESH_S, rests_until=loop.time() + REST * took_s
            )
        finally:
            del self._making[room]


def _head_view(engine: Engine, room: Room) -> pb.JobView:
    job, now = room.job, engine.clock.now()
    round_ = job.running
    view = pb.JobView(
        run_id=job.run_id,
        job_uid=job.uid,
        phase=pb.JOB_ENDED if job.ending is not None else pb.JOB_RUNNING if round_ is not None else pb.JOB_GATHERING,
        explain=engine.explain(room),
        known=known_pb(job.known, job.uid),
        min_nodes=job.spec.min_nodes,
        max_nodes=job.spec.max_nodes,
        max_restarts=job.spec.max_restarts,
        age_ms=int((now - job.began_at) * 1000),
    )
    if round_ is not None:
        view.world_size = round_.world_size
        view.master_addr, view.master_port = round_.master.address, round_.master.port
    if job.round is not None:
        view.round_age_ms = max(1, int((now - job.round.sealed_at) * 1000))
        if job.round.cause is not None:
            view.break_cause.CopyFrom(cause_pb(job.round.cause, final=job.round.final))
    if job.ending is not None:
        view.ended.CopyFrom(ended_pb(job.ending))
    return view


def _nodes_view(engine: Engine, job: Job, index: Mapping[NodeUid, int], nodes: Iterable[Node]) -> pb.JobView:
    """Return a view with nothing but these nodes."""
    now = engine.clock.now()
    view = pb.JobView()
    for node in nodes:
        row = engine.table.get(job.run_id, node.uid)
        shown = view.nodes.add(
            node_uid=node.uid,
            node_name=node.name,
            slots=node.spec.slots,
            state=_state(job, node),
            held_phase=HELD_PHASES[node.held.phase] if node.held is not None else pb.HELD_PHASE_UNSPECIFIED,
            alive=node.alive,
            address=node.offer.address if node.offer is not None else "",
            silent_ms=0 if row is None else int((now - row.spoke_at) * 1000),
        )
        if job.running is not None and (rank := index.get(node.uid)) is not None:
            shown.group_rank = rank
            shown.address = job.running.seats[rank].address
    return view


def _state(job: Job, node: Node) -> str:
    """Return what a node does, in a word."""
    if node.leaving is not None:
        return "leaving"
    if node.cooling_until_at is not None:
        return "cooling down"
    if job.ending is not None:
        return "ended"
    match node.stance:
        case Stance.RUNNING:
            return node.held.phase.value if node.held is not None and job.running is not None else "starting"
        case Stance.BUSY:
            return "stopping"
        case Stance.READY:
            return "spare" if job.running is not None else "ready"
        case Stance.UNREADY:
            return "waiting"


def _slices(items: list[T]) -> Iterator[list[T]]:
    source = iter(items)
    while slice_ := list(islice(source, SLICE)):
        yield slice_


def _varint(number: int) -> bytes:
    """Return a number as protobuf writes the length of a message."""
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)
