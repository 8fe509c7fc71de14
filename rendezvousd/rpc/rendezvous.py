"""The Join stream of each node: bytes in, bytes out, as little work between as can be.

A message that differs from the last one of its stream in nothing but `seq` is a heartbeat and is not parsed. An answer
is the job's common bytes, the node's own, and the acknowledgement, concatenated: concatenated protobufs merge.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import grpc

from rendezvousd.attendance import Attendance
from rendezvousd.core.errors import BadRequest, NotLeader, NotServed
from rendezvousd.core.model import Job, NodeUid
from rendezvousd.core.place import Assigned, place, valid_round_uid
from rendezvousd.core.rules.admit import why_it_waits
from rendezvousd.delivery import Room
from rendezvousd.desk import Desk
from rendezvousd.engine import Engine
from rendezvousd.rpc.convert import Specs, cause_pb, known_pb, node_heard, read_spec, status_pb
from rendezvousd.rpc.status import refusals, status_text
from rendezvousd.v1 import rendezvous_pb2 as pb
from rendezvousd.waiting import Waiter

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

# `seq` (field 31, fixed64) comes last and is the only thing in which two heartbeats differ.
SEQ_BYTES = 8
SEQ_TAG = bytes([31 << 3 & 0x7F | 0x80 | 1, 31 >> 4])
# How long the common part of a job's answers, which has a countdown in it, is used for all its nodes.
COMMON_FRESH_S = 0.5
# How long a closing daemon waits for each node to take its last word. All wait at the same time.
CLOSE_S = 1.0
# A stream on which nothing is sent for so long is ended, unless it speaks for an attended node. A launcher speaks as
# soon as the stream is open, but a daemon that thousands reach at once is late to read.
IDLE_S = 30.0
SWEEP_S = 5.0  # how often such streams are looked for


@dataclass(slots=True)
class _Common:
    """What is the same in the answers to all nodes of a job.

    The text of the failure that broke the last round, a traceback mostly, is in `whole` only. A node that has obeyed
    revision `text_since` or a later one has been sent it.
    """

    job: Job
    revision: int
    stale_at: float
    whole: bytes
    brief: bytes
    text: str
    text_since: int


class Renderer:
    """What nodes are told, as bytes; what is the same for many is made once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._common: WeakKeyDictionary[Room, _Common] = WeakKeyDictionary()  # gone with the job
        self._own: dict[tuple[str, NodeUid], tuple[object, bytes]] = {}

    def place(self, run_id: str, uid: NodeUid, seq: bytes) -> bytes:
        """Return the Place of a node; `seq` (8 bytes) is what is acknowledged. Empty if the job is not there (yet),
        or is about to change so that nobody may be told how it is now.

        Raises NotLeader if another daemon may lead: then nothing may be said any more.
        """
        self.engine.check_lead()
        room = self.engine.rooms.get(run_id)
        if room is None or room.withheld:
            return b""
        waiter = self.engine.waiting.get(run_id, uid)
        if waiter is not None:
            return self._outside(room, waiter) + SEQ_TAG + seq
        return b"".join((self._common_bytes(room, uid), self._own_bytes(room, uid), SEQ_TAG, seq))

    def _outside(self, room: Room, waiter: Waiter) -> bytes:
        """Return what a node is sent that has no part in the job of its run id: only why it waits."""
        now = self.engine.clock.now()
        message = self._of_daemon(room, why_it_waits(room.job, waiter.event, now), now)
        message.waiting.reason = pb.GATHERING
        message.waiting.left_ms = max(1, int((waiter.until_at - now) * 1000))
        data: bytes = message.SerializeToString()
        return data

    def _of_daemon(self, room: Room, explain: str, now: float) -> pb.Place:
        """Return a Place with what this daemon tells every node of a run id, and nothing of its job."""
        engine, pace = self.engine, self.engine.pace(room.job.run_id)
        return pb.Place(
            term=engine.term,
            revision=room.revision,
            daemon_id=engine.daemon_id,
            heartbeat_ms=int(pace.heartbeat_s * 1000),
            lease_ms=int(pace.lease_s * 1000),
            retry_max_ms=int(pace.retry_max_s * 1000),
            explain=explain,
            up_ms=int((now - engine.began_at) * 1000),
        )

    def refusal(self, text: str, seq: bytes) -> bytes:
        """Return the Place of a node that has none in any job."""
        removed = pb.Removed(by="rendezvousd", reason=text, exit_code=1)
        engine = self.engine
        message = pb.Place(
            term=engine.term,
            revision=engine.revision,  # or a node that was told more before would take it for old news
            daemon_id=engine.daemon_id,
            explain=text,
            removed=removed,
        )
        return message.SerializeToString() + SEQ_TAG + seq

    def forget(self, run_id: str, uid: NodeUid) -> None:
        """Drop what was kept for a node whose stream is gone."""
        self._own.pop((run_id, uid), None)

    def _common_bytes(self, room: Room, uid: NodeUid) -> bytes:
        now = self.engine.clock.now()
        kept = self._common.get(room)
        if kept is None or kept.job is not room.job or kept.revision != room.revision or now >= kept.stale_at:
            kept = self._common[room] = self._make_common(room, kept, now)
        if kept.text:
            row = self.engine.table.get(room.job.run_id, uid)
            if row is not None and row.seen >= kept.text_since:
                return kept.brief
        return kept.whole

    def _make_common(self, room: Room, last: _Common | None, now: float) -> _Common:
        job, round_ = room.job, room.job.round
        message = self._of_daemon(room, self.engine.explain(room), now)
        message.job_uid = job.uid
        message.valid_round_uid = valid_round_uid(job)
        message.known.CopyFrom(known_pb(job.known, job.uid))
        if round_ is not None and round_.cause is not None:
            message.break_cause.CopyFrom(cause_pb(round_.cause, final=round_.final))
        elif job.last_cause is not None:
            message.break_cause.CopyFrom(cause_pb(job.last_cause, final=True))
        whole, text = message.SerializeToString(), message.break_cause.failure.text
        since = room.revision
        if last is not None and last.text == text:
            since = last.text_since
        elif last is not None and last.revision == room.revision:
            since += 1  # some may have obeyed this revision without having been sent the text
        brief = whole
        if text:
            message.break_cause.failure.text = ""
            brief = message.SerializeToString()
        return _Common(job, room.revision, now + COMMON_FRESH_S, whole, brief, text, since)

    def _own_bytes(self, room: Room, uid: NodeUid) -> bytes:
        job, engine = room.job, self.engine
        kept, running = self._own.get((job.run_id, uid)), job.running
        if kept is not None and running is not None and kept[0] is running:
            return kept[1]
        it = place(job, uid, engine.clock.now())
        data: bytes = status_pb(it, job.spec.max_restarts, engine.term).SerializeToString()
        if isinstance(it, Assigned):  # an assignment never changes while its round runs
            self._own[job.run_id, uid] = (running, data)
        return data


class JoinStream:
    """The daemon's end of one Join stream. A slow reader gets the latest place, never a queue of them."""

    def __init__(self, engine: Engine, renderer: Renderer, context: Context) -> None:
        self._engine = engine
        self._renderer = renderer
        self._context = context
        self._writer: asyncio.Task[None] | None = None
        self._wanted = False
        self._refused = ""
        self._over = False
        self._last: bytes | None = None  # the last message without its seq; None: the next one is news
        self._seq = bytes(SEQ_BYTES)
        self._row: Attendance | None = None
        self._specs: Specs | None = None
        self.run_id = ""
        self.uid = NodeUid("")
        self.stream_no = 0
        self.attended = False  # the node says that a daemon has attended it before
        self.failed = ""  # why it is ended from this side
        self._passing = False  # and a new node is to try again as well
        self._spoke_at = asyncio.get_running_loop().time()
        self._reader: asyncio.Task[Any] | None = None

    async def serve(self) -> None:
        """Read until the stream ends. Raises BadRequest, NotServed."""
        self._reader = asyncio.current_task()
        time = asyncio.get_running_loop().time
        while (data := await self._context.read()) is not grpc.aio.EOF:
            self._spoke_at = time()
            if self._row is not None and data[:-SEQ_BYTES] == self._last:
                self._seq = data[-SEQ_BYTES:]
                if self._engine.heartbeat(self._row, self):
                    self.notify()
                    continue
            self._news(data)

    @property
    def unserved_code(self) -> grpc.StatusCode:
        """With what a stream ends whose job is not served: a node that may have workers goes on asking, and a new one
        need not begin."""
        retry = self.attended or self._passing
        return grpc.StatusCode.UNAVAILABLE if retry else grpc.StatusCode.FAILED_PRECONDITION

    def end_if_idle(self, now: float) -> None:
        """End the stream if it is silent and speaks for no node that is attended, whose lease would run out."""
        silent_s = now - self._spoke_at
        attended = self._row is not None and self._row.attached and self._row.stream is self
        if silent_s >= IDLE_S and not attended:
            self.fail(f"nothing was sent on this stream for {silent_s:.0f} s", passing=True)

    def end(self) -> None:
        """Let go of everything; the stream is over."""
        self._over = True
        if self._row is not None:
            self._engine.stream_ended(self._row, self)
        self._renderer.forget(self.run_id, self.uid)
        if self._writer is not None:
            self._writer.cancel()

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        """End the stream with a status, after what is being written. Always raises."""
        self._over = True
        if self._writer is not None and not self._writer.done():
            # a status while a message is under way is one operation too many for the C core
            await asyncio.wait((self._writer,), timeout=CLOSE_S / 2)
        await self._context.abort(code, status_text(text))

    def _news(self, data: bytes) -> None:
        try:
            state = pb.NodeState.FromString(data)
        except Exception as exc:
            raise BadRequest(f"not a NodeState: {exc}") from exc
        self._check_identity(state)
        engine = self._engine
        if state.HasField("spec"):
            self._specs = read_spec(state.spec, engine.timing, engine.limits, engine.takeover_s)
        if self._specs is None:
            raise BadRequest("the first message of a stream must have a spec")
        event = node_heard(state, self._specs, engine.limits)
        self.attended = bool(event.resumed or event.known.job_uid)
        self._seq = state.seq.to_bytes(SEQ_BYTES, "little")
        # Only where `seq` is what the last bytes are, they are all in which a heartbeat differs.
        self._last = data[:-SEQ_BYTES] if data.endswith(SEQ_TAG + self._seq) else None
        seen = (state.seen.term, state.seen.revision)
        self._row = self._engine.heard(self.run_id, event, self, seen)

    def _check_identity(self, state: pb.NodeState) -> None:
        if not self.run_id:
            self.run_id, self.uid, self.stream_no = state.run_id, NodeUid(state.node_uid), state.stream_no
        elif (state.run_id, state.node_uid, state.stream_no) != (self.run_id, self.uid, self.stream_no):
            raise BadRequest("run_id, node_uid and stream_no are those of the stream's first message, always")

    # ---------------------------------------------------------------- what the engine calls (attendance.Stream)

    def notify(self) -> None:
        """Tell the node its place, as it is when the stream can take it."""
        if self._over:
            return
        self._wanted = True
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write())

    def forget(self) -> None:
        self._row = self._last = None

    def refuse(self, text: str) -> None:
        self.forget()
        self._refused = text
        self.notify()

    def fail(self, text: str, *, passing: bool = False) -> None:
        """End the stream with this reason; `join` says it."""
        self.forget()
        if not self.failed and not self._over:
            self.failed, self._passing = text, passing
            if self._reader is not None:
                self._reader.cancel()

    async def _write(self) -> None:
        while self._wanted:
            self._wanted = False
            try:
                if self._refused:
                    data = self._renderer.refusal(self._refused, self._seq)
                else:
                    data = self._renderer.place(self.run_id, self.uid, self._seq)
            except NotLeader:
                return  # all streams are about to be ended with the reason
            except Exception as error:  # noqa: BLE001 -- it is logged there
                self._engine.fail(self.run_id, "was told to its nodes", error)
                return
            if data:
                try:  # a stream that is gone is its reader's news, not the writer's
                    await self._context.write(data)
                except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                    return


class RendezvousStreams:
    """All open Join streams."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._renderer: Renderer | None = None
        self._open: dict[asyncio.Task[Any], JoinStream] = {}
        self._sweeping: asyncio.Task[None] | None = None  # while there are any
        self._ending = ""  # why streams are being ended from this side

    def __len__(self) -> int:
        return len(self._open)

    async def join(self, _: object, context: Context) -> None:
        """Serve one Join stream (raw bytes)."""
        async with refusals(context):
            engine = self._desk.engine
        if self._renderer is None or self._renderer.engine is not engine:
            self._renderer = Renderer(engine)
        task = asyncio.current_task()
        assert task is not None
        stream = self._open[task] = JoinStream(engine, self._renderer, context)
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep_for_ever())
        try:
            await stream.serve()
        except BadRequest as refusal:
            await stream.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
        except NotServed as refusal:
            await stream.abort(stream.unserved_code, str(refusal))
        except asyncio.CancelledError:
            if self._ending:
                await stream.abort(grpc.StatusCode.UNAVAILABLE, self._ending)
            if stream.failed:
                await stream.abort(stream.unserved_code, stream.failed)
            raise
        finally:
            stream.end()
            del self._open[task]
            if not self._open and self._sweeping is not None:
                self._sweeping.cancel()
                self._sweeping = None

    async def end_all(self, why: str) -> None:
        """End all streams, telling each node why. Judges nobody."""
        self._ending = why
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        self._ending = ""
        self._renderer = None  # it keeps the engine and all of its jobs

    async def _sweep_for_ever(self) -> None:
        """End streams that nobody uses: one that never speaks is no node, and would stay for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            for stream in list(self._open.values()):
                stream.end_if_idle(loop.time())
