"""A network between machines, and gRPC on it as far as our code can tell: channels, calls and contexts.

gRPC runs on TCP: what one end of a stream writes arrives in order or not at all, and late rather than never. So loss is
delay, a partition holds everything back until it heals or a keepalive gives up, and what was sent on an older stream
may arrive after what a newer one brought. Each call has a connection of its own here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import grpc

from tests.sim.world.machines import Process, World

# Keepalive pings every 5 s and waits for 3 s (CHANNEL_OPTIONS of the session, server_options of the daemon).
KEEPALIVE_S = (3.0, 8.0)
CONNECT_S = 3.0  # after which gRPC gives up connecting to a host that does not answer
RETRANSMIT_S = (0.05, 1.0)  # how soon TCP notices that a path works again
NEAR_S = 0.01  # from a daemon to etcd, at most
LOST_S = (0.2, 1.2)  # what the loss of a packet costs

JOIN = "/rendezvousd.v1.Rendezvous/Join"
SLOW_S = (0.3, 2.5)  # that a slow reader takes for a message

DATA, CONNECTED, STATUS, GONE = "data", "connected", "status", "gone"
Item: TypeAlias = tuple[str, Any]
Handler: TypeAlias = Callable[[Any, "Context"], Coroutine[Any, Any, None]]


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class Network:
    def __init__(self, world: World, *, delay_s: float, loss: float) -> None:
        self.world = world
        self.listeners: dict[str, Any] = {}  # by host:port: what takes calls there
        self.off: set[str] = set()  # machines without power
        self.streams: list[Stream] = []
        self.on_data: Callable[[Stream, str, bytes], None] = lambda stream, way, data: None
        self.on_over: Callable[[Stream], None] = lambda stream: None  # at the server
        self._delay_s, self._loss = delay_s, loss
        self._chances: dict[tuple[str, str], Any] = {}
        self._cut: dict[tuple[str, str], float] = {}  # one way, until when
        self.slow_readers: dict[str, float] = {}  # machines whose streams are read slowly, until when

    # ------------------------------------------------------------------------------------------ what goes wrong

    def cut(self, source: str, target: str, seconds: float) -> None:
        """Let nothing pass in this direction for a while."""
        until = self.world.now + seconds
        self._cut[source, target] = max(until, self._cut.get((source, target), 0.0))
        for stream in list(self.streams):
            if {stream.client.machine, stream.server_machine} == {source, target}:
                for end in (stream.client, stream.server):
                    patience = self.chance(source, target).uniform(*KEEPALIVE_S)
                    self.world.after(patience, self._keepalive, stream, end, source, target, self.world.now)

    def _keepalive(self, stream: Stream, end: End, source: str, target: str, since: float) -> None:
        if self.is_cut(source, target):
            end.break_("keepalive watchdog timeout")

    def heal(self) -> None:
        self._cut.clear()
        self.slow_readers.clear()

    def is_cut(self, source: str, target: str) -> bool:
        return self.world.now < self._cut.get((source, target), -1.0)

    def reset(self, one: str, other: str) -> None:
        """Break all connections between two machines."""
        for stream in list(self.streams):
            if {stream.client.machine, stream.server_machine} == {one, other}:
                for end in (stream.client, stream.server):
                    self.world.after(self.chance(one, other).uniform(0.0, 0.05), end.break_, "connection reset by peer")

    def paused(self, process: Process) -> None:
        """A process stands still: its peers find out by their keepalive."""
        for stream in list(self.streams):
            for end in (stream.client, stream.server):
                if end.process is process:
                    patience = process.chance.uniform(*KEEPALIVE_S)
                    self.world.after(patience, self._if_paused, process, process.pauses, end.peer())

    def _if_paused(self, process: Process, pauses: int, end: End) -> None:
        if process.paused and process.pauses == pauses:  # all the time
            end.break_("keepalive watchdog timeout")

    def died(self, process: Process) -> None:
        """A process is gone, and its kernel says so to its peers."""
        for stream in list(self.streams):
            for end in (stream.client, stream.server):
                if end.process is process:
                    end.vanish(tell=True)

    def power_off(self, machine: str) -> None:
        """A machine is gone, and says nothing."""
        self.off.add(machine)
        for stream in list(self.streams):
            for end in (stream.client, stream.server):
                if end.machine == machine:
                    end.vanish(tell=False)
                    patience = self.chance(machine, machine).uniform(*KEEPALIVE_S)
                    self.world.after(patience, end.peer().break_, "keepalive watchdog timeout")

    def power_on(self, machine: str) -> None:
        """It is back, and knows of no connection."""
        self.off.discard(machine)
        for stream in list(self.streams):
            for end in (stream.client, stream.server):
                if end.machine == machine:
                    self.world.after(self.delay(machine, machine), end.peer().break_, "connection reset by peer")

    # ------------------------------------------------------------------------------------------------- transport

    def chance(self, source: str, target: str) -> Any:
        found = self._chances.get((source, target))
        if found is None:
            found = self._chances[source, target] = self.world.random(f"link {source} {target}")
        return found

    def delay(self, source: str, target: str) -> float:
        chance = self.chance(source, target)
        near = "e" in (source[0], target[0])  # etcd is where the daemons are
        delay_s = (min(self._delay_s, NEAR_S) if near else self._delay_s) * (0.5 + chance.random())
        if chance.random() < self._loss:
            delay_s += chance.uniform(*LOST_S)
        return float(delay_s)

    def channel(self, target: str, options: Any = None, **_: Any) -> Channel:
        """As grpc.aio.insecure_channel."""
        process = self.world.current
        assert process is not None, "a channel belongs to a process"
        return Channel(self, process, target.rpartition("/")[2])


class Pipe:
    """One direction of a connection."""

    def __init__(self, net: Network, source: str, target: str, deliver: Callable[[Item], None]) -> None:
        self._net, self._source, self._target, self._deliver = net, source, target, deliver
        self._last_at = 0.0
        self._held: list[Item] = []

    def send(self, item: Item) -> None:
        if self._net.world.over:
            return
        self._last_at = max(self._net.world.now + self._net.delay(self._source, self._target), self._last_at)
        self._net.world.at(self._last_at, self._arrive, item)

    def _arrive(self, item: Item) -> None:
        if self._held:
            self._held.append(item)
        elif self._net.is_cut(self._source, self._target):
            self._held.append(item)
            self._again()
        else:
            self._deliver(item)

    def _again(self) -> None:
        self._net.world.after(self._net.chance(self._source, self._target).uniform(*RETRANSMIT_S), self._flush)

    def _flush(self) -> None:
        if self._source in self._net.off:  # what its kernel still had to send again is gone
            return
        if self._net.is_cut(self._source, self._target):
            self._again()
            return
        items, self._held = self._held, []
        for item in items:
            self._deliver(item)


class Stream:
    """One call, from both ends."""

    def __init__(self, net: Network, client: Process, target: str, path: str) -> None:
        self.net, self.path, self.target = net, path, target
        self.server_machine = target.partition(":")[0]
        up = Pipe(net, client.machine, self.server_machine, lambda item: self.server.arrived(item))
        down = Pipe(net, self.server_machine, client.machine, lambda item: self.client.arrived(item))
        self.client = Call(self, client, client.machine, up)
        self.server: End = End(self, None, self.server_machine, down)
        self.note, self.number = "", 0  # whose it is, and the how-manieth of it: kept by whoever watches
        self.last: dict[str, bytes] = {}  # by way, what passed last
        net.streams.append(self)
        net.world.after(net.delay(client.machine, self.server_machine), self._knock)

    def _knock(self) -> None:
        net = self.net
        blocked = net.is_cut(self.client.machine, self.server_machine) or self.server_machine in net.off
        listener = net.listeners.get(self.target)
        if blocked or self.client.over:
            if not self.client.over:
                net.world.after(CONNECT_S, self._no_answer)
        elif listener is None:
            self.server.pipe.send((STATUS, (grpc.StatusCode.UNAVAILABLE, "connection refused")))
        else:
            listener.accept(self)

    def _no_answer(self) -> None:
        if not self.client.connected:
            self.client.break_("failed to connect: timeout")

    def closed(self, end: End) -> None:
        """Both ends are over: forget it."""
        if self.client.over and self.server.over and self in self.net.streams:
            self.net.streams.remove(self)


class End:
    """One end of a call."""

    def __init__(self, stream: Stream, process: Process | None, machine: str, pipe: Pipe) -> None:
        self.stream, self.process, self.machine, self.pipe = stream, process, machine, pipe
        self.over = False  # nothing goes in or out here any more

    def peer(self) -> End:
        return self.stream.server if self is self.stream.client else self.stream.client

    def arrived(self, item: Item) -> None:
        """Something came over the network."""
        if self.over or self.stream.net.world.over:
            return
        if self.process is None:
            self.take(item)
        else:
            self.process.post(self.take, item)

    def take(self, item: Item) -> None:
        """The process reads it."""

    def break_(self, why: str) -> None:
        """The connection is broken, as far as this end can tell."""
        if self.over or self.stream.net.world.over:
            return
        if self.process is None:
            self.take((GONE, why))
        else:
            self.process.post(self.take, (GONE, why))

    def vanish(self, *, tell: bool) -> None:
        """The process of this end is no more."""
        if not self.over:
            self.over = True
            if tell:
                self.pipe.send((GONE, "socket closed"))
            self.stream.closed(self)


class Call(End):
    """The client's end, as grpc.aio has it: read, write, cancel."""

    def __init__(self, stream: Stream, process: Process, machine: str, pipe: Pipe) -> None:
        super().__init__(stream, process, machine, pipe)
        self.connected = False
        self.serialize: Any = None
        self.deserialize: Any = None
        self._inbox: deque[Any] = deque()
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._cancelled = False
        self._loop = process.loop
        self._waiting: list[asyncio.Future[None]] = []

    def take(self, item: Item) -> None:
        if self._status is not None:
            return
        kind, what = item
        if kind == CONNECTED:
            self.connected = True
        elif kind == DATA:
            self._inbox.append(what)
        elif kind == STATUS:
            self._finish(*what)
        else:
            self._finish(grpc.StatusCode.UNAVAILABLE, what)
        self._wake()

    def deadline(self) -> None:
        if self._status is None:
            self._finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._wake()

    def cancel(self) -> bool:
        if self._status is None:
            self._cancelled = True
            self._inbox.clear()
            self._finish(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
            self._wake()
        return True

    async def code(self) -> grpc.StatusCode:
        return self._status[0] if self._status is not None else grpc.StatusCode.OK

    async def details(self) -> str:
        return self._status[1] if self._status is not None else ""

    async def write(self, message: Any) -> None:
        while not self.connected and self._status is None:
            await self._news()
        if self._status is not None:
            self._raise()
        data = message if self.serialize is None else self.serialize(message)
        self.stream.net.on_data(self.stream, "said", data)
        self.pipe.send((DATA, data))

    async def read(self) -> Any:
        try:
            while not self._inbox and self._status is None:
                await self._news()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._inbox:
            data = self._inbox.popleft()
            self.stream.net.on_data(self.stream, "down", data)
            return data if self.deserialize is None else self.deserialize(data)
        assert self._status is not None
        if self._status[0] is grpc.StatusCode.OK:
            return grpc.aio.EOF
        return self._raise()

    def _raise(self) -> Any:
        assert self._status is not None
        if self._cancelled:
            raise asyncio.CancelledError
        raise _error(*self._status)

    def _finish(self, code: grpc.StatusCode, details: str) -> None:
        self._status = (code, details)
        if not self.over:
            self.over = True
            self.pipe.send((GONE, "cancelled"))
            self.stream.closed(self)

    async def _news(self) -> None:
        waiting = self._loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class Channel:
    """The client's channel to one target."""

    def __init__(self, net: Network, process: Process, target: str) -> None:
        self._net, self._process, self._target = net, process, target
        self._calls: list[Call] = []

    def stream_stream(self, path: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        def call(timeout: float | None = None, metadata: Any = None) -> Call:
            made = Stream(self._net, self._process, self._target, path).client
            made.serialize, made.deserialize = request_serializer, response_deserializer
            self._calls = [c for c in self._calls if not c.over]
            self._calls.append(made)
            if timeout is not None:
                self._process.loop.call_later(timeout, made.deadline)
            return made

        return call

    def unary_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        streams = self.stream_stream(path, request_serializer, response_deserializer)

        async def call(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:  # noqa: ASYNC109
            made = streams(timeout=timeout)
            try:
                await made.write(request)
                answer = await made.read()
            finally:
                made.cancel()
            if answer is grpc.aio.EOF:
                raise _error(grpc.StatusCode.UNKNOWN, "no answer")
            return answer

        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        connected = any(call.connected for call in self._calls)
        return grpc.ChannelConnectivity.READY if connected else grpc.ChannelConnectivity.CONNECTING

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Server:
    """What takes the calls to a process, as grpc.aio's server does. Handlers by path."""

    def __init__(self, net: Network, process: Process, handlers: dict[str, Handler]) -> None:
        self.net, self.process, self.handlers = net, process, handlers

    def accept(self, stream: Stream) -> None:
        stream.server = Context(self, stream)
        if self.process.paused:
            self.net.world.after(CONNECT_S, stream._no_answer)
        self.process.post(stream.server.pipe.send, (CONNECTED, None))


class Context(End):
    """The server's end, as grpc.aio's ServicerContext: read, write, abort."""

    def __init__(self, server: Server, stream: Stream) -> None:
        super().__init__(stream, server.process, stream.server_machine, stream.server.pipe)
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._inbox: deque[bytes] = deque()
        self._gone = False
        self._waiting: asyncio.Future[None] | None = None

    def take(self, item: Item) -> None:
        kind, what = item
        if self._gone:
            return
        if kind == DATA:
            self._inbox.append(what)
            if self._task is None:
                assert self.process is not None
                self._task = self.process.loop.create_task(self._serve())
            self._wake()
        elif kind == GONE:
            self._gone = True
            self._inbox.clear()
            if self._task is not None and not self._task.done():
                self._task.cancel()
            elif self._task is None:
                self._ended()

    async def _serve(self) -> None:
        handler = self._server.handlers[self.stream.path]
        world = self.stream.net.world
        try:
            await handler(None, self)
            self._send_status(grpc.StatusCode.OK, "")
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._send_status(grpc.StatusCode.CANCELLED, "the call was cancelled")
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a bug
            world.fail("bug", f"{self._server.process.name}: {self.stream.path}: {error!r}")
        finally:
            self._ended()

    def _ended(self) -> None:
        if not self.over:
            self.over = True
            self.stream.net.on_over(self.stream)
            self.stream.closed(self)

    async def read(self) -> Any:
        while not self._inbox and not self._gone:
            assert self.process is not None
            self._waiting = self.process.loop.create_future()
            await self._waiting
        if self._inbox:
            data = self._inbox.popleft()
            self.stream.net.on_data(self.stream, "read", data)
            return data
        return grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        if self._gone or self.over:
            raise asyncio.InvalidStateError("the call has ended")
        self.stream.net.on_data(self.stream, "told", data)
        await self._flow()
        self.pipe.send((DATA, data))

    async def _flow(self) -> None:
        """Return when there is room for what is written: the client has read what came before."""
        net, reader = self.stream.net, self.stream.client.machine
        if self.stream.path == JOIN and net.world.now < net.slow_readers.get(reader, -1.0):
            await asyncio.sleep(net.chance(self.machine, reader).uniform(*SLOW_S))
            if self._gone or self.over:
                raise asyncio.InvalidStateError("the call has ended")

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            self.stream.net.world.fail("bug", f"{self._server.process.name} refused a message: {details}")
        self._send_status(code, details)
        raise grpc.aio.AbortError("Locally aborted.")

    def _send_status(self, code: grpc.StatusCode, details: str) -> None:
        if not self._gone and not self.over:
            self.pipe.send((STATUS, (code, details)))

    def peer(self) -> Any:
        return self.stream.client

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
