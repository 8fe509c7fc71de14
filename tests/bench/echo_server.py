"""A bare bidirectional stream that gives back what it gets: what gRPC in Python costs when nobody thinks.

python -m tests.bench.echo_server PORT
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import grpc
import uvloop

PENDING_MAX = 200_000  # streams not yet accepted; past its own small default the C core turns them away at random


class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Every method of every service is the same echo."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """No serialisers: bytes in, bytes out."""
        return grpc.stream_stream_rpc_method_handler(_echo)


async def _echo(_requests: Any, context: Any) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


async def serve(port: int) -> None:
    """Until killed."""
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.server.max_pending_requests", PENDING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX),
    ]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((Echo(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    gc.set_threshold(50_000, 20, 100)  # as the daemon does: the comparison is about work, not about garbage
    gc.freeze()
    uvloop.run(serve(int(sys.argv[1])))
