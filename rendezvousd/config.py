"""The daemon's configuration. Sources, weakest first: defaults, a TOML file, RENDEZVOUSD_* variables, flags.

Every option stands once, in OPTIONS: its flag, its variable, its key in the file and its line of --help are made from
that.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from rendezvousd.core.settings import Limits, Timing

PREFIX = "RENDEZVOUSD_"
DEFAULT_PORT = 29400  # the one that torchrun's users know
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

# What rdzvrun gives to its workers: a daemon may be started from there.
WORKER_VARIABLES = frozenset(
    PREFIX + name for name in ("ENDPOINT", "RUN_ID", "JOB_UID", "ROUND", "ROUND_UID", "STORE_GENERATION")
)
# What Kubernetes gives to every pod beside a Service whose name begins with "rendezvousd".
_SERVICE_VARIABLE = re.compile(
    PREFIX + r"([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_[A-Z]+(_(PROTO|PORT|ADDR))?)?)"
)

_SECONDS_MAX = (2**32 - 1) // 1000  # durations cross the wire as 32 bits of milliseconds
# Below, the pauses of a busy interpreter look like lost heartbeats.
_HEARTBEAT_MIN_S = 0.05
_LEASE_INTERVALS_MIN = 2  # with one, a single late message is a lost node
_COUNT_MAX = 2**31 - 1


class ConfigError(Exception):
    """The configuration cannot be used. The text is one line: where, what, and what was expected."""

    def __init__(self, text: str) -> None:
        # It quotes what was given, which may hold anything, also what ends a line or is no UTF-8.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. IPv6 without brackets; port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    listen: tuple[Address, ...] = (Address("::", DEFAULT_PORT),)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    backend: Literal["memory"] = "memory"
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
    part: Literal["", "timing", "limits"] = ""
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
        return getattr({"": Config(), "timing": Timing(), "limits": Limits()}[self.part], self.field)


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


def _backend(text: str) -> str:
    if text == "etcd":
        raise ValueError("not available yet; expected memory")
    if text != "memory":
        raise ValueError("expected memory")
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
    Option("backend", "backend", "NAME", "where jobs are kept: memory", _backend),
    Option(
        "ready-fd",
        "ready_fd",
        "FD",
        "file descriptor that gets the bound addresses, one a line, once the daemon serves",
        _descriptor,
        number=True,
        in_file=False,
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
    _timing("ended-readable", "ended_s", "for which the outcome of a job can be read"),
    _timing("calm-soon", "calm_soon_s", "a round that broke so soon after growing makes the next growth wait longer"),
    _timing("calm-reset", "calm_reset_s", "without a break after which growth is trusted again"),
    _timing("cooldown", "cooldown_s", "for which a node that cannot reach its peers sits out, doubled each time"),
    _timing("cooldown-max", "cooldown_max_s", "... and its bound"),
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

_BY_NAME = {option.name: option for option in OPTIONS}


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True, slots=True)
class _Given:
    texts: tuple[str, ...]
    source: str  # "--settle", "RENDEZVOUSD_SETTLE", "file.toml: settle"


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Reads all sources (`argv` without the program's name). ConfigError; SystemExit for --help and --version."""
    flags, path = _from_flags(argv)
    variables = _from_variables(environ)
    path = path or environ.get(CONFIG_VARIABLE, "")
    given = {**(_from_file(path) if path else {}), **variables, **flags}
    values: dict[str, dict[str, Any]] = {"": {}, "timing": {}, "limits": {}}
    for name, found in given.items():
        option = _BY_NAME[name]
        values[option.part][option.field] = _read(option, found)
    config = Config(**values[""], timing=Timing(**values["timing"]), limits=Limits(**values["limits"]))
    _check(config, given)
    return config


def _read(option: Option, given: _Given) -> Any:
    found = []
    for text in given.texts:
        try:
            found.append(option.read(text))
        except ValueError as error:
            raise ConfigError(f"{given.source}={text}: {error}") from None
    return tuple(found) if option.repeatable else found[-1]


def _from_flags(argv: Sequence[str]) -> tuple[dict[str, _Given], str]:
    """What the flags say, and the file they name."""
    parsed, rest = _parser().parse_known_args(list(argv))
    if rest:
        name = rest[0].partition("=")[0]
        if not name.startswith("-"):
            raise ConfigError(f"unexpected argument {name}: the daemon takes options only; see --help")
        raise ConfigError(f"unknown option {name}{_near(name, [option.flag for option in OPTIONS])}")
    found = vars(parsed)
    path: str = found.pop("config", "")
    given = {name: _Given(tuple(texts), _BY_NAME[name].flag) for name, texts in found.items()}
    return given, path


def _from_variables(environ: Mapping[str, str]) -> dict[str, _Given]:
    names = {option.variable: option for option in OPTIONS}
    found: dict[str, _Given] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in WORKER_VARIABLES or variable == CONFIG_VARIABLE:
            continue
        option = names.get(variable)
        if option is None:
            if _SERVICE_VARIABLE.fullmatch(variable):
                continue
            raise ConfigError(f"unknown variable {variable}{_near(variable, [*names, CONFIG_VARIABLE])}")
        if text.strip():  # an empty one is how a container file leaves a variable out
            texts = text.split(",") if option.repeatable else [text]
            found[option.name] = _Given(tuple(item.strip() for item in texts), variable)
    return found


def _from_file(path: str) -> dict[str, _Given]:
    import tomllib  # most daemons are started without a file

    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from None
    found: dict[str, _Given] = {}
    for key, value in document.items():
        option = _BY_NAME.get(key)
        if option is None or not option.in_file:
            keys = [option.name for option in OPTIONS if option.in_file]
            raise ConfigError(f"{path}: unknown key {key}{_near(key, keys)}")
        found[key] = _Given(tuple(_toml_texts(path, option, value)), f"{path}: {key}")
    return found


def _toml_texts(path: str, option: Option, value: object) -> list[str]:
    items = value if option.repeatable and isinstance(value, list) else [value]
    wanted: tuple[type, ...] = (int, float) if option.number else (str,)
    for item in items:
        if not isinstance(item, wanted) or isinstance(item, bool):
            kind = "a number" if option.number else "texts in quotes" if option.repeatable else "a text in quotes"
            raise ConfigError(f"{path}: {option.name} = {item!r}: expected {kind}")
    if not items:
        raise ConfigError(f"{path}: {option.name} = []: expected at least one {option.value}")
    return [str(item) for item in items]


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]}?" if close else f": expected one of {', '.join(known)}"


# ------------------------------------------------------------------------------------------------ agreement

# (what must not be more, than what)
_ORDER = (
    ("settle", "settle-max"),
    ("grow-after", "grow-max"),
    ("cooldown", "cooldown-max"),
    ("calm-soon", "calm-reset"),
    ("max-store-value-bytes", "max-store-bytes"),
)
# Room in a message for what surrounds its largest part: names, ids, counts.
_ENVELOPE_BYTES = 32 << 10


def _check(config: Config, given: Mapping[str, _Given]) -> None:
    """Values that are right one by one and wrong together."""
    for low, high in _ORDER:
        if _value(config, low) > _value(config, high):
            raise ConfigError(
                f"{_said(config, given, low)} is more than {_said(config, given, high)}: expected at most it"
            )
    limits = config.limits
    room = limits.message_bytes - _ENVELOPE_BYTES
    if limits.store_key_bytes + limits.store_value_bytes > room:
        raise ConfigError(
            f"{_said(config, given, 'max-store-value-bytes')} does not fit, with its key, into a message "
            f"({_said(config, given, 'max-message-bytes')}): expected at most {room - limits.store_key_bytes}"
        )
    if limits.error_text_bytes * limits.failures_per_node > room:
        raise ConfigError(
            f"{_said(config, given, 'max-failures-per-node')} and {_said(config, given, 'max-error-text')}: "
            f"such texts do not fit into a message ({_said(config, given, 'max-message-bytes')}): lower one of them"
        )


def _value(config: Config, name: str) -> Any:
    option = _BY_NAME[name]
    return getattr(getattr(config, option.part) if option.part else config, option.field)


def _said(config: Config, given: Mapping[str, _Given], name: str) -> str:
    found = given.get(name)
    if found is None:
        return f"{name}={_value(config, name):g} (the default)"
    return f"{found.source}={found.texts[-1]}"


# ------------------------------------------------------------------------------------------------ argparse


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        # Reading the installed packages takes longer than all the rest here.
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("rendezvousd")
        except PackageNotFoundError:
            found = "(not installed)"
        sys.stdout.write(f"rendezvousd {found}\n")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rendezvousd",
        usage="rendezvousd [options]",
        description="Serves rendezvous to the nodes of PyTorch jobs.",
        epilog=f"Every option may stand in {PREFIX}NAME or, by its name, in the file. A flag outranks a variable, and "
        "both the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with any of these options; also {CONFIG_VARIABLE}")
    titles = {"": parser, "timing": parser.add_argument_group("timing"), "limits": parser.add_argument_group("limits")}
    for option in OPTIONS:
        default = "" if option.default is None else f" (default {_shown(option.default)})"
        help_text = f"{option.help}{default}"
        titles[option.part].add_argument(
            option.flag, dest=option.name, metavar=option.value, action="append", help=help_text
        )
    return parser


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
