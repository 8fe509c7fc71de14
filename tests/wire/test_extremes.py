"""Every field of every message, with extreme values, against a daemon that serves a healthy job beside it.

FUZZ=n in the environment: so many rounds of values drawn at random, after the fixed ones (default 1).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from rendezvousd.v1 import rendezvous_pb2 as pb
from rendezvousd.v1 import store_pb2 as store
from tests.daemon import daemon
from tests.wire.node import JOIN, WireNode, cast

ROUNDS = int(os.environ.get("FUZZ", "1"))
# How long a hostile stream goes on unless it is refused: rounds are adopted, broken and formed meanwhile.
HEARD_S = 0.5
AT_ONCE = 64  # hostile streams
# With these a daemon does at once what takes seconds otherwise.
QUICK = ("--recovery=0.1", "--recovery-max=0.2", "--settle=0", "--settle-max=0", "--grace=0.1", "--offer-timeout=1")
# Any value of theirs is a fact, or is cut.
FREE = {"seq", "held.failures.text", "held.failures.kind", "leaving.reason", "spec.stop_grace_ms"}
SERVICES = {
    service.full_name: service
    for file in (pb.DESCRIPTOR, store.DESCRIPTOR)
    for service in file.services_by_name.values()
}
LONG = "\N{SNOWMAN}" * 100_000  # in a field it is three times as many bytes


def edges(bits: int, *, signed: bool) -> list[int]:
    top = 2 ** (bits - signed)
    low = [-top, -1] if signed else []
    return [*low, 1, top // 2, top - 1, *(n for n in (40_000, 2**31, 2**53 + 1) if n < top)]


VALUES: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_BOOL: [True],
    FieldDescriptor.TYPE_STRING: ["x" * 300, LONG, "a/../b\n\0\x1b[31m", "\U0010ffff"],
    FieldDescriptor.TYPE_BYTES: [b"\xff" * 70, b"\0" * 300_000],
    FieldDescriptor.TYPE_ENUM: [1, 2, 17, 2**31 - 1, -1],
    FieldDescriptor.TYPE_UINT32: edges(32, signed=False),
    FieldDescriptor.TYPE_FIXED32: edges(32, signed=False),
    FieldDescriptor.TYPE_INT32: edges(32, signed=True),
    FieldDescriptor.TYPE_SINT32: edges(32, signed=True),
    FieldDescriptor.TYPE_UINT64: edges(64, signed=False),
    FieldDescriptor.TYPE_FIXED64: edges(64, signed=False),
    FieldDescriptor.TYPE_INT64: edges(64, signed=True),
    FieldDescriptor.TYPE_SINT64: edges(64, signed=True),
}


def paths(message: Any, depth: int = 0) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Return the way to every field in a message that holds a value, through the messages in it."""
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth < 5:
                yield from ((field, *rest) for rest in paths(field.message_type, depth + 1))
        else:
            yield (field,)


def put(message: Any, path: tuple[FieldDescriptor, ...], value: Any) -> None:
    *way, field = path
    for step in way:
        inner = getattr(message, step.name)
        if step.is_repeated:
            message = inner[0] if inner else inner.add()
        else:
            inner.SetInParent()
            message = inner
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def name(path: tuple[FieldDescriptor, ...]) -> str:
    return ".".join(field.name for field in path)


def sound_state(number: int, kind: str) -> pb.NodeState:
    """Return a message of a node that has what most fields are looked at for."""
    state = pb.NodeState(run_id=f"bad {number}", node_uid=f"u{number}", node_name="n", stream_no=1, seq=1)
    state.spec.CopyFrom(pb.Spec(min_nodes=1, max_nodes=4, slots=1, max_restarts=3, stop_grace_ms=1000))
    if kind == "held":
        told = pb.Assigned(round=7, round_uid="r", group_rank=1, group_size=3, slots=1, world_size=3)
        told.master_addr, told.master_port, told.master_offer_id = "h", 1, "o"
        state.held.CopyFrom(pb.Held(assignment=told, phase=pb.RUNNING, alive=1))
        state.held.failures.append(pb.Failure(rank=1, exit_code=1))
        state.known.CopyFrom(pb.Known(job_uid=f"j{number}", round=7, round_uid="r", group_size=3))
        state.resumed = True
    else:
        state.offer.CopyFrom(pb.Offer(offer_id="o", address="h", port=1))
    return state


def sound(kind: type[Message], method: str, run_id: str) -> Any:
    """Return a request of this kind that a daemon would look at."""
    message: Any = kind()
    fields = kind.DESCRIPTOR.fields_by_name
    if "run_id" in fields:
        message.run_id = run_id
    if "scope" in fields:
        message.scope.run_id = run_id
    if "timeout_ms" in fields:
        message.timeout_ms = 1
    return message


async def join(channel: grpc.aio.Channel, state: pb.NodeState) -> tuple[list[pb.Place], str]:
    """Say this on a stream, and go on with it; return what was answered, and why it was refused."""
    call = channel.stream_stream(
        JOIN, request_serializer=pb.NodeState.SerializeToString, response_deserializer=pb.Place.FromString
    )()
    places: list[pb.Place] = []
    refused = ""

    async def read() -> None:
        nonlocal refused
        try:
            async for place in call:
                places.append(place)  # noqa: PERF401 -- those that came count when it is cancelled
        except grpc.aio.AioRpcError as error:
            refused = f"{error.code().name}: {error.details()}"

    reader = asyncio.create_task(read())
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(state)
        for beat in range(3):
            await asyncio.wait([reader], timeout=HEARD_S / 3)
            if reader.done():
                break
            state.seq = (state.seq + 1) % 2**64
            if beat == 1 and state.HasField("held"):  # it stops, so that another round may follow
                state.held.phase, state.held.alive = pb.STOPPED, 0
                state.offer.CopyFrom(pb.Offer(offer_id="o", after_round_uid="r", address="h", port=1))
            await call.write(state)
    call.cancel()
    reader.cancel()
    with suppress(asyncio.CancelledError):
        await reader
    return places, refused


async def ask(channel: grpc.aio.Channel, service: str, method: Any, request: Any) -> None:
    """Call, and wait for an answer: any but a bug's."""
    reply = getattr(pb, method.output_type.name, None) or getattr(store, method.output_type.name)
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = make(
        f"/{service}/{method.name}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=reply.FromString,
    )(request, timeout=20)
    try:
        if method.server_streaming:
            async for _ in call:
                call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNKNOWN:
            raise AssertionError(f"{method.name}({str(request)[:300]}): {error.details()}") from error
    except asyncio.CancelledError:
        if call.code() is None:
            raise


@asynccontextmanager
async def healthy(make: Any) -> AsyncIterator[list[WireNode]]:
    """Two nodes whose round runs all the time, and whose heartbeats are answered."""
    nodes: list[WireNode] = [make("well", "a", "2"), make("well", "b", "2")]
    for node in nodes:
        await node.open()
        await node.offer(after="")
    await asyncio.gather(*(node.assigned() for node in nodes))
    round_uid = nodes[0].place.valid_round_uid

    async def live(node: WireNode) -> None:
        while True:
            await node.say()
            await asyncio.sleep(0.3)
            assert node.error is None, node.error
            assert node.place.valid_round_uid == round_uid

    async with asyncio.TaskGroup() as group:
        beats = [group.create_task(live(node)) for node in nodes]
        yield nodes
        for node in nodes:  # it is still answered, and knows nothing of what went on
            seq = node.state.seq
            await node.until(lambda place, seq=seq: place.ack_seq > seq, "that it was heard")  # type: ignore[misc]
            assert node.place.assigned.round_uid == round_uid
        for beat in beats:
            beat.cancel()


def test_no_field_of_what_a_node_says_harms_another_job(tmp_path: Path) -> None:
    cases = [
        (path, value, kind)
        for path in paths(pb.NodeState.DESCRIPTOR)
        for value in VALUES[path[-1].type]
        for kind in ("held", "offer")
        if path[0].name not in ("held", "offer") or path[0].name == kind
    ]
    draw = random.Random(1)
    for _ in range(200 * (ROUNDS - 1)):
        path, _, kind = draw.choice(cases)
        cases.append((path, draw.choice(VALUES[path[-1].type]), kind))
    told: dict[str, int] = {}
    accepted: list[str] = []

    async def hostile(channel: grpc.aio.Channel, numbered: Iterator[tuple[int, Any]]) -> None:
        for number, (path, value, kind) in numbered:
            state = sound_state(number, kind)
            put(state, path, value)
            places, refused = await join(channel, state)
            told[name(path)] = told.get(name(path), 0) + len(places)
            by_name = refused.startswith("INVALID_ARGUMENT") and path[-1].name in refused
            if value in (LONG, 2**32 - 1, 2**64 - 1) and name(path) not in FREE and not by_name:
                accepted.append(f"{name(path)} = {str(value)[:40]}: {refused}")

    async def story(endpoint: str) -> None:
        async with cast(endpoint) as make, grpc.aio.insecure_channel(endpoint) as channel, healthy(make):
            numbered = iter(list(enumerate(cases)))
            await asyncio.gather(*(hostile(channel, numbered) for _ in range(AT_ONCE)))
            methods = SERVICES["rendezvousd.v1.Rendezvous"].methods_by_name
            await ask(channel, "rendezvousd.v1.Rendezvous", methods["ListJobs"], pb.ListJobsRequest())

    with daemon(tmp_path, "--max-jobs=4096", *QUICK) as served:
        asyncio.run(story(served.endpoint))
        assert served.process.poll() is None
    assert not accepted
    assert "Traceback" not in served.text(), served.text()[-4000:]
    assert sum(told.values()) > len(cases) / 4, "the daemon has looked at few of them"


def test_no_field_of_what_anybody_asks_harms_a_job(tmp_path: Path) -> None:
    calls = [
        (service, method)
        for service, found in SERVICES.items()
        for method in found.methods
        if not method.client_streaming
    ]
    draw = random.Random(2)

    def requests() -> Iterator[tuple[str, Any, Any]]:
        for service, method in calls:
            kind = getattr(pb, method.input_type.name, None) or getattr(store, method.input_type.name)
            for path in paths(method.input_type):
                values = list(VALUES[path[-1].type])
                values += [draw.choice(values) for _ in range(ROUNDS - 1)]
                for value, run_id in itertools.product(values, ("none", "other")):
                    request = sound(kind, method.name, run_id)
                    put(request, path, value)
                    if getattr(request, "run_id", "") != "well":
                        yield service, method, request

    async def hostile(channel: grpc.aio.Channel, some: Iterator[tuple[str, Any, Any]]) -> None:
        for service, method, request in some:
            await ask(channel, service, method, request)

    async def story(endpoint: str) -> None:
        async with cast(endpoint) as make, grpc.aio.insecure_channel(endpoint) as channel, healthy(make):
            other: WireNode = make("other", "c", "1")
            await other.open()
            await other.offer(after="")
            await other.assigned()
            some = requests()
            await asyncio.gather(*(hostile(channel, some) for _ in range(AT_ONCE)))

    with daemon(tmp_path) as served:
        asyncio.run(story(served.endpoint))
        assert served.process.poll() is None
    assert "Traceback" not in served.text(), served.text()[-4000:]
