"""One game: a job on three nodes that trains while everything around it, and it, is broken; its history on disk."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil

from tests.chaos import faults, net
from tests.chaos.history import Reader, Writer
from tests.chaos.players import (
    DAEMON_PORT,
    ETCD_PORT,
    TRAINING,
    Launcher,
    Player,
    command_path,
    daemon_on,
    etcd_on,
    wait_until,
)
from tests.chaos.schedule import WHOLE_S, Backend, Turn

NODES = {"n0": 1, "n1": 1, "n2": 2}  # workers on each
MIN_NODES = 2  # a majority: two worlds of the job could only live at the same time by a fault of ours
NUMBERS = {"n0": 2, "n1": 3, "n2": 4, "head1": 11, "head2": 12, "etcd": 20, "outsider": 30}
LOG_DISK_MIB = 8
FORM_S = 120.0  # for the first world; torch is imported six times, side by side
END_S = 120.0  # from the last step to the exit of the last launcher
AHEAD = 15  # steps between the order to finish and the last one
SETTLED_S = 10.0  # a process so old has what it needs
FOR_EVER_S = 10 * 86400.0
# Growth is quick, and no number of broken rounds ends the job: here they are broken all the time.
CONF = "last_call_timeout=2,grow_timeout=2,grow_max=10,short_rounds_max=1000000"
# What DDP needs is there from the first round on, and every zygote has an heir all the same.
LOG_OPTIONS = ("--redirects=1", "--shutdown-timeout=5", "--preload=torch._dynamo", "--preload-later=mailbox")
DAEMON_OPTIONS = ("--calm-soon=0",)


class GameOver(Exception):
    """The game cannot go on. What it has found is in its history all the same."""


@dataclass
class Usage:
    """What a process uses: soon after its start, and later."""

    name: str
    incarnation: int
    pid: int
    age_s: float
    rss_mib: tuple[float, float]
    pss_mib: tuple[float, float]
    files: tuple[int, int]


@dataclass
class _Sample:
    pid: int
    at: float
    rss_mib: float
    pss_mib: float
    files: int


def _sample(pid: int) -> _Sample:
    process = psutil.Process(pid)
    memory = process.memory_full_info()
    return _Sample(pid, time.monotonic(), memory.rss / 2**20, memory.pss / 2**20, process.num_fds())


@dataclass
class Game:
    """Only in a cage, and one to a cage: names of hosts are used once."""

    directory: Path
    backend: Backend
    seed: int
    launchers: list[Launcher] = field(default_factory=list)
    daemons: list[Player] = field(default_factory=list)
    etcd: Player | None = None
    usage: list[Usage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history_file = self.directory / "history.jsonl"
        self.writer = Writer(self.history_file)
        self.reader = Reader(self.history_file)
        self.finish_file = self.directory / "finish"
        self.world = sum(NODES.values())
        self._newest: dict[str, dict[int, float]] = {}  # by round and rank: when its newest step began
        self._worlds: dict[str, int] = {}
        self._step = 0
        self._settled: dict[tuple[str, int], _Sample] = {}
        self._fault = 0

    # ------------------------------------------------------------------------------------------- the whole of it

    def play(self, turns: Iterator[Turn], until: float = FOR_EVER_S) -> None:
        """To the end: until the turns, or the time (CLOCK_MONOTONIC), are over. Raises GameOver, NotReady."""
        try:
            self._set_up()
            for turn in turns:
                self._turn(turn)
                if time.monotonic() >= until:
                    break
            self._note_usage()
            self._finish()
        finally:
            self._clear()
            self._reference()

    def _set_up(self) -> None:
        self.writer.say("game", seed=self.seed, backend=self.backend, nodes=NODES, min_nodes=MIN_NODES)
        hosts = net.build(NUMBERS)
        self.outsider = hosts["outsider"]
        if self.backend == "etcd":
            self.etcd = etcd_on(hosts["etcd"], self.directory)
            self.etcd.start()
            self.etcd.await_port(ETCD_PORT)
        heads = ["head1"] if self.etcd is None else ["head1", "head2"]
        for name in heads:
            daemon = daemon_on(hosts[name], self.directory, None if self.etcd is None else self.etcd.host)
            daemon.command += DAEMON_OPTIONS
            daemon.start()
            daemon.await_port(DAEMON_PORT)
            self.daemons.append(daemon)
        endpoints = ",".join(f"{hosts[name].address}:{DAEMON_PORT}" for name in heads)
        checkpoints = self.directory / "checkpoints"
        checkpoints.mkdir()
        for name, workers in NODES.items():
            options = [
                command_path("rdzvrun"),
                f"--nnodes={MIN_NODES}:{len(NODES)}",
                f"--nproc-per-node={workers}",
                "--max-restarts=1000000",
            ]
            options += [f"--rdzv-endpoint={endpoints}", "--rdzv-id=chaos", f"--rdzv-conf={CONF},node_name={name}"]
            files = (self.history_file, checkpoints, self.finish_file)
            launcher = Launcher(hosts[name], self.directory, options, files)
            launcher.command[len(options) : len(options)] = [f"--log-dir={launcher.logs}", *LOG_OPTIONS]
            faults.small_disk(launcher.logs, LOG_DISK_MIB)
            launcher.start()
            self.launchers.append(launcher)
        if not self._whole_within(FORM_S, since=0.0):
            raise GameOver("no first world")

    def _turn(self, turn: Turn) -> None:
        time.sleep(turn.pause_s)
        ids = []
        with ExitStack() as healing:
            ends: list[tuple[float, int]] = []
            for index, shot in enumerate(turn.shots):
                if index:
                    time.sleep(turn.apart_s)
                self._fault += 1
                scope = ExitStack()
                began_at = time.monotonic()
                more = {"kind": shot.kind.name, "pause_s": shot.kind.pause_s, "whole_s": WHOLE_S}
                more |= {"charged": shot.kind.charged, "together": len(turn.shots) > 1}
                try:
                    target = scope.enter_context(faults.FAULTS[shot.kind.name](self, shot))
                except faults.Missed as missed:
                    print(f"  {shot.kind.name}: missed, {missed}", flush=True)
                    continue
                self.writer.say("fault", fault=self._fault, at=began_at, target=target, hold_s=shot.hold_s, **more)
                ids.append(self._fault)
                ends.append((began_at + shot.hold_s, self._fault))
                healing.callback(self.writer.say, "healed", fault=self._fault)
                healing.push(scope)  # left before that is said
                print(f"  {time.monotonic():.1f} {shot.kind.name}: {target}, {shot.hold_s:.1f} s", flush=True)
            if not ends:
                return
            time.sleep(max(0.0, max(at for at, _ in ends) - time.monotonic()))
        healed_at = time.monotonic()
        whole = self._whole_within(WHOLE_S, since=healed_at)
        for fault in ids:
            orphans = [pid for node in self.launchers for i in range(1, node.incarnation) for pid in node.remains(i)]
            self.writer.say("orphans", fault=fault, pids=orphans)
        if not whole:
            raise GameOver(f"no world of all nodes within {WHOLE_S:.0f} s of the end of fault {ids}")
        for fault in ids:
            self.writer.say("whole", fault=fault)
        print(f"    all train again after {time.monotonic() - healed_at:.1f} s", flush=True)
        self._note_settled()

    def _finish(self) -> None:
        self._look()
        last = self._step + AHEAD
        self.writer.say("finish", step=last)
        hidden = self.directory / ".finish"
        hidden.write_text(str(last))
        hidden.rename(self.finish_file)
        if not wait_until(lambda: not any(launcher.alive for launcher in self.launchers), END_S):
            raise GameOver(f"launchers have not ended within {END_S:.0f} s")

    def _clear(self) -> None:
        """Write down what lives though everything has ended, and end it."""
        players = [*self.launchers, *self.daemons, *([] if self.etcd is None else [self.etcd])]
        ended = bool(self.launchers) and not any(launcher.alive for launcher in self.launchers)
        for player in players:
            if player.alive:
                player.kill()
        if ended:

            def left() -> list[int]:
                return [pid for node in self.launchers for i in range(node.incarnation) for pid in node.remains(i + 1)]

            wait_until(lambda: not left(), 10.0)
            self.writer.say("left", pids=left())

    def _reference(self) -> None:
        """What the last loss would have been without us."""
        done = [event for event in self._events() if event["event"] == "done"]
        if done:
            step = done[-1]["step"]
            command = [sys.executable, str(TRAINING), "--alone", str(step)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            said = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
            self.writer.say("reference", step=step, loss=float(said))

    # ------------------------------------------------------------------------------------------- who is who

    def leader(self) -> Player:
        """The daemon that serves."""
        serving = [daemon for daemon in self.daemons if daemon.alive and (len(self.daemons) == 1 or _serves(daemon))]
        if not serving:
            raise faults.Missed("no daemon leads")
        return serving[0]

    def etcd_player(self) -> Player:
        assert self.etcd is not None
        return self.etcd

    # ------------------------------------------------------------------------------------------- what it looks like

    def _events(self) -> list[dict[str, object]]:
        self._look()
        return [dict(event) for event in self.reader.events]

    def _look(self) -> None:
        for event in self.reader.more():
            if event["event"] == "start":
                self._worlds[event["uid"]] = event["world"]
            elif event["event"] == "step":
                self._newest.setdefault(event["uid"], {})[event["rank"]] = event["t0"]
                self._step = max(self._step, event["step"])

    def _whole_within(self, seconds: float, since: float) -> bool:
        def whole() -> bool:
            self._look()
            return any(
                self._worlds[uid] == self.world and sum(t0 >= since for t0 in ranks.values()) == self.world
                for uid, ranks in self._newest.items()
            )

        return wait_until(whole, seconds)

    # ------------------------------------------------------------------------------------------- what it uses

    def _long_lived(self) -> Iterator[tuple[str, int, int]]:
        for player in (*self.daemons, *self.launchers, *([] if self.etcd is None else [self.etcd])):
            if player.alive:
                yield player.name, player.incarnation, player.pid
        for launcher in self.launchers:
            for kind in ("keeper", "spawner", "zygote", "store-holder"):
                for process in launcher.find(kind):
                    yield f"{kind} of {launcher.name}", process.pid, process.pid

    def _note_settled(self) -> None:
        for name, incarnation, pid in self._long_lived():
            with contextlib.suppress(psutil.Error):
                age_s = time.time() - psutil.Process(pid).create_time()
                if age_s > SETTLED_S and (name, incarnation) not in self._settled:
                    self._settled[name, incarnation] = _sample(pid)

    def _note_usage(self) -> None:
        for name, incarnation, pid in self._long_lived():
            first = self._settled.get((name, incarnation))
            if first is None:
                continue
            with contextlib.suppress(psutil.Error):
                now = _sample(pid)
                self.usage.append(Usage(
                    name, incarnation, pid, now.at - first.at,
                    (first.rss_mib, now.rss_mib), (first.pss_mib, now.pss_mib), (first.files, now.files),
                ))  # fmt: skip


def _serves(daemon: Player) -> bool:
    """Whether its health service says so."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"{daemon.host.address}:{DAEMON_PORT}") as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=3.0)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def end_quietly() -> None:
    """Ctrl-C and TERM end the game through its `finally` clauses."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
