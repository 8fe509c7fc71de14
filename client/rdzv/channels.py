"""gRPC channels to a daemon: where to, and how they are to behave."""

from __future__ import annotations

import json

from rdzv.address import addresses
from rdzv.endpoints import Endpoint, grpc_target

Options = tuple[tuple[str, int | str], ...]

CONNECT_S = 3.0  # for a connection; a host that is up answers in a round trip

OPTIONS: Options = (
    ("grpc.enable_http_proxy", 0),  # a proxy for the web is not for a cluster's own network
    ("grpc.use_local_subchannel_pool", 1),  # connections of one's own, closed when closed, without another's back-off
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", round(CONNECT_S * 1000)),  # gRPC's name for the time a connect may take
    ("grpc.keepalive_time_ms", 5000),  # a dead host is noticed in a few seconds; a dead daemon by its silence
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),  # without it a frozen peer is found after a minute only
    ("grpc.http2.max_pings_without_data", 0),
)

# Of several addresses, to the one whose daemon leads: gRPC connects to all of them, watches their health, and follows
# the lead within milliseconds.
_FOLLOW_THE_LEAD = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "rendezvousd.v1.Rendezvous"},
}


def target(endpoint: Endpoint) -> tuple[str, Options]:
    """Return the gRPC target for an endpoint, and the channel options it needs. Looks its name up, which may block."""
    if len(addresses(endpoint)) == 1:
        return grpc_target(endpoint), OPTIONS
    return grpc_target(endpoint), (*OPTIONS, ("grpc.service_config", json.dumps(_FOLLOW_THE_LEAD)))
