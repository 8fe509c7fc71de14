"""What becomes of the output of a node's workers: who is shown, who is logged, and by which way.

    shown    logged   stdout                               stderr
    yes      no       the launcher's own, if this worker   a pipe to the relay (a pseudo-terminal, if the
                      speaks alone; else as stderr         launcher's own is a terminal)
    yes      yes      the log file, followed by the relay  the same
    no       yes      the log file                         the same
    no       no       /dev/null                            a pipe to the relay, which only keeps its end

The end of stderr is kept in every case: of a worker that dies without a word to anybody it is all there is. A worker
that speaks alone and whose stdout and stderr are the same file (a terminal, 2>&1) writes both through one pipe, so that
their order stays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

from rdzv.logs import ERR, NAMES, OUT, LogDir, append_to, last_bytes, streams_of
from rdzv.model import Assignment
from rdzv.options import Options
from rdzv.outlet import Outlet
from rdzv.relay import TAIL_BYTES, Copy, Relay, Stream, channel, copy_size

PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

Key = tuple[int, int]  # local rank, OUT or ERR


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one stream of one worker."""

    shown: bool
    logged: bool


def fates(options: Options, first_rank: int) -> dict[Key, Fate]:
    """Return what becomes of each stream of a node whose first worker has this rank."""
    slots = options.nproc_per_node
    redirects, tees = streams_of(options.redirects, slots), streams_of(options.tee, slots)
    if options.log_dir == os.devnull:  # torchrun's word for no files at all
        redirects = tees = (0,) * slots
    found = {}
    for local_rank in range(slots):
        wanted = not options.local_ranks_filter or local_rank in options.local_ranks_filter
        for stream in (OUT, ERR):
            quiet = options.console == "rank0" and stream == OUT and first_rank + local_rank > 0
            tee, redirect = bool(tees[local_rank] & stream), bool(redirects[local_rank] & stream)
            shown = wanted and not quiet and (tee or not redirect)
            found[local_rank, stream] = Fate(shown=shown, logged=tee or redirect)
    return found


@dataclass(slots=True)
class _Files:
    """What has to be made on disk before a round: blocking."""

    error_files: list[str]
    logs: dict[Key, str]
    copies: dict[int, Copy]  # by stream


class Stdio:
    """The output of one node's workers, round after round. All calls belong to one event loop, unless they block."""

    def __init__(self, options: Options, environ: Mapping[str, str], stderr: Outlet) -> None:
        """`stderr`: what writes to descriptor 2."""
        self._options = options
        self._host = options.node_name
        self._template = environ.get(PREFIX_TEMPLATE) or None
        self._merged = _same(1, 2)
        self._outlets = {OUT: stderr if self._merged else Outlet(1, options.node_name), ERR: stderr}
        self._relay = Relay()
        self._streams: dict[Key, Stream] = {}  # of this round
        self._logs: dict[Key, str] = {}
        self._copies: dict[int, Copy] = {}
        self._handed: list[int] = []  # the workers' ends
        logging = any(fate.logged for fate in fates(options, 0).values())
        wanted = options.log_dir not in (None, os.devnull) or logging
        self.log_dir = LogDir(options.log_dir, options.run_id) if wanted else None

    # ------------------------------------------------------------------------------------------------ a round begins

    def prepare(self, seat: Assignment, scratch: str) -> _Files:
        """Make the directories and files of a round. Without log files, error files lie in `scratch`. Blocks. Raises
        OSError."""
        plan = fates(self._options, seat.first_rank)
        attempt = seat.round - 1
        errors, logs = [], {}
        for local_rank in range(seat.slots):
            if self.log_dir is not None:
                directory = self.log_dir.worker(attempt, local_rank)
            else:
                directory = os.path.join(scratch, str(seat.round), str(local_rank))
                os.makedirs(directory, exist_ok=True)
            errors.append(os.path.join(directory, "error.json"))
            for stream, name in NAMES.items():
                if plan[local_rank, stream].logged:
                    logs[local_rank, stream] = os.path.join(directory, f"{name}.log")
                    os.close(append_to(logs[local_rank, stream]))
        return _Files(errors, logs, self._make_copies(attempt))

    def open(self, seat: Assignment, files: _Files) -> list[tuple[int, int]]:
        """Return stdout and stderr for each worker. To be kept open until `handed_over`. Raises OSError."""
        plan = fates(self._options, seat.first_rank)
        self._logs, self._copies, self._streams = files.logs, files.copies, {}
        speakers = {local_rank for (local_rank, _), fate in plan.items() if fate.shown}
        alone = len(speakers) <= 1 and self._template is None
        handed = []
        for local_rank in range(seat.slots):
            prefix = None if alone else self._prefix(seat, local_rank)
            out, err = plan[local_rank, OUT], plan[local_rank, ERR]
            theirs = self._one(local_rank, ERR, err, prefix)
            direct = alone and out == Fate(shown=True, logged=False)
            if direct and self._merged and err == out:
                handed.append((theirs, theirs))
            else:
                handed.append((1 if direct else self._one(local_rank, OUT, out, prefix), theirs))
        return handed

    def handed_over(self) -> None:
        """The workers have their ends, or will never need them: the streams end when the workers do. Idempotent."""
        handed, self._handed = self._handed, []
        for fd in handed:
            os.close(fd)

    # ------------------------------------------------------------------------------------------------ and ends

    async def caught_up(self, local_rank: int) -> None:
        """Returns when all that this worker has written is on its way to the console."""
        await self._relay.drain(s for (rank, _), s in self._streams.items() if rank == local_rank)

    def last_bytes(self, local_rank: int) -> bytes:
        """Return the end of what a worker wrote to stderr, as far as `caught_up` made sure of it. Blocks."""
        stream, path = self._streams.get((local_rank, ERR)), self._logs.get((local_rank, ERR))
        if stream is not None:
            return stream.tail
        return last_bytes(path, TAIL_BYTES) if path else b""

    async def finish(self) -> None:
        """The round is over, and nobody writes any more: show what is left."""
        self.handed_over()
        streams, self._streams = self._streams, {}
        await self._relay.finish(streams.values())
        copies, self._copies = self._copies, {}
        for copy in copies.values():
            copy.close()

    async def close(self) -> None:
        """After the last round; returns when stdout has been written, or nobody reads it."""
        await self.finish()
        await self._relay.close()
        if not self._merged:
            self._outlets[OUT].close()

    # ------------------------------------------------------------------------------------------------ one stream

    def _one(self, local_rank: int, stream: int, fate: Fate, prefix: bytes | None) -> int:
        """Return the worker's end of a stream."""
        if fate.logged:
            path = self._logs[local_rank, stream]
            theirs = self._hand(append_to(path))
            if fate.shown:
                ours = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._add(local_rank, stream, self._stream(ours, stream, prefix, follow=True))
            return theirs
        if not fate.shown and stream == OUT:
            return self._hand(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        ours, theirs = channel(like=stream)
        self._hand(theirs)
        self._add(local_rank, stream, self._stream(ours, stream, prefix, shown=fate.shown))
        return theirs

    def _stream(
        self, fd: int, stream: int, prefix: bytes | None, *, shown: bool = True, follow: bool = False
    ) -> Stream:
        terminal = stream if os.isatty(fd) else None
        if terminal is not None:
            copy_size(terminal, fd, len(prefix or b""))
        outlet = self._outlets[stream] if shown else None
        # torchrun copies what is teed.
        copy = self._copies.get(stream) if follow else None
        return Stream(fd, outlet=outlet, prefix=prefix, follow=follow, copy=copy, terminal=terminal)

    def _add(self, local_rank: int, name: int, stream: Stream) -> None:
        self._streams[local_rank, name] = stream
        self._relay.add(stream)

    def _hand(self, fd: int) -> int:
        self._handed.append(fd)
        return fd

    def _prefix(self, seat: Assignment, local_rank: int) -> bytes:
        rank = seat.first_rank + local_rank
        if self._template is None:
            text = f"[{self._host}:{rank}] "
        else:
            words = {"role_name": self._options.role, "rank": rank, "local_rank": local_rank}
            text = Template(self._template).safe_substitute(words)
        return text.encode("utf-8", "backslashreplace")

    def _make_copies(self, attempt: int) -> dict[int, Copy]:
        texts = {OUT: self._options.duplicate_stdout_filters, ERR: self._options.duplicate_stderr_filters}
        copies = {}
        for stream, wanted in texts.items():
            if self.log_dir is not None and any(wanted):
                path = os.path.join(self.log_dir.attempt(attempt), f"filtered_{NAMES[stream]}.log")
                copies[stream] = Copy(open(append_to(path), "ab"), wanted)  # noqa: SIM115  # closed by `finish`
        return copies


def _same(one: int, other: int) -> bool:
    """Whether two descriptors are of the same file."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(one), os.fstat(other))
    return False
