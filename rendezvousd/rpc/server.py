"""The gRPC server: which services it has, and the options without which thousands of streams do not work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rendezvousd.core.settings import Limits
from rendezvousd.rpc.about import About
from rendezvousd.rpc.admin import Admin
from rendezvousd.rpc.rendezvous import RendezvousStreams
from rendezvousd.v1 import rendezvous_pb2 as pb
from rendezvousd.v1 import store_pb2

RENDEZVOUS = "rendezvousd.v1.Rendezvous"
STORE = "rendezvousd.v1.Store"
LIVENESS = "liveness"


def server_options(limits: Limits) -> list[tuple[str, int]]:
    """Return the channel arguments of the server.

    Keepalive: the server pings a quiet connection every 5 s and gives its peer 3 s; without ping_timeout a frozen peer
    is found only after a minute. Clients may ping as often as every second. max_pending_requests: past about 1,000
    streams that are not accepted yet the C core rejects at random.
    """
    pending = 2 * limits.nodes_per_job
    return [
        ("grpc.keepalive_time_ms", 5000),
        ("grpc.keepalive_timeout_ms", 3000),
        ("grpc.http2.ping_timeout_ms", 3000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ("grpc.max_concurrent_streams", pending),
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", pending),
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a second daemon on the same port is a mistake, not load balancing
    ]


def rendezvous_handler(streams: RendezvousStreams, admin: Admin, about: About) -> grpc.GenericRpcHandler:
    """Return the Rendezvous service. Join moves raw bytes, and views are sent as bytes; the rest is rare."""

    def unary(method: Callable[..., Awaitable[Any]], request: Any, reply: Any = None) -> grpc.RpcMethodHandler:
        serializer = None if reply is None else reply.SerializeToString
        return grpc.unary_unary_rpc_method_handler(method, request.FromString, serializer)

    return grpc.method_handlers_generic_handler(
        RENDEZVOUS,
        {
            "Join": grpc.stream_stream_rpc_method_handler(streams.join),
            "Leave": unary(admin.leave, pb.LeaveRequest, pb.LeaveReply),
            "Restart": unary(admin.restart, pb.RestartRequest, pb.RestartReply),
            "Close": unary(admin.close, pb.CloseRequest, pb.CloseReply),
            "GetJob": unary(admin.get_job, pb.GetJobRequest),
            "ListJobs": unary(admin.list_jobs, pb.ListJobsRequest),
            "WatchJob": grpc.unary_stream_rpc_method_handler(admin.watch_job, pb.GetJobRequest.FromString),
            "GetDaemon": unary(about.get_daemon, pb.GetDaemonRequest, pb.DaemonView),
        },
    )


class Health:
    """grpc.health.v1: SERVING while this daemon attends jobs. LIVENESS: as long as it answers at all."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def begin(self) -> None:
        """Say that this daemon lives and attends nothing yet. (The library says of '' that it serves.)"""
        await self.set(serving=False)
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)

    async def set(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", RENDEZVOUS, STORE):
            await self._servicer.set(service, status)


def add_reflection(server: grpc.aio.Server) -> None:
    """Let grpcurl and its like learn the services from the daemon."""
    assert store_pb2.DESCRIPTOR is not None  # imported so that its descriptors are in the pool
    names = (RENDEZVOUS, STORE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
