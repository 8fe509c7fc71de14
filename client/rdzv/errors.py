"""What a failed worker leaves behind: its error file, its exit, and what they tell about whose fault it was."""

from __future__ import annotations

import json
import os
import re
import signal as signals
import stat
from dataclasses import dataclass
from typing import Any

# A worker may write anything of any size. So much is read: whole reports of this size are parsed, of bigger files the
# two ends are searched for the fields.
READ_BYTES_MAX = 1 << 20
# What is passed on travels in every NodeState of the node until it is settled.
MESSAGE_BYTES_MAX = 1 << 10
TRACEBACK_BYTES_MAX = 4 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """What a worker said of its own end. Both texts are bounded, valid UTF-8, and without NUL."""

    message: str
    traceback: str  # empty: the worker gave none
    timestamp: int  # the worker's clock, seconds since the epoch; 0: the worker gave none


def read_error_file(path: str | os.PathLike[str]) -> ErrorReport | None:
    """The report that torch's `@record` (or a handler like it) wrote to TORCHELASTIC_ERROR_FILE. A truncated, oversized
    or foreign file gives what can be made of it. None: there is no such regular file, or nothing in it."""
    try:
        text = _read_ends(path)
    except OSError:
        return None
    if not text.strip():
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return _salvage(text)
    return _report(data, text)


def _read_ends(path: str | os.PathLike[str]) -> str:
    """The file's text; of a big one the beginning and the end. Raises OSError, also when it is no regular file."""
    # A worker could have put a FIFO there: opening must not wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        if status.st_size <= READ_BYTES_MAX:
            return file.read(READ_BYTES_MAX).decode("utf-8", "backslashreplace")
        head = file.read(READ_BYTES_MAX // 2)
        file.seek(status.st_size - READ_BYTES_MAX // 2)
        tail = file.read(READ_BYTES_MAX // 2)
    cut_bytes = status.st_size - READ_BYTES_MAX
    # Text, not JSON, and so never taken for a whole report.
    return (head + f"\n[{cut_bytes} bytes cut]\n".encode() + tail).decode("utf-8", "backslashreplace")


def _report(data: Any, text: str) -> ErrorReport:
    """`@record` writes {"message": {"message": ..., "extraInfo": {"py_callstack": ..., "timestamp": "..."}}}; older
    handlers write {"message": "...", "timestamp": ...}. Anything else is shown as it stands."""
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, str):
        return _bounded(message, "", data.get("timestamp"))
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        extra = extra if isinstance(extra, dict) else {}
        stack = extra.get("py_callstack")
        shown = message.get("message")
        return _bounded(
            shown if isinstance(shown, str) else text,
            stack if isinstance(stack, str) else "",
            extra.get("timestamp"),
        )
    return _bounded(text, "", None)


def _salvage(text: str) -> ErrorReport:
    """What can be made of a file that is not, or no longer, JSON."""
    message = _string_field(text, "message")
    stack = _string_field(text, "py_callstack")
    stamp = re.search(r'"timestamp":\s*"?(\d{1,12})', text)
    if message is None and stack is None:
        return _bounded(text, "", None)
    return _bounded(message or "", stack or "", stamp and stamp[1])


def _string_field(text: str, name: str) -> str | None:
    """The value of a JSON string field, as far as it goes."""
    found = re.search(rf'"{name}":\s*"((?:[^"\\]|\\.)*)', text, re.DOTALL)
    if found is None:
        return None
    try:
        return str(json.loads(f'"{found[1]}"', strict=False))
    except ValueError:  # cut within an escape: show it as it is written
        return found[1]


def _bounded(message: str, traceback: str, timestamp: object) -> ErrorReport:
    try:
        seconds = int(timestamp)  # type: ignore[call-overload]  # whatever the file holds
    except (TypeError, ValueError, OverflowError):
        seconds = 0
    return ErrorReport(
        message=cut(message.strip(), MESSAGE_BYTES_MAX),
        traceback=cut(traceback.strip(), TRACEBACK_BYTES_MAX),
        timestamp=max(0, seconds),
    )


def cut(text: str, bytes_max: int) -> str:
    """`text` as clean UTF-8 of about `bytes_max` bytes: of a longer one a third from its beginning and, because the
    end of a traceback says most, two thirds from its end, with a note of how much is missing between them."""
    data = text.replace("\0", "\\0").encode("utf-8", "backslashreplace")
    if len(data) <= bytes_max:
        return data.decode()
    head = data[: bytes_max // 3].decode("utf-8", "ignore")
    tail = data[len(data) - (bytes_max - bytes_max // 3) :].decode("utf-8", "ignore")
    return f"{head}\n... [{len(data) - bytes_max} bytes cut] ...\n{tail}"


_LAST_LINES = 30  # of a worker that left no report; a traceback in its last words is taken whole
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


def last_words(tail: bytes) -> str:
    """The end of what a worker wrote to stderr, for people: its last traceback and what follows, else its last lines.
    Bounded as a report's traceback, without colours, and with progress bars as they were last seen."""
    text = _ESCAPE.sub("", tail.decode("utf-8", "backslashreplace"))
    lines = [_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in text.strip().split("\n")]
    starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    start = max(0, len(lines) - _LAST_LINES)
    if starts:
        start = starts.pop()
        while starts and any(word in line for line in lines[max(0, start - 3) : start] for word in _CHAINED):
            start = starts.pop()
    return cut("\n".join(line.rstrip() for line in lines[start:]).strip(), TRACEBACK_BYTES_MAX)


def describe_exit(exit_code: int, signal: int) -> str:
    """How a process ended, for people: "exit code 3", "signal 9 (SIGKILL)". `signal` 0: by itself."""
    if not signal:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal} ({signals.Signals(signal).name})"
    except ValueError:  # a real-time signal between the first and the last
        return f"signal {signal}"


# A worker whose peer dies fails too, in a collective or at the store, and often sooner than the peer's own end is
# known. These texts mark such a victim, by where they come from. They only order causes: a victim is blamed last.
_VICTIM = re.compile(
    "|".join(
        (
            # gloo
            r"Connection closed by peer \[",
            r"Application timeout caused pair closure",
            r"Timed out waiting \d+ms for (?:recv|send) operation",
            r"Gloo connectFullMesh failed",
            # NCCL, through ProcessGroupNCCL
            r"remote process exited or there was a network error",
            r"ncclRemoteError",
            r"Connection closed by remote peer",
            r"NCCL communicator (?:was aborted|encountered error)",
            # the watchdog, and what it does to the others
            r"Watchdog caught collective operation timeout",
            r"collective operation timeout: WorkNCCL",
            r"Some NCCL operations have failed or timed out",
            r"due to (?:a )?collective timeout or exception",
            r"exception/timeout from (?:local )?rank",
            r"dump signal (?:due to|from)",
            r"ProcessGroupNCCL's watchdog",
            r"HeartbeatMonitor",
            # monitored_barrier
            r"failed to pass monitoredBarrier",
            # TCPStore
            r"Failed to recv, got 0 bytes",
            r"Did the remote server shutdown or crash",
            r"DistNetworkError",
            r"DistStoreError",
        )
    ),
    re.IGNORECASE,
)
# The operating system's words for the same. A data loader that talks to a server fails with them as well, so they
# count only where torch.distributed or a transport of its is named too.
_BROKEN = re.compile(r"Connection (?:closed by peer|reset|refused)|Broken pipe|Socket Timeout", re.IGNORECASE)
_DISTRIBUTED = re.compile(r"gloo|nccl|c10d|ProcessGroup|TCPStore|torch[./]distributed|DistBackendError", re.IGNORECASE)


def looks_like_victim(text: str) -> bool:
    """Whether a worker's message or traceback reads like that of a collective broken by somebody else's end."""
    if _VICTIM.search(text):
        return True
    return bool(_BROKEN.search(text) and _DISTRIBUTED.search(text))
