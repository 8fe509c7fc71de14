"""`--rdzv-conf key=value,...`: the knobs of one job, torchrun's and ours."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Grow = Literal["quiet", "now", "never"]

# Durations cross the wire as 32 bits of milliseconds, where 0 means "the daemon's default".
_SECONDS_MAX = (2**32 - 1) // 1000
# A week: the longest that the daemon takes.
_LONGEST_S = 7 * 24 * 3600
# Bounds that the daemon applies by default to settle and grow times. A job that asks for a longer quiet time means it.
_QUIET_BOUND_S = 30.0
# torchrun's c10d defaults, which its users leave out when they give only one of the two.
_TORCH_KEEP_ALIVE_S = 5.0
_TORCH_KEEP_ALIVE_ATTEMPTS = 3
# A lease below two heartbeats is lost with one late message.
_LEASE_HEARTBEATS_MIN = 2
# A heartbeat is a fifth of a lease, as the daemon has it.
_LEASE_HEARTBEATS = 5
# The daemon's join timeout, for as long as no daemon has been reached that could apply it. As torchrun's.
DEFAULT_JOIN_S = 600.0
NAME_MAX_BYTES = 256  # the daemon's limit on names, labels and tokens
NO_RUN_ID = "--rdzv-id is missing: the daemon serves many jobs; give this one a name, the same on all of its nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RdzvConf:
    """What one job wants to be different. Seconds; None: the daemon's default."""

    join_s: float | None = None
    settle_s: float | None = None
    settle_max_s: float | None = None
    grow: Grow = "quiet"
    grow_s: float | None = None
    grow_max_s: float | None = None
    heartbeat_s: float | None = None
    lease_s: float | None = None
    short_round_s: float | None = None
    short_rounds_max: int | None = None
    retry_max_s: float | None = None
    daemon_loss_timeout_s: float | None = None  # None: never
    submission: str | None = None
    topology: str = ""
    node_name: str | None = None
    master_port_range: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()

    def timeouts(self) -> dict[str, int]:
        """The fields of the protocol's Timeouts that were given, by name; milliseconds and counts, never 0."""
        seconds = {
            "join_ms": self.join_s,
            "settle_ms": self.settle_s,
            "settle_max_ms": self.settle_max_s,
            "grow_ms": self.grow_s,
            "grow_max_ms": self.grow_max_s,
            "heartbeat_ms": self.heartbeat_s,
            "lease_ms": self.lease_s,
            "short_round_ms": self.short_round_s,
        }
        found = {name: max(1, round(value * 1000)) for name, value in seconds.items() if value is not None}
        if self.short_rounds_max is not None:
            found["short_rounds_max"] = self.short_rounds_max
        return found


def parse_rdzv_conf(text: str) -> RdzvConf:
    """Reads `key=value,...`; empty: all defaults. ValueError: one sentence that names the key and the value."""
    values: dict[str, Any] = {}
    notes: list[str] = []
    for key, raw in _pairs(text):
        if key in _WITHOUT_EFFECT:
            notes.append(f"{key} has no effect: {_WITHOUT_EFFECT[key]}")
        elif key in _READERS:
            values[key] = _READERS[key](key, raw)
            if _READERS[key] is _seconds and values[key] > _LONGEST_S:
                values[key] = float(_LONGEST_S)
                notes.append(f"{key}={raw} is taken as {_LONGEST_S}, a week: the daemon takes nothing longer")
        else:
            raise ValueError(_unknown(key))
    conf, more = _assemble(values)
    return _check(replace(conf, notes=(*notes, *more)))


def scheduler_submission(environ: Mapping[str, str]) -> str:
    """Return the token that all nodes of one submission to a scheduler share, or "".

    It keeps live jobs of the same run id apart, and together. So it has the number of the attempt where the scheduler
    counts attempts of the whole job; numbers of a step, a task or a pod differ within one job and are not in it.
    """
    job, attempt = _scheduler(environ)
    return f"{job}+{attempt}" if job and attempt not in ("", "0") else job


def scheduler_job(environ: Mapping[str, str]) -> str:
    """Return the scheduler's job id, which is the same in all attempts, or ""."""
    return _scheduler(environ)[0]


def _scheduler(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the job id and the attempt, as far as there are any."""
    for scheduler in (_slurm, _lsf, _jobset):
        if (found := scheduler(environ))[0]:
            return found
    return next((environ[name] for name in _SCHEDULERS if environ.get(name)), ""), ""


# PBS and Torque (no count of attempts in the environment), Flux, Cobalt, OAR; TorchX names what it submitted elsewhere.
_SCHEDULERS = ("PBS_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "OAR_JOB_ID", "TORCHX_JOB_ID")


def _slurm(environ: Mapping[str, str]) -> tuple[str, str]:
    """A requeued job keeps its id. The parts of a heterogeneous job have ids of their own, and the first one's."""
    job = environ.get("SLURM_JOB_ID_HET_GROUP_0") or environ.get("SLURM_JOB_ID", "")
    return job, environ.get("SLURM_RESTART_COUNT", "")


def _lsf(environ: Mapping[str, str]) -> tuple[str, str]:
    """The tasks of an array share the job id; index 0 is no array. LSF says that a job was restarted, not how often."""
    job, index = environ.get("LSB_JOBID", ""), environ.get("LSB_JOBINDEX", "0")
    return job if not job or index == "0" else f"{job}[{index}]", environ.get("LSB_RESTART", "")


def _jobset(environ: Mapping[str, str]) -> tuple[str, str]:
    """Kubernetes' JobSet counts restarts of the whole set in an annotation; manifests pass it on under this name."""
    names = (environ.get("POD_NAMESPACE", ""), environ.get("JOBSET_NAME", ""))
    job = "/".join(name for name in names if name) if names[1] else ""
    return job, environ.get("JOBSET_RESTART_ATTEMPT", "")


def known_keys() -> tuple[str, ...]:
    """Every key that is understood, in the order in which the documentation has them."""
    return (*_READERS, *_WITHOUT_EFFECT)


def _pairs(text: str) -> list[tuple[str, str]]:
    if not text.strip():
        return []
    found: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals or not value:
            raise ValueError(f"'{item.strip()}' in '{text}' is not key=value: expected key=value,key=value,...")
        if key in found:
            raise ValueError(f"{key} is given twice, as {found[key]} and as {value}: give it once")
        found[key] = value
    return list(found.items())


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, known_keys(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(_READERS)}"
    return f"unknown key {key}: {hint}"


# ------------------------------------------------------------------------------------------------ values


def _seconds(key: str, raw: str) -> float:
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    # 0 would be sent as "the default", which is the opposite of what was meant.
    if not 0 < value < math.inf:
        raise ValueError(f"{key}={raw}: expected seconds, more than 0")
    return value


def _count(key: str, raw: str) -> int:
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 12 and 1 <= int(raw) <= 2**31 - 1):
        raise ValueError(f"{key}={raw}: expected a whole number of at least 1")
    return int(raw)


def _grow(key: str, raw: str) -> str:
    if raw not in ("quiet", "now", "never"):
        raise ValueError(f"{key}={raw}: expected quiet, now or never")
    return raw


def _text(key: str, raw: str) -> str:
    try:
        size = len(raw.encode())
    except UnicodeEncodeError:
        size = NAME_MAX_BYTES + 1
    if size > NAME_MAX_BYTES or not raw.isprintable():
        raise ValueError(f"{key}={raw}: expected at most {NAME_MAX_BYTES} bytes of printable UTF-8")
    return raw


def _port_range(key: str, raw: str) -> tuple[int, int]:
    low, dash, high = raw.partition("-")
    if dash and all(part.isascii() and part.isdigit() and len(part) <= 5 for part in (low, high)):
        first, last = int(low), int(high)
        if 1 <= first <= last <= 65535:
            return first, last
    raise ValueError(f"{key}={raw}: expected LOW-HIGH, two ports from 1 to 65535")


_READERS: dict[str, Callable[[str, str], Any]] = {
    # torchrun's
    "join_timeout": _seconds,
    "timeout": _seconds,
    "last_call_timeout": _seconds,
    "keep_alive_interval": _seconds,
    "keep_alive_max_attempt": _count,
    # ours
    "settle": _seconds,
    "settle_max": _seconds,
    "grow": _grow,
    "grow_timeout": _seconds,
    "grow_max": _seconds,
    "heartbeat": _seconds,
    "lease": _seconds,
    "short_round": _seconds,
    "short_rounds_max": _count,
    "retry_max": _seconds,
    "daemon_loss_timeout": _seconds,
    "submission": _text,
    "topology": _text,
    "node_name": _text,
    "master_port_range": _port_range,
}

# torchrun's keys for which there is nothing to set here. They are read, so that existing commands run, and explained.
_WITHOUT_EFFECT = {
    "is_host": "the daemon hosts the rendezvous, no node does",
    "store_type": "the daemon hosts the rendezvous, not a store of one node",
    "rank": "use --node-rank",
    "overlap_timeout": "torchrun does not know it either",
    "rdzv_backend": "torchrun does not read it here either: it is an option of its own",
    "rdzv_endpoint": "torchrun does not read it here either: it is an option of its own",
    "read_timeout": "calls to the daemon have no timeout of their own; a silent one is left after two heartbeats",
    "heartbeat_timeout": "a heartbeat is answered within its interval, or the next endpoint is tried",
    "close_timeout": "closing needs no agreement among the nodes",
    "etcd_prefix": "the nodes speak to the daemon, not to etcd",
    "protocol": "the nodes speak gRPC to the daemon",
    "ssl_cert": "the nodes do not speak to etcd, and TLS to the daemon is not supported yet",
    "ssl_cert_key": "the nodes do not speak to etcd, and TLS to the daemon is not supported yet",
    "ca_cert": "the nodes do not speak to etcd, and TLS to the daemon is not supported yet",
    "cert": "the nodes do not speak to etcd, and TLS to the daemon is not supported yet",
    "key": "the nodes do not speak to etcd, and TLS to the daemon is not supported yet",
    "cacert": "the nodes do not speak to etcd, and TLS to the daemon is not supported yet",
}


# ------------------------------------------------------------------------------------------------ meaning


def _assemble(values: Mapping[str, Any]) -> tuple[RdzvConf, list[str]]:
    for ours, torchs in (
        ("settle", "last_call_timeout"),
        ("heartbeat", "keep_alive_interval"),
        ("lease", "keep_alive_max_attempt"),
    ):
        if ours in values and torchs in values:
            raise ValueError(f"{ours}={values[ours]} and {torchs}={values[torchs]} say the same thing twice: give one")
    settle = values.get("settle", values.get("last_call_timeout"))
    grow = values.get("grow_timeout")
    heartbeat, lease, notes = _liveness(values)
    conf = RdzvConf(
        join_s=values.get("join_timeout", values.get("timeout")),
        settle_s=settle,
        settle_max_s=_bound(settle, values.get("settle_max")),
        grow=values.get("grow", "quiet"),
        grow_s=grow,
        grow_max_s=_bound(grow, values.get("grow_max")),
        heartbeat_s=heartbeat,
        lease_s=lease,
        short_round_s=values.get("short_round"),
        short_rounds_max=values.get("short_rounds_max"),
        retry_max_s=values.get("retry_max"),
        daemon_loss_timeout_s=values.get("daemon_loss_timeout"),
        submission=values.get("submission"),
        topology=values.get("topology", ""),
        node_name=values.get("node_name"),
        master_port_range=values.get("master_port_range"),
    )
    return conf, notes


def _bound(quiet_s: float | None, bound_s: float | None) -> float | None:
    """The bound that goes with a quiet time: the one given, else one that does not cut the quiet time short."""
    if bound_s is not None or quiet_s is None:
        return bound_s
    return max(quiet_s, _QUIET_BOUND_S)


def _liveness(values: Mapping[str, Any]) -> tuple[float | None, float | None, list[str]]:
    """Heartbeat and lease in seconds, and what there is to say about them."""
    notes: list[str] = []
    interval = values.get("keep_alive_interval")
    attempts = values.get("keep_alive_max_attempt")
    heartbeat: float | None = values.get("heartbeat", interval)
    lease: float | None = values.get("lease")
    if lease is None and (interval is not None or attempts is not None):
        count = attempts or _TORCH_KEEP_ALIVE_ATTEMPTS
        if count < _LEASE_HEARTBEATS_MIN:
            notes.append(
                f"keep_alive_max_attempt={count} is taken as {_LEASE_HEARTBEATS_MIN}: a lease of one heartbeat is lost "
                "with one late message"
            )
        # When only the attempts are given, torchrun multiplies them by its default interval, whatever ours is.
        lease = (interval or heartbeat or _TORCH_KEEP_ALIVE_S) * max(count, _LEASE_HEARTBEATS_MIN)
    if lease is not None and heartbeat is None and lease < _LEASE_HEARTBEATS:
        heartbeat = lease / _LEASE_HEARTBEATS  # the default of 1 s would not fit into it
    return heartbeat, lease, notes


def _check(conf: RdzvConf) -> RdzvConf:
    if conf.settle_s is not None and conf.settle_max_s is not None and conf.settle_s > conf.settle_max_s:
        raise ValueError(f"settle_max={conf.settle_max_s:g} is below the settle time of {conf.settle_s:g} s: raise it")
    if conf.grow_s is not None and conf.grow_max_s is not None and conf.grow_s > conf.grow_max_s:
        raise ValueError(f"grow_max={conf.grow_max_s:g} is below grow_timeout={conf.grow_s:g}: raise it")
    if conf.lease_s is not None:
        shortest = _LEASE_HEARTBEATS_MIN * (conf.heartbeat_s or 1.0)
        if conf.lease_s < shortest:
            raise ValueError(f"lease={conf.lease_s:g} is below two heartbeats: expected at least {shortest:g}")
        if conf.lease_s > _SECONDS_MAX:
            raise ValueError(f"a lease of {conf.lease_s:g} s is too long: expected at most {_SECONDS_MAX} s")
    return conf
