"""The command line of rdzvrun, option by option, and where the training script begins in it. Texts only: what they mean
is options.py's business."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn


class UsageError(Exception):
    """The command line cannot be understood or obeyed. The text is one line: what, why, and what to do."""

    def __init__(self, text: str) -> None:
        # It quotes what was given, which may hold anything, also what ends a line or is no UTF-8.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


@dataclass(frozen=True, slots=True)
class Argument:
    """One option. `value` names its value in the help; None: a flag. `variable`: PET_NAME is its default. `ours`:
    torchrun has no such option."""

    name: str
    value: str | None
    help: str
    short: str | None = None
    variable: bool = True
    ours: bool = False

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def environment(self) -> str:
        return f"PET_{self.dest.upper()}"

    @property
    def spellings(self) -> tuple[str, ...]:
        return (f"--{self.name}",) if "-" not in self.name else (f"--{self.name}", f"--{self.dest}")


GROUPS: dict[str, tuple[Argument, ...]] = {
    "the job": (
        Argument("nnodes", "N|MIN:MAX", "nodes of the job, or the range within which it runs; default 1"),
        Argument(
            "nproc-per-node",
            "N|auto|cpu|gpu|xpu",
            "workers on this node; auto: one for each accelerator, else for each CPU; default 1",
        ),
        Argument("max-restarts", "N", "failures of workers that the job survives, over all nodes; default 0"),
        Argument("role", "NAME", "role of this node's workers; default 'default'"),
        Argument("node-rank", "N", "the place that this node would like in a first round"),
    ),
    "the rendezvous": (
        Argument("rdzv-endpoint", "HOST[:PORT],...", "where rendezvousd serves; port 29400 if none is given"),
        Argument("rdzv-id", "ID", "name of the job; default: the scheduler's job id, or a random one when standalone"),
        Argument("rdzv-conf", "KEY=VALUE,...", "knobs of the job: join_timeout, last_call_timeout, grow, ..."),
        Argument("rdzv-backend", "NAME", "accepted for torchrun's sake: it is always rendezvousd"),
        Argument(
            "standalone", None, "one node and no daemon to start; also when no endpoint is given and --nnodes is 1"
        ),
        Argument("master-addr", "HOST", "the daemon's host when no --rdzv-endpoint is given"),
        Argument("master-port", "PORT", "the daemon's port when no --rdzv-endpoint is given; default 29400"),
        Argument("local-addr", "HOST", "address at which the other nodes reach this one; default: found out"),
        Argument(
            "on-daemon-loss", "continue|stop", "what workers do while no daemon is heard; default continue", ours=True
        ),
    ),
    "the workers": (
        Argument("module", None, "run a module, as python -m", short="-m"),
        Argument("no-python", None, "run the script itself, without python before it"),
        Argument("run-path", None, "run the script file in python whatever --no-python says"),
        Argument(
            "no-retry-exit-codes",
            "CODE,FIRST-LAST,...",
            "a worker that ends with one of these ends the job at once",
            ours=True,
        ),
        Argument("shutdown-timeout", "SECONDS", "from telling workers to stop to killing them; default 30"),
        Argument(
            "start-method",
            "zygote|exec",
            "zygote: workers are forked from a process that has imported torch, so that they start in no time; "
            "exec: each is a new python; default zygote",
        ),
        Argument("preload", "MODULE,...", "what the zygote imports besides torch", ours=True),
        Argument(
            "preload-later",
            "MODULE,...",
            "what it imports while the first round runs, for the workers of later ones; "
            "default torch._dynamo; '': nothing",
            ours=True,
        ),
        Argument(
            "isolate", "pid", "run all workers in a PID namespace: nothing outlives them, whatever is killed", ours=True
        ),
        Argument("virtual-local-rank", None, "every worker sees its own GPU as device 0, and LOCAL_RANK 0"),
        Argument(
            "numa-binding",
            "node|socket|exclusive|core-complex",
            "accepted for torchrun's sake: workers may run on all CPUs",
            variable=False,
        ),
        Argument(
            "signals-to-handle",
            "NAME,...",
            "signals that stop this node besides TERM, INT, HUP, QUIT; USR1, USR2 are passed on",
        ),
        Argument("monitor-interval", "SECONDS", "accepted for torchrun's sake: ends are noticed at once"),
        Argument(
            "chaos",
            "KIND=TIME,...",
            "strike this node on purpose, at random, so often on average: kill-worker, stop-worker, kill-node",
            ours=True,
        ),
    ),
    "logs": (
        Argument(
            "console",
            "all|rank0",
            "whose output is shown; rank0: its own, and the stderr of all; default all",
            ours=True,
        ),
        Argument("log-dir", "DIR", "directory for the workers' log files"),
        Argument("redirects", "STREAMS", "streams that go to files: 0 to 3, or RANK:STREAMS,...", short="-r"),
        Argument("tee", "STREAMS", "streams that go to files and to the console", short="-t"),
        Argument("local-ranks-filter", "RANK,...", "local ranks whose output is shown; default: all"),
        Argument("duplicate-stdout-filters", "TEXT,...", "copy lines of a teed stdout that contain a text to a file"),
        Argument("duplicate-stderr-filters", "TEXT,...", "copy lines of a teed stderr that contain a text to a file"),
        Argument("event-log-handler", "NAME", "accepted for torchrun's sake: no events are recorded"),
        Argument("logs-specs", "NAME", "accepted for torchrun's sake: plug-ins for logs are not used", variable=False),
    ),
}

ARGUMENTS: dict[str, Argument] = {argument.dest: argument for group in GROUPS.values() for argument in group}

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


@dataclass(frozen=True, slots=True)
class Given:
    """One text that was given, and where: "--nnodes" or "PET_NNODES"."""

    text: str
    source: str

    def refuse(self, why: str) -> NoReturn:
        raise UsageError(f"{self.source}={self.text}: {why}")


@dataclass(frozen=True, slots=True)
class CommandLine:
    given: Mapping[str, Given]  # by dest; a flag has the text "1" or "0"
    script: str
    script_args: tuple[str, ...]


def read(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Separates options, script and the script's own arguments. UsageError; SystemExit for --help and --version."""
    head, script, tail = _split(argv)
    parsed = vars(_parser().parse_args(head))
    if script is None:
        raise UsageError("no training script is given: expected rdzvrun [options] script.py [arguments of the script]")
    given = {dest: Given(text, f"--{ARGUMENTS[dest].name}") for dest, text in parsed.items()}
    for dest, argument in ARGUMENTS.items():
        text = environ.get(argument.environment, "") if argument.variable else ""
        if text and dest not in given:
            given[dest] = Given(text, argument.environment)
    return CommandLine(given, script, tuple(tail))


def _split(argv: Sequence[str]) -> tuple[list[str], str | None, Sequence[str]]:
    """The options, the script, and what follows it. Whatever stands behind the script is the script's."""
    head: list[str] = []
    at = 0
    while at < len(argv):
        token = argv[at]
        if token == "--":
            rest = argv[at + 1 :]
            return head, rest[0] if rest else None, rest[1:]
        if not token.startswith("-") or token == "-":
            return head, token, argv[at + 1 :]
        token = _spelled_out(token)
        head.append(token)
        at += 1
        if _wants_next(token):
            if at == len(argv) or _looks_like_option(argv[at]):
                raise UsageError(f"{token} expects a value: {token} {_find(token).value}")
            head.append(argv[at])
            at += 1
    return head, None, ()


def _spelled_out(token: str) -> str:
    """Return the option with its whole name. torchrun takes any beginning that is one of its own options alone, and
    public scripts use that; so it means that option here, too, whichever of ours begin alike. Raises UsageError."""
    name, equals, value = token.partition("=")
    options = ARGUMENTS.values()
    if not name.startswith("--") or name == "--help" or any(name in option.spellings for option in options):
        return token
    found = [o for o in options if not o.ours and any(spelling.startswith(name) for spelling in o.spellings)]
    if len(found) > 1:
        raise UsageError(f"{name} may be {' or '.join(f'--{option.name}' for option in found)}: write it out")
    return f"--{found[0].name}{equals}{value}" if found else token


def _wants_next(token: str) -> bool:
    """Whether the value of the option `token` is the next token."""
    if token in ("-h", "--help", "--version"):
        return False
    has_value = "=" in token if token.startswith("--") else len(token) > 2
    return _find(token).value is not None and not has_value


def _find(token: str) -> Argument:
    name = token.partition("=")[0] if token.startswith("--") else token[:2]
    for argument in ARGUMENTS.values():
        if name in argument.spellings or name == argument.short:
            if argument.value is None and name != token:
                raise UsageError(f"{token}: {name} takes no value")
            return argument
    raise UsageError(_unknown(token))


def _unknown(token: str) -> str:
    name = token.partition("=")[0]
    close = difflib.get_close_matches(name.strip("-").replace("_", "-"), [a.name for a in ARGUMENTS.values()], n=1)
    if close:
        return f"unknown option {name}: did you mean --{close[0]}?"
    return f"unknown option {name}: see --help; options of the training script go behind the script"


def _looks_like_option(token: str) -> bool:
    return token.startswith("-") and token != "-" and " " not in token and not _NEGATIVE_NUMBER.fullmatch(token)


# ------------------------------------------------------------------------------------------------ argparse


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        # Imported here because it reads the installed packages, which only --version needs.
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("rendezvousd")
        except PackageNotFoundError:
            found = "(not installed)"
        sys.stdout.write(f"rdzvrun {found}\n")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rdzvrun",
        usage="rdzvrun [options] script.py [arguments of the script]",
        description="Runs a PyTorch script on this node as a part of a job, and keeps it running.",
        epilog="Every option may be spelled with underscores, and has its default in PET_NAME, as torchrun's.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    for title, arguments in GROUPS.items():
        group = parser.add_argument_group(title)
        for argument in arguments:
            flags = [argument.short] if argument.short else []
            flags.append(f"--{argument.name}")
            if argument.value is None:
                group.add_argument(*flags, dest=argument.dest, action="store_const", const="1", help=argument.help)
            else:
                group.add_argument(*flags, dest=argument.dest, metavar=argument.value, help=argument.help)
            for spelling in argument.spellings[1:]:
                _add_silent(group, spelling, argument)
    return parser


def _add_silent(group: argparse._ArgumentGroup, spelling: str, argument: Argument) -> None:
    """The second spelling, left out of the help: a list in which everything stands twice is not read."""
    if argument.value is None:
        group.add_argument(spelling, dest=argument.dest, action="store_const", const="1", help=argparse.SUPPRESS)
    else:
        group.add_argument(spelling, dest=argument.dest, help=argparse.SUPPRESS)
