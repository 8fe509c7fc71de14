"""The daemon's configuration. Sources, weakest first: defaults, a TOML file, RENDEZVOUSD_* variables, flags."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rendezvousd.core.liveness import LEASE_MAX_S
from rendezvousd.core.settings import Limits, Timing
from rendezvousd.options import (
    CONFIG_VARIABLE,
    OPTIONS,
    PREFIX,
    SERVICE_VARIABLE,
    WORKER_VARIABLES,
    Address,
    Config,
    EtcdOptions,
    Option,
)

__all__ = ["OPTIONS", "Address", "Config", "ConfigError", "EtcdOptions", "load"]


class ConfigError(Exception):
    """The configuration cannot be used. The text is one line: where, what, and what was expected."""

    def __init__(self, text: str) -> None:
        # It quotes what was given, which may hold anything, also what ends a line or is no UTF-8.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


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
    values: dict[str, dict[str, Any]] = {"": {}, "timing": {}, "limits": {}, "etcd": {}}
    for name, found in given.items():
        option = _BY_NAME[name]
        values[option.part][option.field] = _read(option, found)
    config = Config(
        **values[""],
        timing=Timing(**values["timing"]),
        limits=Limits(**values["limits"]),
        etcd=EtcdOptions(**values["etcd"]),
    )
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
    given = {name: _Given(tuple(_items(_BY_NAME[name], texts)), _BY_NAME[name].flag) for name, texts in found.items()}
    return given, path


def _items(option: Option, texts: Sequence[str]) -> list[str]:
    """Return the texts, those of a repeatable option also where they are separated by commas."""
    if not option.repeatable:
        return list(texts)
    return [item.strip() for text in texts for item in text.split(",")]


def _from_variables(environ: Mapping[str, str]) -> dict[str, _Given]:
    names = {option.variable: option for option in OPTIONS}
    found: dict[str, _Given] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in WORKER_VARIABLES or variable == CONFIG_VARIABLE:
            continue
        option = names.get(variable)
        if option is None:
            if SERVICE_VARIABLE.fullmatch(variable):
                continue
            raise ConfigError(f"unknown variable {variable}{_near(variable, [*names, CONFIG_VARIABLE])}")
        if text.strip():  # an empty one is how a container file leaves a variable out
            found[option.name] = _Given(tuple(_items(option, [text])), variable)
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
    ("recovery", "recovery-max"),
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
    _check_etcd(config, given)
    if config.timing.lease_s > LEASE_MAX_S:
        raise ConfigError(
            f"{_said(config, given, 'heartbeat')} and {_said(config, given, 'lease-intervals')}: a node that is silent "
            f"would be lost after {config.timing.lease_s:g} s: expected at most a week, {LEASE_MAX_S:g} s, together"
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


def _check_etcd(config: Config, given: Mapping[str, _Given]) -> None:
    etcd = config.etcd
    if config.backend == "etcd" and not etcd.endpoints:
        raise ConfigError("--backend=etcd needs to know where etcd is: give --etcd-endpoints=HOST:PORT,...")
    if config.backend != "etcd" and etcd != EtcdOptions():
        said = next(_said(config, given, name) for name in given if _BY_NAME[name].part == "etcd")
        raise ConfigError(f"{said} means something only with --backend=etcd")
    if bool(etcd.cert) != bool(etcd.key):
        raise ConfigError("--etcd-cert and --etcd-key go together: give both or none")
    if bool(etcd.user) != bool(etcd.password_file):
        raise ConfigError("--etcd-user and --etcd-password-file go together: give both or none")
    for name, path in (("ca", etcd.ca), ("cert", etcd.cert), ("key", etcd.key), ("password-file", etcd.password_file)):
        if path and not os.access(path, os.R_OK):
            raise ConfigError(f"--etcd-{name}={path}: no such file, or it cannot be read")


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
    titles = {
        "": parser,
        "timing": parser.add_argument_group("timing"),
        "limits": parser.add_argument_group("limits"),
        "etcd": parser.add_argument_group("etcd"),
    }
    for option in OPTIONS:
        default = "" if option.default in (None, "", ()) else f" (default {_shown(option.default)})"
        help_text = f"{option.help}{default}"
        titles[option.part].add_argument(
            option.flag, dest=option.name, metavar=option.value, action="append", help=help_text
        )
    return parser


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
