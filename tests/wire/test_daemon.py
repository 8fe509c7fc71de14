"""The daemon as a process: how it starts, what it refuses, how it stops, what a pause does to it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.daemon import daemon
from tests.wire.node import WireNode, cast


def refused(*options: str, **variables: str) -> str:
    """Run a daemon that cannot start; returns its one line."""
    done = subprocess.run(
        [sys.executable, "-m", "rendezvousd", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **variables},
        check=False,
    )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refused("--listen", f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in line
    assert "already in use" in line


def test_two_daemons_on_one_port_are_a_mistake_not_load_balancing(tmp_path: Path) -> None:
    with daemon(tmp_path) as first:
        assert "already in use" in refused("--listen", first.endpoint)
    with daemon(tmp_path, listen="[::]:0") as first:
        assert "already in use" in refused("--listen", f"[::]:{first.port}")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--listen", "192.0.2.1:29400"), "no address of this host"),
        (("--listen", "nonsense:port"), "nonsense:port"),
        (("--listen", "no.such.host.invalid:29400"), "no.such.host.invalid"),
        (("--no-such-option",), "--no-such-option"),
        (("--heartbeat", "never"), "never"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: tuple[str, ...], word: str) -> None:
    assert word in refused(*options)


def test_a_mistyped_variable_is_refused() -> None:
    assert "RENDEZVOUSD_HEARTBEET" in refused(RENDEZVOUSD_HEARTBEET="1")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_tells_its_nodes_that_it_goes_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    async def story(served_endpoint: str, stop: Callable[[], None]) -> None:
        async with cast(served_endpoint) as make:
            a = make("job", "a", "2")
            await a.open()
            await a.until(lambda p: p.HasField("waiting"))
            stop()
            error = await a.ended()
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in (error.details() or "")

    with daemon(tmp_path) as served:
        asyncio.run(story(served.endpoint, lambda: served.send(number)))
        assert served.process.wait(30) == 0
    assert "Traceback" not in served.text()


def test_it_says_one_line_when_it_serves(tmp_path: Path) -> None:
    with daemon(tmp_path) as served:
        assert served.text().strip().endswith(f"serves on {served.endpoint} (memory)")
        assert len(served.text().splitlines()) == 1


def test_a_pause_of_the_daemon_loses_nobody(tmp_path: Path) -> None:
    async def story(make: Callable[..., WireNode], pause: Callable[[], None]) -> None:
        a, b = make("job", "a", "2"), make("job", "b", "2")
        for node in (a, b):
            await node.open()
            await node.offer(after="")
        await asyncio.gather(a.assigned(), b.assigned())
        pause()
        for node in (a, b):
            seq = node.state.seq + 1
            await node.say()
            place = await node.until(lambda p, seq=seq: p.ack_seq >= seq)  # type: ignore[misc]
            assert place.assigned.round == 1

    with daemon(tmp_path) as served:

        def pause() -> None:
            served.send(signal.SIGSTOP)
            time.sleep(8)  # longer than the lease: the pause itself is what is tested
            served.send(signal.SIGCONT)

        async def scene() -> None:
            async with cast(served.endpoint) as make:
                await story(make, pause)

        asyncio.run(scene())


def test_a_hangup_is_noted_and_ends_nothing(tmp_path: Path) -> None:
    with daemon(tmp_path) as served:
        served.send(signal.SIGHUP)
        deadline = time.monotonic() + 30
        while "got SIGHUP" not in served.text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with grpc.insecure_channel(served.endpoint) as channel:
            grpc.channel_ready_future(channel).result(timeout=30)


def test_health_and_reflection_answer(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, grpc.insecure_channel(served.endpoint) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        for service in ("", "rendezvousd.v1.Rendezvous", "rendezvousd.v1.Store"):
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        info = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        replies = info(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=30)
        names = {service.name for service in next(iter(replies)).list_services_response.service}
        assert {"rendezvousd.v1.Rendezvous", "rendezvousd.v1.Store"} <= names


def test_many_jobs_do_not_disturb_each_other(tmp_path: Path) -> None:
    async def scene(endpoint: str) -> None:
        async with cast(endpoint) as make:
            pairs = [(make(f"job{i}", "a", "2"), make(f"job{i}", "b", "2")) for i in range(20)]
            for pair in pairs:
                for node in pair:
                    await node.open()
                    await node.offer(after="")
            await asyncio.gather(*(node.assigned(1) for pair in pairs for node in pair))
            victim = pairs[7][0]
            await victim.hold(pb.FAILED, 0, pb.Failure(rank=0, exit_code=1))
            await victim.until(lambda p: not p.valid_round_uid)
            for i, pair in enumerate(pairs):
                if i != 7:
                    for node in pair:
                        seq = node.state.seq + 1
                        await node.say()
                        place = await node.until(lambda p, seq=seq: p.ack_seq >= seq)  # type: ignore[misc]
                        assert place.assigned.round == 1

    with daemon(tmp_path) as served:
        asyncio.run(scene(served.endpoint))
