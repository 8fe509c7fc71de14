"""The workers of a round as the launcher starts them, and what is found out about one that has ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping

from rdzv import model, wording
from rdzv.aside import aside
from rdzv.convert import seat_out
from rdzv.errors import last_words, looks_like_victim, read_error_file
from rdzv.interfaces import interface_variables
from rdzv.oom import moved, oom_kills
from rdzv.options import Options
from rdzv.outlet import Outlet
from rdzv.processes.facts import WorkerCommand, WorkerEnded
from rdzv.stdio import Stdio
from rdzv.worker_env import script_missing, worker_argv, worker_environment

_NO_SCRIPT = 2  # Python's exit code when it cannot open the script
FILES_S = 5.0  # for files to be made, or read; they are small, but their file system may hang

NAMES_S = 5.0  # for this host's own name to be looked up


class Workers:
    """One node's workers, round after round. All calls belong to one event loop."""

    def __init__(
        self, options: Options, environ: Mapping[str, str], stderr: Outlet, warn: Callable[[str], None]
    ) -> None:
        """`environ`: what workers are started with. `stderr`: what writes to descriptor 2."""
        self._options = options
        self._environ = environ
        self._warn = warn
        self._stdio = Stdio(options, environ, stderr)
        self._error_files: list[str] = []  # of this round, by local rank
        self._oom_kills: tuple[int, ...] = ()  # before this round
        self._interface_of: tuple[str, dict[str, str]] | None = None  # by address

    @property
    def log_dir(self) -> str:
        """The directory with the log files of this run; empty: there are none (yet)."""
        return self._stdio.log_dir.path if self._stdio.log_dir is not None else ""

    async def commands(
        self, seat: model.Assignment, *, endpoint: str, job_uid: str, scratch: str, address: str
    ) -> list[WorkerCommand]:
        """Return what to start. Their output is handed over with `started`. `address`: where peers reach this host.
        Raises OSError, TimeoutError, and ValueError for a device that is not there."""
        await self._stdio.finish()
        files, self._oom_kills = await aside(
            lambda: (self._stdio.prepare(seat, scratch), oom_kills()), within_s=FILES_S
        )
        self._error_files = files.error_files
        options, assigned, commands = self._options, seat_out(seat), []
        environ = {**self._environ, **(await self._interface(address) if seat.group_size > 1 else {})}
        for local_rank, (stdout, stderr) in enumerate(self._stdio.open(seat, files)):
            env = worker_environment(
                environ,
                assigned,
                local_rank,
                run_id=options.run_id,
                role=options.role,
                error_file=files.error_files[local_rank],
                endpoint=endpoint,
                job_uid=job_uid,
                signals_to_handle=options.signals_to_handle,
                virtual_local_rank=options.virtual_local_rank,
            )
            argv = worker_argv(options, self._environ, local_rank)
            commands.append(
                WorkerCommand(
                    local_rank=local_rank,
                    fork=options.start_method == "zygote",
                    argv=argv,
                    env=env,
                    stdout=stdout,
                    stderr=stderr,
                )
            )
        return commands

    async def _interface(self, address: str) -> dict[str, str]:
        """Return what names the interface that has this address to the workers, where they need it."""
        if self._interface_of is None or self._interface_of[0] != address:
            found: dict[str, str] = {}
            with contextlib.suppress(TimeoutError):
                found = await aside(lambda: interface_variables(self._environ, address), within_s=NAMES_S)
            self._interface_of = (address, found)
            if found:
                self._warn(wording.interface(found))
        return self._interface_of[1]

    def started(self) -> None:
        """All workers were started, or not all could be: nothing more is handed to them."""
        self._stdio.handed_over()

    async def ended(self, fact: WorkerEnded) -> model.WorkerEnded:
        """Return what is known of a worker's end."""
        text, kind = "", ""
        if fact.exit_code or fact.signal:
            await self._stdio.caught_up(fact.local_rank)  # what it said stands before what is said about it
            try:
                text, kind = await aside(lambda: self._why(fact), within_s=FILES_S)
            except TimeoutError:
                path = self._error_files[fact.local_rank]
                self._warn(f"cannot find out why local rank {fact.local_rank} failed: reading {path} takes too long")
        return model.WorkerEnded(
            round_uid=fact.round_uid,
            local_rank=fact.local_rank,
            exit_code=fact.exit_code,
            signal=fact.signal,
            at=fact.at,
            text=text,
            victim=looks_like_victim(text),
            kind=kind,
        )

    async def gone(self) -> None:
        """No process of the round is left: show the last of what they wrote."""
        await self._stdio.finish()

    async def close(self) -> None:
        """After the last round."""
        await self._stdio.close()

    def _why(self, fact: WorkerEnded) -> tuple[str, str]:
        """Return the report that a failed worker left, or else the end of its stderr, and the kind of its failure.
        Blocks."""
        report = read_error_file(self._error_files[fact.local_rank])
        text = "" if report is None else report.traceback or report.message
        text = text or last_words(self._stdio.last_bytes(fact.local_rank))
        if fact.signal == signal.SIGKILL and moved(self._oom_kills, oom_kills()):
            return text, model.OOM
        if not fact.signal and fact.exit_code in self._options.no_retry_exit_codes:
            return text, model.NO_RETRY
        if not fact.signal and fact.exit_code == _NO_SCRIPT and script_missing(self._options):
            return text, model.SPAWN
        return text, ""
