"""Single values of the command line: from a text to what it means, or one line that says what was expected."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

from rdzv.arguments import Given, UsageError
from rdzv.endpoints import parse_endpoint
from rdzv.rdzv_conf import NAME_MAX_BYTES

T = TypeVar("T")

COUNT_MAX = 2**31 - 1  # counts cross the wire as 32 bits
SECONDS_MAX = (2**32 - 1) // 1000  # and durations as 32 bits of milliseconds
EXIT_CODE_MAX = 255
_STREAMS = re.compile(r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*")


class Values:
    """The texts that were given, read one by one."""

    def __init__(self, given: Mapping[str, Given]) -> None:
        self.given = given

    def take(self, dest: str, default: T, reader: Callable[[Given], T]) -> T:
        found = self.given.get(dest)
        return default if found is None else reader(found)

    def flag(self, dest: str) -> bool:
        return self.take(dest, False, as_flag)

    def text(self, dest: str) -> str:
        """The text without space around it; "" when none was given."""
        found = self.given.get(dest)
        return "" if found is None else found.text.strip()


def reading(reader: Callable[[str], T]) -> Callable[[Given], T]:
    """`reader` raises ValueError with a sentence that names the value."""

    def read_given(given: Given) -> T:
        try:
            return reader(given.text)
        except ValueError as error:
            raise UsageError(f"{given.source}: {error}") from None

    return read_given


def as_whole(low: int, high: int = COUNT_MAX) -> Callable[[Given], int]:
    def read_given(given: Given) -> int:
        text = given.text.strip()
        if not is_whole(text) or not low <= int(text) <= high:
            bounds = f"of at least {low}" if high == COUNT_MAX else f"from {low} to {high}"
            given.refuse(f"expected a whole number {bounds}")
        return int(text)

    return read_given


def is_whole(text: str) -> bool:
    # Not int() alone, which also takes "1_000", "+1" and the digits of all scripts. The length keeps it out of
    # Python's own limit on the digits of an integer.
    return text.isascii() and text.isdigit() and len(text) <= 12


def as_flag(given: Given) -> bool:
    if not is_whole(given.text.strip()):
        given.refuse("expected 1 or 0")
    return int(given.text) != 0


def as_seconds(given: Given) -> float:
    try:
        value = float(given.text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= SECONDS_MAX:
        given.refuse(f"expected seconds from 0 to {SECONDS_MAX}")
    return value


def as_choice(*choices: str) -> Callable[[Given], str]:
    def read_given(given: Given) -> str:
        if given.text not in choices:
            given.refuse(f"expected {', '.join(choices[:-1])} or {choices[-1]}")
        return given.text

    return read_given


def as_text(given: Given) -> str:
    if not given.text:
        given.refuse("expected a value")
    return given.text


def as_name(given: Given) -> str:
    """A text that crosses the wire. An empty one counts as not given."""
    try:
        size = len(given.text.encode())
    except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
        raise UsageError(f"{given.source}={given.text}: expected UTF-8") from None
    if size > NAME_MAX_BYTES:
        raise UsageError(f"{given.source}={given.text[:40]}...: {size} bytes long; expected at most {NAME_MAX_BYTES}")
    if not given.text.isprintable():
        raise UsageError(f"{given.source}={given.text}: expected printable characters only")
    return given.text


def as_address(given: Given) -> str:
    endpoint = reading(lambda text: parse_endpoint(text, default_port=0))(given)
    if endpoint.port:
        given.refuse("expected a host name or address without a port")
    return endpoint.host


def as_nnodes(given: Given) -> tuple[int, int]:
    parts = given.text.strip().split(":")
    if len(parts) > 2 or not all(is_whole(part) for part in parts):
        given.refuse("expected N or MIN:MAX, whole numbers of at least 1")
    low, high = int(parts[0]), int(parts[-1])
    if low < 1 or high > COUNT_MAX:
        given.refuse("expected N or MIN:MAX, whole numbers of at least 1")
    if low > high:
        given.refuse(f"the minimum {low} is above the maximum {high}; expected MIN:MAX")
    return low, high


def as_on_daemon_loss(given: Given) -> Literal["continue", "stop"]:
    if given.text == "stop":
        return "stop"
    if given.text != "continue":
        given.refuse("expected continue or stop")
    return "continue"


def as_console(given: Given) -> Literal["all", "rank0"]:
    if given.text == "rank0":
        return "rank0"
    if given.text != "all":
        given.refuse("expected all or rank0")
    return "all"


def as_signals(given: Given) -> tuple[str, ...]:
    names = tuple(name.strip() for name in given.text.split(",") if name.strip())
    for name in names:
        if name not in signal.Signals.__members__:
            given.refuse(f"{name} is no signal; expected names as SIGTERM,SIGUSR1")
        if name in ("SIGKILL", "SIGSTOP"):
            given.refuse(f"{name} cannot be handled")
    return names


def as_streams(given: Given) -> str:
    if not _STREAMS.fullmatch(given.text):
        given.refuse("expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:STREAMS,... as 0:3,1:1")
    return given.text


def as_ranks(given: Given) -> tuple[int, ...]:
    found = [rank.strip() for rank in given.text.split(",")]
    if not all(is_whole(rank) for rank in found):
        given.refuse("expected local ranks, as 0,1,2")
    return tuple(int(rank) for rank in found)


def as_exit_codes(given: Given) -> frozenset[int]:
    """Numbers and ranges between commas, as 2,64-78."""
    found: set[int] = set()
    for part in given.text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        last = last if dash else first
        if not is_whole(first) or not is_whole(last) or not 1 <= int(first) <= int(last) <= EXIT_CODE_MAX:
            given.refuse(f"expected exit codes from 1 to {EXIT_CODE_MAX} and ranges of them, as 2,64-78")
        found.update(range(int(first), int(last) + 1))
    return frozenset(found)


def as_modules(given: Given) -> tuple[str, ...]:
    names = tuple(name.strip() for name in given.text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            given.refuse(f"{name!r} is no module; expected names as in an import statement, separated by commas")
    return names


def as_filters(given: Given) -> tuple[str, ...]:
    """Texts between commas; a comma within one is written twice."""
    return tuple(part.replace("\0", ",") for part in given.text.replace(",,", "\0").split(","))
