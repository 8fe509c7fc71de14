"""Every option of the daemon, once: flag, variable, key in the file and line of --help are made from it."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rendezvousd.core.settings import Limits, Timing

PREFIX = "RENDEZVOUSD_"
DEFAULT_PORT = 29400  # the one that torchrun's users know
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

# What rdzvrun gives to its workers: a daemon may be started from there.
WORKER_VARIABLES = frozenset(
    PREFIX + name for name in ("ENDPOINT", "RUN_ID", "JOB_UID", "ROUND", "ROUND_UID", "STORE_GENERATION")
)
# What Kubernetes gives to every pod beside a Service whose name begins with "rendezvousd".
SERVICE_VARIABLE = re.compile(
    PREFIX + r"([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_[A-Z]+(_(PROTO|PORT|ADDR))?)?)"
)

_SECONDS_MAX = (2**32 - 1) // 1000  # durations cross the wire as 32 bits of milliseconds
# Below, the pauses of a busy interpreter look like lost heartbeats.
_HEARTBEAT_MIN_S = 0.05
_LEASE_INTERVALS_MIN = 2  # with one, a single late message is a lost node
_COUNT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. IPv6 without brackets; port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """Where etcd is, and what of it is this daemon's. Files are PEM; empty: not used."""

    endpoints: tuple[str, ...] = ()  # host:port
    prefix: str = "/rendezvousd"
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""
    # A leader that dies is followed so much later, and a little; etcd's own minimum, with its usual settings.
    leader_ttl_s: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    listen: tuple[Address, ...] = (Address("::", DEFAULT_PORT),)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    backend: Literal["memory", "etcd"] = "memory"
    advertise: str = ""  # host:port at which nodes reach this daemon; empty: found out
    etcd: EtcdOptions = field(default_factory=EtcdOptions)
    ready_fd: int | None = None  # the bound addresses are written there, one a line, once the daemon serves
    timing: Timing = field(default_factory=Timing)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Option:
    """`field` is the field of Config, of `Config.timing` or of `Config.limits` that it fills (`part` says which)."""

    name: str
    field: str
    value: str  # the value's name, or unit, in the help
    help: str
    read: Callable[[str], Any]  # ValueError: what was expected
    part: Literal["", "timing", "limits", "etcd"] = ""
    repeatable: bool = False
    number: bool = False  # a number in TOML
    in_file: bool = True

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper().replace("-", "_")

    @property
    def default(self) -> Any:
        return getattr(
            {"": Config(), "timing": Timing(), "limits": Limits(), "etcd": EtcdOptions()}[self.part], self.field
        )


# ------------------------------------------------------------------------------------------------ values


def _address(text: str) -> Address:
    found = re.fullmatch(r"(\[[^\]]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?", text)
    if found is None:
        raise ValueError(f"expected HOST:PORT, as [::]:{DEFAULT_PORT} or 0.0.0.0:0")
    host, port = found[1], DEFAULT_PORT if found[2] is None else int(found[2])
    if port > 65535:
        raise ValueError("expected a port from 0 to 65535")
    try:
        if host.startswith("["):
            host = host[1:-1]
            ipaddress.IPv6Address(host)
        elif host.rpartition(".")[2].isdigit():
            ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError("expected an IPv4 address, an IPv6 address in brackets, or a host name") from None
    return Address(host, port)


def _choice(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected {', '.join(choices[:-1])} or {choices[-1]}")
        return text

    return read


def _etcd_endpoint(text: str) -> str:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})", text)
    if found is None or not 0 < int(found[2]) <= 65535:
        raise ValueError("expected HOST:PORT, without scheme, as etcd-1:2379")
    return text


def _advertise(text: str) -> str:
    address = _address(text)
    if address.port == 0 or address.host in ("::", "0.0.0.0"):
        raise ValueError("expected HOST:PORT as nodes reach it")
    return str(address)


def _prefix(text: str) -> str:
    if not re.fullmatch(r"/[A-Za-z0-9_./-]*[A-Za-z0-9_-]", text):
        raise ValueError("expected a path, as /rendezvousd")
    return text


def _text(text: str) -> str:
    return text


def _descriptor(text: str) -> int:
    descriptor = _whole(0, _COUNT_MAX)(text)
    try:
        os.fstat(descriptor)
    except OSError:
        raise ValueError("expected an open file descriptor") from None
    return descriptor


def _seconds(low: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not low <= value <= _SECONDS_MAX:
            raise ValueError(f"expected seconds from {low:g} to {_SECONDS_MAX}")
        return value

    return read


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 12 and low <= int(text) <= high):
            raise ValueError(f"expected a whole number from {low} to {high}")
        return int(text)

    return read


def _timing(name: str, field: str, help: str, low: float = 0.0) -> Option:  # noqa: A002
    return Option(name, field, "SECONDS", help, _seconds(low), part="timing", number=True)


def _times(name: str, field: str, help: str, low: int) -> Option:  # noqa: A002
    return Option(name, field, "N", help, _whole(low, _COUNT_MAX), part="timing", number=True)


def _limit(name: str, field: str, help: str, low: int, high: int, unit: str = "N") -> Option:  # noqa: A002
    return Option(name, field, unit, help, _whole(low, high), part="limits", number=True)


# ------------------------------------------------------------------------------------------------ the table

_MIB = 1 << 20

OPTIONS: tuple[Option, ...] = (
    Option("listen", "listen", "HOST:PORT", "where to serve; may be repeated; port 0: a free one", _address, "", True),
    Option(
        "log-level", "log_level", "LEVEL", "debug, info, warning or error", _choice("debug", "info", "warning", "error")
    ),
    Option("log-format", "log_format", "FORMAT", "text or json", _choice("text", "json")),
    Option("backend", "backend", "NAME", "where jobs are kept: memory or etcd", _choice("memory", "etcd")),
    Option(
        "advertise",
        "advertise",
        "HOST:PORT",
        "where nodes reach this daemon, for the others to name while it leads",
        _advertise,
    ),
    Option(
        "ready-fd",
        "ready_fd",
        "FD",
        "file descriptor that gets the bound addresses, one a line, once the daemon serves",
        _descriptor,
        number=True,
        in_file=False,
    ),
    Option(
        "etcd-endpoints",
        "endpoints",
        "HOST:PORT,...",
        "members of the etcd cluster",
        _etcd_endpoint,
        "etcd",
        repeatable=True,
    ),
    Option("etcd-prefix", "prefix", "PATH", "what this group of daemons keeps is below it", _prefix, "etcd"),
    Option("etcd-ca", "ca", "FILE", "certificate that etcd's are signed by; with it, TLS is spoken", _text, "etcd"),
    Option("etcd-cert", "cert", "FILE", "this daemon's certificate", _text, "etcd"),
    Option("etcd-key", "key", "FILE", "and its key", _text, "etcd"),
    Option("etcd-user", "user", "NAME", "who this daemon is to etcd", _text, "etcd"),
    Option("etcd-password-file", "password_file", "FILE", "file with the password of --etcd-user", _text, "etcd"),
    Option(
        "leader-ttl",
        "leader_ttl_s",
        "SECONDS",
        "after a leader's death the next one leads so much later, and a little",
        _whole(1, 3600),
        "etcd",
        number=True,
    ),
    _timing("heartbeat", "heartbeat_s", "how often a node speaks, unless nodes are very many", _HEARTBEAT_MIN_S),
    _times("lease-intervals", "lease_intervals", "heartbeats after which a silent node is lost", _LEASE_INTERVALS_MIN),
    _timing("grace", "grace_s", "for a node whose stream broke to return, and 5 round trips more"),
    _timing("settle", "settle_s", "quiet time before a first round, once min nodes are there"),
    _timing("settle-max", "settle_max_s", "... and its bound"),
    _timing("grow-after", "grow_s", "quiet time before nodes that wait are let into a running job"),
    _timing("grow-max", "grow_max_s", "... and its bound"),
    _timing("join-timeout", "join_s", "below min nodes for so long: the job has failed", 1.0),
    _timing("offer-timeout", "offer_s", "for a node that has stopped to be ready for the next round", 1.0),
    _timing("recovery", "recovery_s", "after a restart, for nodes of a running round to come back, since the last did"),
    _timing("recovery-max", "recovery_max_s", "... and its bound"),
    _timing("kill-time", "kill_s", "from killing workers to their being gone, with --on-daemon-loss=stop"),
    _timing("ended-readable", "ended_s", "for which the outcome of a job can be read"),
    _timing("calm-soon", "calm_soon_s", "growth within this time of the last one waits twice as long as that one did"),
    _timing("growth-backoff-max", "growth_backoff_max_s", "... and its bound"),
    _timing("calm-reset", "calm_reset_s", "without a break after which growth is trusted again"),
    _timing(
        "cooldown", "cooldown_s", "for which a node that cannot reach its peers, or keeps failing, sits out at first"
    ),
    _timing("cooldown-max", "cooldown_max_s", "... doubled each time up to this"),
    _timing("short-round", "short_round_s", "a round that broke sooner is short"),
    _times("short-rounds-max", "short_rounds_max", "short rounds in a row that fail a job", 1),
    _limit("max-nodes-per-job", "nodes_per_job", "nodes of one job", 1, 1 << 20),
    _limit("max-jobs", "jobs", "jobs at a time, ended ones that can be read included", 1, 1 << 20),
    # gRPC carries a length of 32 bits; a single message of more than 64 MiB would stall everybody's heartbeats.
    _limit("max-message-bytes", "message_bytes", "size of a message", 64 << 10, 64 * _MIB, "BYTES"),
    _limit("max-error-text", "error_text_bytes", "text kept of a failure; what is longer is cut", 256, _MIB, "BYTES"),
    _limit("max-failures-per-node", "failures_per_node", "failures kept of one node and round", 1, 1024),
    _limit("max-tombstones", "tombstones", "lost and removed nodes that a job remembers", 1, 1 << 20),
    _limit("max-run-id-bytes", "run_id_bytes", "length of a run id", 16, 1024, "BYTES"),
    _limit("max-name-bytes", "name_bytes", "length of a node name, role, label or submission", 16, 1024, "BYTES"),
    _limit("max-store-keys", "store_keys", "keys of one store namespace", 1, 1 << 24),
    _limit("max-store-key-bytes", "store_key_bytes", "length of a store key", 16, 64 << 10, "BYTES"),
    _limit("max-store-value-bytes", "store_value_bytes", "size of a store value", 1, 64 * _MIB, "BYTES"),
    _limit("max-store-bytes", "store_bytes", "size of one store namespace", 1, _COUNT_MAX, "BYTES"),
)
