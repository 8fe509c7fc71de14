"""Thousands of simulated nodes in one process, on real streams over a few connections.

    python -m tests.bench.swarm daemon|echo PORT SERVER_PID NODES IDLE_S

Prints one JSON object: what `Figures` says. The nodes behave as the .proto asks of a node whose one worker starts and
stops at once. Against the echo server the same streams carry the same bytes, and nobody behaves.

The load must cost less than what is loaded: the streams are our own (tests/bench/streams.py), bytes are serialised by
hand where it counts, and a heartbeat is the last message with its last 8 bytes, the sequence number, changed.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import json
import struct
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import uvloop

from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.bench.harness import BenchFailed
from tests.bench.streams import Connection, connect

CONNECTIONS = 16
METHOD = "/rendezvousd.v1.Rendezvous/Join"
SEQ_TAG = bytes.fromhex("f901")  # field 31, fixed64
SEQ = struct.Struct("<Q")
TICK_S = 0.001  # the pacer looks so often: heartbeats come one by one, as those of a thousand launchers would
PHASE_BOUND_S = 120.0
OPEN_AT_ONCE = 50  # streams; between such portions those that are open are served, or they would be silent too long


@dataclass
class Figures:
    """What one run found. CPU is the server's, user and system; messages are per node."""

    first_s: float = 0.0  # first message sent -> every node has its place (echo: its echo)
    told_s: float = 0.0  # a node reports a failure -> every node has been told to stop
    next_s: float = 0.0  # the same -> every node has its next place (echo: one more echo)
    first_cpu_us: float = 0.0  # per node, until every node's message that it runs was answered
    next_cpu_us: float = 0.0
    first_up: float = 0.0
    first_down: float = 0.0
    next_up: float = 0.0
    next_down: float = 0.0
    rss_mb: float = 0.0  # the server's, after all this
    idle_percent: float = 0.0  # of one core
    idle_up_per_s: float = 0.0  # heartbeats a second meanwhile
    swarm_cpu_s: float = 0.0  # our own CPU for both rounds: when it is near the times above, we were the bottleneck


class Milestones:
    """Counts who has got where; whoever waits is woken when all have."""

    def __init__(self, everybody: int) -> None:
        self._everybody = everybody
        self._reached: Counter[str] = Counter()
        self._awaited: dict[str, asyncio.Event] = {}

    def reach(self, milestone: str) -> None:
        """One more node is there."""
        self._reached[milestone] += 1
        if self._reached[milestone] >= self._everybody:
            self._event(milestone).set()

    async def wait(self, milestone: str) -> float:
        """The instant (perf_counter, s) at which everybody was there. Raises BenchFailed after PHASE_BOUND_S."""
        try:
            async with asyncio.timeout(PHASE_BOUND_S):
                await self._event(milestone).wait()
        except TimeoutError:
            counted = f"{self._reached[milestone]} of {self._everybody}"
            raise BenchFailed(f"{milestone}: {counted} nodes after {PHASE_BOUND_S:.0f} s") from None
        return time.perf_counter()

    def _event(self, milestone: str) -> asyncio.Event:
        return self._awaited.setdefault(milestone, asyncio.Event())


class Swarm:
    """What all nodes share."""

    def __init__(self, nodes: int) -> None:
        self.size = nodes
        self.milestones = Milestones(nodes)
        self.up = 0  # messages sent, by all
        self.down = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # or not: never a result

    def fail(self, why: str) -> None:
        """What should not happen did."""
        if not self.failed.done():
            self.failed.set_exception(BenchFailed(why))


class Stream:
    """One node's stream. Subclasses say what its messages are."""

    body: bytes  # the message, without its sequence number
    heartbeat_s = 1.0  # the interval it was last told
    told = False  # anything: until then it owes no heartbeat

    def __init__(self, swarm: Swarm, index: int) -> None:
        self.swarm = swarm
        self.index = index
        self.seq = 0
        self.spoke_at = 0.0
        self._connection: Connection | None = None
        self._stream = 0

    def live(self, connection: Connection) -> None:
        """Open the stream, which should not end."""
        self._connection, self._stream = connection, connection.open(METHOD, self._on_message, self._on_end)
        self.say()

    def say(self) -> None:
        """Send the message as it now is, with the next sequence number."""
        assert self._connection is not None
        self.seq += 1
        self.swarm.up += 1
        self.spoke_at = time.monotonic()
        self._connection.send(self._stream, self.body + SEQ_TAG + SEQ.pack(self.seq))

    def _on_message(self, message: bytes) -> None:
        self.swarm.down += 1
        if self.heard(message):
            self.say()

    def _on_end(self, why: str) -> None:
        self.swarm.fail(f"node {self.index}: the stream ended: {why}")

    def beats_at(self) -> float:
        """When it speaks next, at the latest."""
        return self.spoke_at + self.heartbeat_s

    def heard(self, message: bytes) -> bool:
        """Take in what came; whether there is something to say now."""
        raise NotImplementedError


class EchoNode(Stream):
    """Sends what a node would and counts what comes back."""

    def __init__(self, swarm: Swarm, index: int) -> None:
        super().__init__(swarm, index)
        self.body = first_state(swarm.size, index).SerializeToString()
        self.heartbeat_s, self.told = max(1.0, swarm.size / 1_000), True  # as the daemon tells its nodes

    def heard(self, message: bytes) -> bool:
        """Every echo is a milestone; only the first two are waited for."""
        (seq,) = SEQ.unpack(message[-SEQ.size :])
        if seq <= 2:
            self.swarm.milestones.reach(f"echo {seq}")
        return False


class SimNode(Stream):
    """A node whose worker starts and stops the moment it is told to.

    Concatenated messages merge, so what it says is put together from parts, each serialised when it changes.
    """

    def __init__(self, swarm: Swarm, index: int) -> None:
        super().__init__(swarm, index)
        state = first_state(swarm.size, index)
        self.body = state.SerializeToString()
        self._standing = b""  # held and offer
        self._told = b""  # seen, known and lease
        self._held = pb.Held()
        self._running = False
        self._answer_due = 0  # the seq of our message that we run, until it is answered
        self._obeyed = -1  # revision
        self._lease_ms = 0
        state.ClearField("spec")
        state.ClearField("uptime_ms")
        self._first_offer = pb.NodeState(offer=state.offer).SerializeToString()
        state.ClearField("offer")
        self._identity = state.SerializeToString()

    def heard(self, message: bytes) -> bool:
        """Obey the place."""
        place = pb.Place.FromString(message)
        self.heartbeat_s, self.told = place.heartbeat_ms / 1_000, True
        if place.HasField("ended") or place.HasField("removed"):
            self.swarm.fail(f"node {self.index} was sent away: {place.explain or place}")
        if self._answer_due and place.ack_seq >= self._answer_due:
            self._answer_due = 0
            self.swarm.milestones.reach(f"running in round {self._held.assignment.round}")
        if place.revision == self._obeyed and place.lease_ms == self._lease_ms:
            return False
        self._obeyed, self._lease_ms = place.revision, place.lease_ms
        seen = pb.Seen(term=place.term, revision=place.revision)
        self._told = pb.NodeState(seen=seen, known=place.known, lease_ms=place.lease_ms).SerializeToString()
        return self._obey(place)

    def fail(self) -> None:
        """Our worker dies: say so, and that we are ready for the next round."""
        self._held.failures.add(
            rank=self._held.assignment.first_rank, exit_code=1, text="asked to fail by the benchmark"
        )
        self._end(pb.FAILED)
        self.say()

    def _obey(self, place: pb.Place) -> bool:
        ours = self._held.assignment.round_uid
        if self._running and place.valid_round_uid != ours:
            self._end(pb.STOPPED)
            return True
        if place.HasField("assigned") and place.assigned.round_uid != ours:
            self._start(place.assigned)
            return True
        self._compose(self._standing or self._first_offer)  # that we have seen this rides on the next heartbeat
        return False

    def _start(self, assignment: pb.Assigned) -> None:
        self._held = pb.Held(assignment=assignment, phase=pb.RUNNING, alive=1)
        self._running = True
        self._answer_due = self.seq + 1
        self._compose(pb.NodeState(held=self._held).SerializeToString())
        self.swarm.milestones.reach(f"assigned to round {assignment.round}")

    def _end(self, phase: pb.HeldPhase.ValueType) -> None:
        over = self._held.assignment
        self._held.phase, self._held.alive = phase, 0
        self._running = False
        offer = make_offer(f"{self.index}-after-{over.round_uid}", over.round_uid)
        self._compose(pb.NodeState(held=self._held, offer=offer).SerializeToString())
        self.swarm.milestones.reach(f"told to stop round {over.round}")

    def _compose(self, standing: bytes) -> None:
        self._standing = standing
        self.body = self._identity + standing + self._told


def make_offer(offer_id: str, after_round_uid: str) -> pb.Offer:
    """An offer with an address that nobody will ever call."""
    return pb.Offer(offer_id=offer_id, after_round_uid=after_round_uid, address="127.0.0.1", port=1)


def first_state(nodes: int, index: int) -> pb.NodeState:
    """What node `index` says first: a job that starts when all are there, and forgives any number of failures."""
    return pb.NodeState(
        run_id="swarm",
        node_uid=f"uid-{index:06}",
        node_name=f"sim-{index:06}",
        uptime_ms=1_000,
        stream_no=1,
        spec=pb.Spec(min_nodes=nodes, max_nodes=nodes, max_restarts=100, slots=1, role="default", stop_grace_ms=1_000),
        offer=make_offer(f"{index}-first", ""),
    )


class Server:
    """The process under load, from outside."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def cpu_s(self) -> float:
        """Seconds of CPU used so far, user and system."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def rss_mb(self) -> float:
        """Resident memory, 10^6 bytes."""
        return float(self._process.memory_info().rss / 1e6)


class Meter:
    """The server's CPU and the messages, per node."""

    def __init__(self, swarm: Swarm, server: Server) -> None:
        self._swarm, self._server = swarm, server
        self._last = self._look()

    def read(self) -> tuple[float, float, float]:
        """Microseconds of CPU, messages up and messages down since the last reading."""
        before, self._last = self._last, self._look()
        cpu_s, up, down = (now - then for now, then in zip(self._last, before, strict=True))
        size = self._swarm.size
        return cpu_s * 1e6 / size, up / size, down / size

    def _look(self) -> tuple[float, float, float]:
        return self._server.cpu_s(), self._swarm.up, self._swarm.down


async def keep_speaking(nodes: list[Any]) -> None:
    """Let no node be silent for longer than the interval that it was told, for ever."""
    beats = [(node.beats_at(), node.index) for node in nodes]
    heapq.heapify(beats)
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        while beats[0][0] <= now:
            node = nodes[beats[0][1]]
            if node.told and node.beats_at() <= now:
                node.say()
            heapq.heapreplace(beats, (max(node.beats_at(), now + TICK_S), node.index))


async def measure(kind: str, port: int, server: Server, size: int, idle_s: float) -> Figures:
    """Open all streams, play both rounds, then idle."""
    swarm, figures = Swarm(size), Figures()
    nodes = [(SimNode if kind == "daemon" else EchoNode)(swarm, index) for index in range(size)]
    connections = [await connect("127.0.0.1", port) for _ in range(CONNECTIONS)]
    gc.collect()
    gc.freeze()
    gc.disable()  # this process is short

    own_cpu_s = time.process_time()
    async with asyncio.TaskGroup() as group:
        group.create_task(until(swarm.failed))
        meter, began = Meter(swarm, server), time.perf_counter()
        tasks = [group.create_task(keep_speaking(nodes))] if kind == "daemon" else []
        for node in nodes:
            node.live(connections[node.index % CONNECTIONS])
            if node.index % OPEN_AT_ONCE == 0:
                await asyncio.sleep(0)
        if kind == "daemon":
            await play_rounds(swarm, nodes, meter, figures, began)
        else:
            await play_echoes(swarm, nodes, meter, figures, began)
            tasks.append(group.create_task(keep_speaking(nodes)))
        figures.swarm_cpu_s = time.process_time() - own_cpu_s
        await idle(swarm, server, figures, idle_s)
        for task in tasks:
            task.cancel()
        swarm.failed.cancel()
    for connection in connections:
        connection.close()
    return figures


async def until(failed: asyncio.Future[None]) -> None:
    """Wait for a failure. Raises it."""
    await failed


async def play_rounds(swarm: Swarm, nodes: list[Any], meter: Meter, figures: Figures, began: float) -> None:
    """All get a place; then one node fails, everybody stops, everybody is dealt a place again."""
    figures.first_s = await swarm.milestones.wait("assigned to round 1") - began
    await swarm.milestones.wait("running in round 1")
    figures.first_cpu_us, figures.first_up, figures.first_down = meter.read()
    began = time.perf_counter()
    nodes[0].fail()
    figures.told_s = await swarm.milestones.wait("told to stop round 1") - began
    figures.next_s = await swarm.milestones.wait("assigned to round 2") - began
    await swarm.milestones.wait("running in round 2")
    figures.next_cpu_us, figures.next_up, figures.next_down = meter.read()


async def play_echoes(swarm: Swarm, nodes: list[Any], meter: Meter, figures: Figures, began: float) -> None:
    """All get their first message back; then all send one more."""
    figures.first_s = await swarm.milestones.wait("echo 1") - began
    figures.first_cpu_us, figures.first_up, figures.first_down = meter.read()
    began = time.perf_counter()
    for node in nodes:
        node.say()
    figures.next_s = await swarm.milestones.wait("echo 2") - began
    figures.next_cpu_us, figures.next_up, figures.next_down = meter.read()


async def idle(swarm: Swarm, server: Server, figures: Figures, idle_s: float) -> None:
    """Nothing but heartbeats."""
    await asyncio.sleep(min(idle_s, 2.0))  # what the rounds stirred up settles
    up, cpu_s, began = swarm.up, server.cpu_s(), time.perf_counter()
    await asyncio.sleep(idle_s)
    seconds = max(time.perf_counter() - began, 1e-9)
    figures.idle_percent = (server.cpu_s() - cpu_s) / seconds * 100
    figures.idle_up_per_s = (swarm.up - up) / seconds
    figures.rss_mb = server.rss_mb()


def main() -> None:
    """Measure, print, leave."""
    kind, port, pid, size, idle_s = sys.argv[1:]
    try:
        figures = uvloop.run(measure(kind, int(port), Server(int(pid)), int(size), float(idle_s)))
    except* (BenchFailed, TimeoutError, OSError) as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        sys.exit(f"swarm: {first!r} (and {len(failures.exceptions) - 1} more)")
    print(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
