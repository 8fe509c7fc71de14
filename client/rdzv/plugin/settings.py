"""What one node wants of its rendezvous: torch's RendezvousParameters, our keys, and what the launcher knows."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rdzv.convert import Identity
from rdzv.endpoints import Endpoint, parse_endpoints
from rdzv.rdzv_conf import (
    DEFAULT_JOIN_S,
    NAME_MAX_BYTES,
    NO_RUN_ID,
    RdzvConf,
    parse_rdzv_conf,
    scheduler_job,
    scheduler_submission,
)
from rendezvousd.v1 import rendezvous_pb2 as pb

log = logging.getLogger("rdzv.torchrun")

TORCH_RUN_ID = "none"  # torchrun's where none is given
SHUTDOWN_TIMEOUT_S = 30.0  # torch's, from SIGTERM to SIGKILL
MONITOR_INTERVAL_S = 0.1  # torch's
LAUNCH_CONFIG_TIMEOUT = 900  # what torch's LaunchConfig puts into every configuration as "timeout", unasked
# Keys of --rdzv-conf that only this plugin has: what torch's launcher does not tell its rendezvous.
SLOTS, MAX_RESTARTS, ROLE = "slots", "max_restarts", "role"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Durations in seconds."""

    endpoints: tuple[Endpoint, ...]
    identity: Identity
    conf: RdzvConf
    local_addr: str | None
    stop_grace_s: float  # from being told to stop to having killed
    join_timeout_s: float

    @property
    def slots(self) -> int:
        """Worker processes of this node, as the daemon is told."""
        return self.identity.spec.slots

    @property
    def role(self) -> str:
        return self.identity.spec.role


def settings(params: Any, config: Any | None) -> Settings:
    """Read torch's RendezvousParameters; `config`, if known, is the LaunchConfig behind them. ValueError, for people.

    A key of the configuration outranks the LaunchConfig, and that the defaults: one worker, no restart, role "default".
    """
    own, conf = _split(params.config)
    for note in conf.notes:
        log.warning("rendezvousd: --rdzv-conf: %s", note)
    if conf.daemon_loss_timeout_s is not None:
        log.warning("rendezvousd: --rdzv-conf: daemon_loss_timeout has no effect: torch's agent knows no daemon")
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        log.warning("rendezvousd: TORCH_DISABLE_SHARE_RDZV_TCP_STORE has no effect: every round has its own store")
    slots = own.get(SLOTS, getattr(config, "nproc_per_node", 1))
    max_restarts = own.get(MAX_RESTARTS, getattr(config, "max_restarts", 0))
    grace_s = _seconds(config, "shutdown_timeout", SHUTDOWN_TIMEOUT_S)
    grace_s += _seconds(config, "monitor_interval", MONITOR_INTERVAL_S)  # the agent asks us only so often
    spec = pb.Spec(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        max_restarts=_whole(MAX_RESTARTS, max_restarts, 0),
        slots=_whole(SLOTS, slots, 1),
        role=str(own.get(ROLE, getattr(config, "role", "default"))),
        topology=conf.topology,
        stop_grace_ms=round(grace_s * 1000),
        grow=pb.Grow.Value(f"GROW_{conf.grow.upper()}"),
        timeouts=pb.Timeouts(**conf.timeouts()),
    )
    return Settings(
        endpoints=_endpoints(params.endpoint),
        identity=Identity(
            run_id=_run_id(params.run_id),
            node_uid=uuid.uuid4().hex,
            node_name=conf.node_name or os.uname().nodename,
            submission=conf.submission or scheduler_submission(os.environ),
            spec=spec,
        ),
        conf=conf,
        local_addr=params.local_addr,
        stop_grace_s=grace_s,
        join_timeout_s=conf.join_s or DEFAULT_JOIN_S,
    )


def _split(config: Mapping[str, Any]) -> tuple[dict[str, Any], RdzvConf]:
    """Return the plugin's own keys, and the configuration that rdzvrun understands too."""
    given = {key: value for key, value in config.items() if value is not None}
    if given.get("timeout") == LAUNCH_CONFIG_TIMEOUT:  # a number; from a command line it would be a text
        del given["timeout"]
    own = {key: given.pop(key) for key in (SLOTS, MAX_RESTARTS, ROLE) if key in given}
    for key, value in given.items():
        if "," in str(value):
            raise ValueError(f"{key}={value}: a comma cannot be part of a value")
    try:
        return own, parse_rdzv_conf(",".join(f"{key}={value}" for key, value in given.items()))
    except ValueError as error:
        raise ValueError(f"--rdzv-conf: {error}") from None


def _endpoints(text: str) -> tuple[Endpoint, ...]:
    if not (text or "").strip():
        raise ValueError(
            "--rdzv-backend=rendezvousd needs to know where rendezvousd serves: --rdzv-endpoint=HOST[:PORT]"
        )
    try:
        return parse_endpoints(text)
    except ValueError as error:
        raise ValueError(f"--rdzv-endpoint: {error}") from None


def _run_id(text: str) -> str:
    text = scheduler_job(os.environ) if text in ("", TORCH_RUN_ID) else text
    if not text:
        raise ValueError(NO_RUN_ID)
    if len(text.encode("utf-8", "surrogatepass")) > NAME_MAX_BYTES:
        raise ValueError(f"--rdzv-id={text}: expected at most {NAME_MAX_BYTES} bytes")
    return text


def _whole(key: str, value: Any, least: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = least - 1
    if number < least:
        raise ValueError(f"--rdzv-conf: {key}={value}: expected a whole number of at least {least}")
    return number


def _seconds(config: Any | None, name: str, default: float) -> float:
    value = getattr(config, name, None)  # torch before 2.10 has no shutdown_timeout
    return default if value is None else float(value)
