"""The processes of a game: daemons, etcd and launchers, each on a host of its own, started again when they are dead."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests import etcd
from tests.chaos.history import Writer
from tests.chaos.net import Host
from tests.daemon import ROOT

DAEMON_PORT = 29400
ETCD_PORT, ETCD_PEER_PORT = 2379, 2380
READY_S = 60.0
TRAINING = Path(__file__).with_name("training.py")
OWN_LINE = re.compile(r"\[[^]:\n]+\] (.*)")  # of the launcher itself; that of a worker has a colon in its prefix


class NotReady(Exception):
    """A process of the game does not come up."""


class Player:
    """One program on one host. `incarnation` counts its starts."""

    def __init__(self, name: str, host: Host, directory: Path, command: Sequence[str]) -> None:
        self.name = name
        self.host = host
        self.incarnation = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory / f"{name}.log"
        self.command = list(command)
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("ETCD_", "PET_"))}

    def start(self) -> None:
        """Start it, or start it again."""
        self.incarnation += 1
        with self.log.open("ab") as log:
            log.write(f"---- start {self.incarnation} at {time.monotonic():.3f}\n".encode())
            log.flush()
            self.process = self._popen(log.fileno())

    def _popen(self, log_fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.host.inside(*self.command),
            stdin=subprocess.DEVNULL, stdout=log_fd, stderr=log_fd, cwd=ROOT, env=self.env, start_new_session=True,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def listens(self, port: int) -> bool:
        """Whether it takes connections."""

        def knock() -> bool:
            with socket.socket() as knocking:
                knocking.settimeout(1.0)
                return knocking.connect_ex((self.host.address, port)) == 0

        return self.host.do(knock)

    def await_port(self, port: int) -> None:
        """Raises NotReady."""
        give_up_at = time.monotonic() + READY_S
        while not self.listens(port):
            if time.monotonic() > give_up_at or not self.alive:
                raise NotReady(f"{self.name}: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)


def etcd_on(host: Host, directory: Path) -> Player:
    client = f"http://{host.address}:{ETCD_PORT}"
    peer = f"http://{host.address}:{ETCD_PEER_PORT}"
    data = directory / "etcd-data"
    return Player("etcd", host, directory, [
        str(etcd.binary()), "--name=m", f"--data-dir={data}",
        f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=m={peer}",
        *etcd.TICKS, *etcd.COMPACTION,
    ])  # fmt: skip


def daemon_on(host: Host, directory: Path, etcd_host: Host | None) -> Player:
    command = [sys.executable, "-m", "rendezvousd", f"--listen=0.0.0.0:{DAEMON_PORT}"]
    if etcd_host is not None:
        command += [
            "--backend=etcd",
            f"--etcd-endpoints={etcd_host.address}:{ETCD_PORT}",
            f"--advertise={host.address}:{DAEMON_PORT}",
        ]
    return Player(f"daemon-{host.name}", host, directory, command)


class Launcher(Player):
    """One node's launcher. Its own lines go to the history, and all that it and its workers say to its log."""

    def __init__(self, host: Host, directory: Path, command: Sequence[str], files: Sequence[Path]) -> None:
        """`files`: the history, the directory of checkpoints, and the file that ends the training."""
        self.logs = directory / f"logs-{host.name}"
        self.logs.mkdir()
        command = [*command, str(TRAINING), *map(str, files)]
        super().__init__(host.name, host, directory, command)
        self._history = Writer(files[0])
        self.env |= {
            "CHAOS_NODE": host.name,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }

    def start(self) -> None:
        self.env["CHAOS_LAUNCHER"] = str(self.incarnation + 1)
        super().start()

    def _popen(self, log_fd: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.host.inside(*self.command),
            stdin=subprocess.DEVNULL, stdout=log_fd, stderr=subprocess.PIPE, cwd=ROOT, env=self.env,
            start_new_session=True,
        )  # fmt: skip
        number = self.incarnation
        self._history.say("launch", node=self.name, launcher=number, pid=process.pid)
        for each in (lambda: self._listen(process, number), lambda: self._await(process, number)):
            threading.Thread(target=each, name=f"{self.name}-{number}", daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[bytes], number: int) -> None:
        assert process.stderr is not None
        with self.log.open("ab", buffering=0) as log:
            for raw in process.stderr:
                log.write(raw)
                if found := OWN_LINE.fullmatch(raw.decode(errors="replace").rstrip("\n")):
                    self._history.say("line", node=self.name, launcher=number, text=found[1])

    def _await(self, process: subprocess.Popen[bytes], number: int) -> None:
        self._history.say("exit", node=self.name, launcher=number, code=process.wait())

    # ------------------------------------------------------------------------------------------- its processes

    def find(self, what: str) -> list[psutil.Process]:
        """Its living processes of a kind: worker, zygote, spawner, keeper, store-holder."""
        try:
            below = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        found = []
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and _kind(process) == what:
                    found.append(process)
        return found

    def kill_everything(self) -> None:
        """All that it, and every launcher before it, has started; until nothing is left."""
        while pids := [pid for number in range(self.incarnation) for pid in self.remains(number + 1)]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.process is not None:
                self.process.poll()

    def remains(self, incarnation: int) -> list[int]:
        """The pids of all that a launcher, and its workers, have started and that lives."""
        marks = {f"CHAOS_NODE={self.name}".encode(), f"CHAOS_LAUNCHER={incarnation}".encode()}
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if marks <= set(Path("/proc", name, "environ").read_bytes().split(b"\0")):
                    found.append(int(name))
        return found


def _kind(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    if "keeper.py" in words:
        parent = process.parent()
        return "spawner" if parent is not None and "keeper.py" in " ".join(parent.cmdline()) else "keeper"
    kinds = {"zygote.py": "zygote", "store_holder.py": "store-holder", "training.py": "worker"}
    return next((kind for script, kind in kinds.items() if script in words), "")


def command_path(name: str) -> str:
    """The console script of this Python."""
    return str(Path(sys.executable).with_name(name))


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    """Whether it came to hold."""
    give_up_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.1)
    return True
