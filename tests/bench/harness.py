"""What the benchmarks share: processes that do not outlive them, and events that workers write to a file.

Every instant here is `time.time()` in seconds: all processes of a benchmark run on one machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("probe_worker.py")
POLL_S = 0.005  # how often a file is looked at; far below anything measured here


class BenchFailed(Exception):
    """A benchmark could not be carried out; the text is for people. A slow result is not a failure."""


@dataclass(frozen=True, slots=True)
class FirstReduce:
    """A worker finished the first all-reduce of its life."""

    t: float
    rank: int
    world: int
    pid: int
    world_key: str  # the same for all workers of one formed world, another one for the next


@dataclass(slots=True)
class Stage:
    """One scenario's folder and processes."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)  # those of them that have workers
    _logs: dict[int, Path] = field(default_factory=dict)

    def launch(self, name: str, command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """As `start`, for a launcher whose workers write to `events_file`."""
        self.launchers.append(self.start(name, command, env))
        return self.launchers[-1]

    @property
    def events_file(self) -> Path:
        """Where the probes of this scenario write."""
        return self.folder / "events.jsonl"

    def start(
        self, name: str, command: Sequence[str], extra_env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `command` in its own session, its output in a file of the scenario's folder."""
        log = self.folder / f"{name}.log"
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
        env |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | (extra_env or {})
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=env,
                cwd=REPOSITORY,
                start_new_session=True,
            )
        self.processes.append(process)
        self._logs[process.pid] = log
        return process

    def events(self) -> list[FirstReduce]:
        """All that was written so far. A line that is still being written is left for later."""
        if not self.events_file.exists():
            return []
        whole, _, _ = self.events_file.read_text().rpartition("\n")
        return [FirstReduce(**json.loads(line)) for line in whole.splitlines()]

    def world_formed(self, size: int, since: float) -> float | None:
        """When the last rank of the first world of `size` formed after `since` had reduced, or None."""
        worlds: dict[str, list[FirstReduce]] = defaultdict(list)
        for event in self.events():
            if event.t > since and event.world == size:
                worlds[event.world_key].append(event)
        whole = [max(e.t for e in world) for world in worlds.values() if len({e.rank for e in world}) == size]
        return min(whole, default=None)

    def wait_for_world(self, size: int, since: float, bound_s: float) -> float | None:
        """As `world_formed`, waiting for it; None if it takes more than `bound_s` or no launcher is left to wait for.

        A launcher that gives up is a result, and a strange one: what it said goes to stderr.
        """
        formed_at = wait_for(lambda: self.world_formed(size, since), bound_s, self._nobody_runs)
        if formed_at is None and self._nobody_runs():
            print(f"all launchers have ended\n{self.log_tails()}", file=sys.stderr)
        return formed_at

    def need_world(self, size: int, since: float, bound_s: float = 180.0) -> float:
        """As `wait_for_world`, where going on without makes no sense. Raises BenchFailed with the logs' ends."""
        formed_at = self.wait_for_world(size, since, bound_s)
        if formed_at is None:
            raise BenchFailed(f"no world of {size} within {bound_s:.0f} s\n{self.log_tails()}")
        return formed_at

    def log_tails(self, lines: int = 15) -> str:
        """The last lines of every process's output."""
        parts = []
        for process in self.processes:
            log = self._logs[process.pid]
            tail = log.read_text(errors="replace").splitlines()[-lines:]
            parts.append(f"--- {log.name} (exit code {process.poll()})\n" + "\n".join(tail))
        return "\n".join(parts)

    def clear(self) -> None:
        """End every process of this scenario, and all that they started."""
        doomed: dict[int, psutil.Process] = {}
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(process.pid)
                doomed |= {p.pid: p for p in (root, *root.children(recursive=True))}
        for pid in {event.pid for event in self.events()}:  # orphans too: their launcher may be long gone
            with contextlib.suppress(psutil.NoSuchProcess):
                worker = psutil.Process(pid)
                if any(str(self.events_file) in part for part in worker.cmdline()):
                    doomed[pid] = worker
        for victim in doomed.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        for process in self.processes:
            process.wait()
        psutil.wait_procs(list(doomed.values()), timeout=10)

    def _nobody_runs(self) -> bool:
        return all(process.poll() is not None for process in self.launchers)


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """A scenario's folder and processes; both are gone afterwards, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="rdzv-bench-") as folder:
        scene = Stage(Path(folder))
        try:
            yield scene
        finally:
            scene.clear()


def wait_for(look: Callable[[], T | None], bound_s: float, hopeless: Callable[[], bool] = lambda: False) -> T | None:
    """The first thing `look` finds; None after `bound_s`, or once `hopeless` says that nothing will come."""
    give_up_at = time.monotonic() + bound_s
    while True:
        lost = hopeless()  # asked first: what was written before the end still counts
        if (found := look()) is not None:
            return found
        if lost or time.monotonic() > give_up_at:
            return None
        time.sleep(POLL_S)


def listens(port: int) -> bool:
    """Whether somebody takes connections on this port of the loopback interface."""
    with socket.socket() as knock:
        knock.settimeout(1.0)
        return knock.connect_ex(("127.0.0.1", port)) == 0


def start_server(scene: Stage, name: str, command: Sequence[str], port: int) -> subprocess.Popen[bytes]:
    """Start a server that will listen on `port`, and wait until it does. Raises BenchFailed."""
    server = scene.start(name, command)
    if wait_for(lambda: listens(port) or None, 30.0, lambda: server.poll() is not None) is None:
        raise BenchFailed(f"{name} does not listen on port {port}\n{scene.log_tails()}")
    return server


def start_daemon(scene: Stage, port: int, *options: str) -> subprocess.Popen[bytes]:
    """A rendezvousd as it comes but for these options, listening on `port`."""
    command = [command_path("rendezvousd"), "--listen", f"127.0.0.1:{port}", *options]
    return start_server(scene, "rendezvousd", command, port)


def command_path(name: str) -> str:
    """The console script `name` of this Python. Raises BenchFailed when it is not installed."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise BenchFailed(f"{path} is not there: pip install -e '.[dev,torch]' in this environment first")
    return str(path)


def sigkill(pid: int) -> float:
    """Kill the process with SIGKILL; the instant just before."""
    before = time.time()
    os.kill(pid, signal.SIGKILL)
    return before
