"""What the tests of whole jobs share: real launchers, workers that say what they do, conditions to wait for.

A `Stage` holds one test's daemon, launchers and files. Nothing here sleeps for a time that ought to be enough: a test
waits until somebody said or did something, and what must *not* happen is shown by what happens after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import psutil

from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.daemon import ROOT, Daemon, daemon
from tests.e2e.processes_kit import marked

T = TypeVar("T")

LIMIT_S = 120.0  # for the most loaded machine; nothing waits so long unless something is wrong
POLL_S = 0.03
RDZVRUN = Path(sys.executable).with_name("rdzvrun")
WORKERS = Path(__file__).with_name("workers")
STAND_IN = (str(WORKERS / "stand_in.py"),)
TOGETHER = (*STAND_IN, "--all-reduce")
HASTY = (*STAND_IN, "--hasty")
# Short, where the times themselves are not the point; all nodes of a job must agree on them.
CONF = {"last_call_timeout": "1", "grow_timeout": "1"}
STEPS = 5  # that many more, and training is believed to go on

Event = Mapping[str, Any]


@dataclass(frozen=True)
class World:
    """One round in which every rank has made a step. All sequences by rank."""

    round: int
    restart: int
    nodes: tuple[str, ...]
    pids: tuple[int, ...]


class Launcher:
    """One `rdzvrun` process and what it has said."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    def text(self) -> str:
        """All that it and its workers have written so far, both streams."""
        return self.log.read_text(errors="replace")

    def lines(self) -> list[str]:
        """What the launcher itself has said, without its prefix. (That of a worker has a colon in it.)"""
        return re.findall(r"^\[[^]:\n]+\] (.*)$", self.text(), re.MULTILINE)

    def said(self, pattern: str) -> re.Match[str] | None:
        """The first place in its lines where the pattern is found."""
        return re.search(pattern, "\n".join(self.lines()), re.MULTILINE)

    def says(self, pattern: str) -> re.Match[str]:
        """Wait until it says so."""
        return until(
            lambda: self.said(pattern), f"{self.name} says {pattern!r}", lambda: self.process.poll() is not None
        )

    def ends(self) -> int:
        """Wait until it has ended; its exit code, or the negative number of the signal that ended it."""
        until(lambda: self.process.poll() is not None, f"{self.name} ends")
        return self.process.returncode

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the launcher alone."""
        self.process.kill()
        self.process.wait()

    def summary(self) -> list[str]:
        """Its last word: the line that tells how it ended, and what follows it."""
        lines = self.lines()
        starts = [i for i, line in enumerate(lines) if re.match(r"job (succeeded|failed|closed)|left the job", line)]
        assert len(starts) == 1, f"{self.name} has {len(starts)} summaries"
        return lines[starts[0] :]


class Stage:
    """The scope of one test: a directory, processes, and the workers' progress."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = os.urandom(8).hex()
        self.launchers: list[Launcher] = []
        self.daemons: list[Daemon] = []
        self._scope = contextlib.ExitStack()
        (directory / "orders").mkdir()
        (directory / "progress.jsonl").touch()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._clear(strict=kind is None)
        finally:
            said = [*((x.name, x.text()) for x in self.launchers), *(("daemon", x.text()) for x in self.daemons)]
            for name, text in said:
                print(f"---- {name}\n{text}")
            print("---- workers\n" + self._tail())

    # ------------------------------------------------------------------------------------------- who plays

    def daemon(self, *options: str, listen: str = "127.0.0.1:0") -> Daemon:
        """Start a daemon, which serves from now on."""
        served = self._scope.enter_context(daemon(self.directory, *options, listen=listen))
        self.daemons.append(served)
        return served

    def launch(
        self,
        name: str,
        nnodes: str = "1",
        *,
        nproc: int = 1,
        restarts: int = 0,
        run_id: str = "job",
        endpoint: str | None = None,
        conf: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        worker: Sequence[str] = STAND_IN,
        before: Sequence[str] = (),
    ) -> Launcher:
        """Start a node of this name, at the daemon that was started last unless told where.

        A stand-in needs no torch and is started plainly unless `options` say otherwise: a zygote would import it first.
        """
        conf_text = ",".join(f"{k}={v}" for k, v in {**CONF, "node_name": name, **(conf or {})}.items())
        where = self.daemons[-1].endpoint if endpoint is None else endpoint
        counts = [f"--nnodes={nnodes}", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]
        place = [f"--rdzv-endpoint={where}", f"--rdzv-id={run_id}", f"--rdzv-conf={conf_text}"]
        plainly = () if worker is not STAND_IN else ("--start-method=exec",)
        return self.run(name, *counts, *place, *plainly, *options, *worker, env=env, before=before)

    def run(
        self, name: str, *arguments: str, env: Mapping[str, str] | None = None, before: Sequence[str] = ()
    ) -> Launcher:
        """Start `rdzvrun` with exactly these arguments; `before`: a command that becomes it."""
        log = self.directory / f"{name}-{len(self.launchers)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*before, RDZVRUN, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env=self.environment(name, env),
                start_new_session=True,
            )
        launcher = Launcher(name, process, log)
        self.launchers.append(launcher)
        return launcher

    def environment(self, name: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a launcher of this name is started with."""
        mine = {"RDZV_TEST_MARK": self.mark, "STAGE": str(self.directory), "STAGE_NODE": name}
        return {**os.environ, **mine, **(more or {})}

    def job(self, run_id: str = "job") -> pb.JobView:
        """The job as the daemon shows it to people."""
        return ask(self.daemons[-1].endpoint, "GetJob", pb.GetJobRequest(run_id=run_id), pb.JobView)

    # ------------------------------------------------------------------------------------------- what workers do

    def order(self, what: str, argument: str = "") -> None:
        """Tell workers what to do: `finish`, `finish-NODE`, or `rank-N` with what that rank is to do once."""
        hidden = self.directory / "orders" / f".{what}"
        hidden.write_text(argument)
        hidden.rename(self.directory / "orders" / what)  # whole, or not there

    def progress(self, **wanted: object) -> list[Event]:
        """All that workers said so far and that has these values."""
        # A line that is just being written may be there in part.
        lines = (self.directory / "progress.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
        return [e for e in map(json.loads, lines) if all(e[key] == value for key, value in wanted.items())]

    def world(self, size: int, *, after: World | int = 0, run: str | None = None) -> World:
        """Wait until every rank of a round later than `after` has made a step in a world of this size."""
        number = after.round if isinstance(after, World) else after
        what = f"a world of {size} after round {number}"
        return self.until(lambda: self._world(size, number, run), what)

    def goes_on(self, world: World) -> None:
        """Wait until the same workers have made some more steps; nobody has started another round."""
        before = {pid: len(self.progress(event="step", pid=pid)) for pid in world.pids}
        self.until(
            lambda: all(len(self.progress(event="step", pid=pid)) >= n + STEPS for pid, n in before.items()),
            f"round {world.round} goes on",
        )
        nodes = set(world.nodes)
        later = [e for e in self.progress(event="start") if e["round"] > world.round and e["node"] in nodes]
        assert not later, f"round {world.round} was to go on, but: {later}"

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Wait until the condition holds, and return its value; not when all launchers have ended meanwhile."""
        return until(condition, what, lambda: all(x.process.poll() is not None for x in self.launchers))

    def _world(self, size: int, after: int, run: str | None) -> World | None:
        steps = [e for e in self.progress(event="step", world=size) if e["round"] > after]
        if run is not None:
            pids = {e["pid"] for e in self.progress(event="start") if e["env"]["TORCHELASTIC_RUN_ID"] == run}
            steps = [e for e in steps if e["pid"] in pids]
        for number in sorted({e["round"] for e in steps}, reverse=True):
            ranks = {e["rank"]: e for e in steps if e["round"] == number}
            if len(ranks) == size:
                members = [ranks[rank] for rank in range(size)]
                nodes, pids_ = (tuple(e[key] for e in members) for key in ("node", "pid"))
                return World(number, members[0]["restart"], nodes, pids_)
        return None

    # ------------------------------------------------------------------------------------------- the end

    def alive(self, node: str = "", what: str = "") -> list[psutil.Process]:
        """What lives of all that launchers started, launchers included: of one node, with this in its command line."""
        found = []
        for pid in marked(self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                mine = process.environ().get("STAGE_NODE", "")
                if node in ("", mine) and what in shlex.join(process.cmdline()):
                    found.append(process)
        return found

    def _clear(self, *, strict: bool) -> None:
        """End everything. What outlives its killed launcher fails the test."""
        try:
            for launcher in self.launchers:
                if launcher.process.poll() is None:
                    launcher.kill()  # also when it is stopped
            self._scope.close()
            if strict:
                until(lambda: not self.alive(), "nobody is left behind", detail=lambda: str(self.alive()))
        finally:
            for pid in marked(self.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _tail(self) -> str:
        others = [e for e in self.progress() if e["event"] != "step"]
        return "\n".join(json.dumps({k: v for k, v in e.items() if k != "env"}) for e in others[-40:])


# ---------------------------------------------------------------------------------------------------- helpers


def until(
    condition: Callable[[], T | None],
    what: str,
    hopeless: Callable[[], bool] = lambda: False,
    *,
    detail: Callable[[], str] = str,
) -> T:
    """Wait until the condition holds, and return its value. AssertionError after LIMIT_S, or when it is hopeless."""
    give_up_at = time.monotonic() + LIMIT_S
    while True:
        over = hopeless()  # looked at first: what came just before the end counts
        if value := condition():
            return value
        assert not over, f"will never be: {what}"
        assert time.monotonic() < give_up_at, f"not within {LIMIT_S:.0f} s: {what}; {detail()}"
        time.sleep(POLL_S)


def ask(endpoint: str, method: str, request: Any, reply: type[T], *, limit_s: float = LIMIT_S) -> T:
    """Call a method of the daemon that is meant for operators. grpc.RpcError."""
    with grpc.insecure_channel(endpoint, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(
            f"/rendezvousd.v1.Rendezvous/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,  # type: ignore[attr-defined]
        )
        answer: T = call(request, timeout=limit_s)
        return answer


@contextlib.contextmanager
def frozen(process: Daemon | Launcher) -> Iterator[None]:
    """The process is stopped in this scope."""
    process.send(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send(signal.SIGCONT)
