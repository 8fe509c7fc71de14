"""The faults themselves. Each is a scope: it begins when the scope is entered and is healed when it is left.

What it gives is whom it hits, for people. A fault that finds nobody to hit raises Missed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tests.chaos.players import DAEMON_PORT, Launcher, Player
from tests.chaos.schedule import Shot

if TYPE_CHECKING:
    import psutil

    from tests.chaos.game import Game

Fault: TypeAlias = Callable[["Game", Shot], AbstractContextManager[str]]

SLOW_S, SLOW_JITTER_S = 0.2, 0.1  # of every packet
FLAP_S = 1.5
IDLE_CONNECTIONS = 5000


class Missed(Exception):
    """There is nobody to hit just now."""


FAULTS: dict[str, Fault] = {}


def _named(name: str) -> Callable[[Callable[[Game, Shot], Iterator[str]]], Fault]:
    def note(body: Callable[[Game, Shot], Iterator[str]]) -> Fault:
        FAULTS[name] = contextmanager(body)
        return FAULTS[name]

    return note


def _node(game: Game, shot: Shot) -> Launcher:
    alive = [launcher for launcher in game.launchers if launcher.alive]
    if not alive:
        raise Missed("no launcher lives")
    return alive[int(shot.pick * len(alive))]


def _process(game: Game, shot: Shot, kind: str) -> tuple[str, psutil.Process]:
    everywhere = [(node.name, process) for node in game.launchers if node.alive for process in node.find(kind)]
    if not everywhere:
        raise Missed(f"there is no {kind}")
    node, process = everywhere[int(shot.pick * len(everywhere))]
    return f"{kind} {process.pid} on {node}", process


# ------------------------------------------------------------------------------------------------ one process


def _kills(kind: str) -> None:
    @_named(f"kill-{kind}")
    def kill(game: Game, shot: Shot) -> Iterator[str]:
        target, process = _process(game, shot, kind)
        process.send_signal(signal.SIGKILL)
        yield target


def _stops(name: str, kind: str, *, also: Callable[[Game, Shot], None] = lambda game, shot: None) -> None:
    @_named(name)
    def stop(game: Game, shot: Shot) -> Iterator[str]:
        target, process = _process(game, shot, kind)
        process.send_signal(signal.SIGSTOP)
        try:
            also(game, shot)
            yield target
        finally:
            import psutil

            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def _kill_some_worker(game: Game, shot: Shot) -> None:
    """So that somebody needs what does not work just now."""
    _, worker = _process(game, shot, "worker")
    worker.send_signal(signal.SIGKILL)


for _kind in ("worker", "zygote", "spawner", "keeper", "store-holder"):
    _kills(_kind)
_stops("stop-worker", "worker")
_stops("stall-worker", "worker")
_stops("stop-zygote", "zygote", also=_kill_some_worker)
_stops("stop-keeper", "keeper")
_stops("stop-store-holder", "store-holder", also=_kill_some_worker)


@contextmanager
def _killed(player: Player) -> Iterator[str]:
    player.kill()
    yield player.name
    player.start()


@contextmanager
def _stopped(player: Player) -> Iterator[str]:
    player.send(signal.SIGSTOP)
    try:
        yield player.name
    finally:
        player.send(signal.SIGCONT)


@_named("stop-launcher")
def _stop_launcher(game: Game, shot: Shot) -> Iterator[str]:
    with _stopped(_node(game, shot)) as target:
        yield target


@_named("kill-launcher")
def _kill_launcher(game: Game, shot: Shot) -> Iterator[str]:
    with _killed(_node(game, shot)) as target:
        yield target


@_named("flap-launcher")
def _flap_launcher(game: Game, shot: Shot) -> Iterator[str]:
    node = _node(game, shot)
    for _ in range(3):
        node.kill()
        node.start()
        time.sleep(2 * FLAP_S)
    yield node.name


# ------------------------------------------------------------------------------------------------ daemons and etcd


@_named("stop-daemon")
def _stop_daemon(game: Game, shot: Shot) -> Iterator[str]:
    with _stopped(game.leader()) as target:
        yield target


@_named("kill-daemon")
def _kill_daemon(game: Game, shot: Shot) -> Iterator[str]:
    with _killed(game.leader()) as target:
        yield target


@_named("stop-etcd")
def _stop_etcd(game: Game, shot: Shot) -> Iterator[str]:
    with _stopped(game.etcd_player()) as target:
        yield target


@_named("kill-etcd")
def _kill_etcd(game: Game, shot: Shot) -> Iterator[str]:
    with _killed(game.etcd_player()) as target:
        yield target


# ------------------------------------------------------------------------------------------------ the network


def _of_node(game: Game, shot: Shot) -> Player:
    return game.launchers[int(shot.pick * len(game.launchers))]


def _of_daemon(game: Game, shot: Shot) -> Player:
    return game.leader()


def _cables(whose: str, find: Callable[[Game, Shot], Player]) -> None:
    @_named(f"pull-{whose}")
    def pull(game: Game, shot: Shot) -> Iterator[str]:
        player = find(game, shot)
        player.host.pull()
        try:
            yield player.name
        finally:
            player.host.plug()

    for suffix in ("", "-in", "-out"):

        @_named(f"drop-{whose}{suffix}")
        def drop(game: Game, shot: Shot, suffix: str = suffix) -> Iterator[str]:
            player = find(game, shot)
            player.host.drop("in" if suffix == "-in" else "out" if suffix == "-out" else "both")
            try:
                yield player.name
            finally:
                player.host.mend()

    @_named(f"slow-{whose}")
    def slow(game: Game, shot: Shot) -> Iterator[str]:
        player = find(game, shot)
        with player.host.slow(SLOW_S, SLOW_JITTER_S, round(shot.pick * 1e9)):
            yield player.name


_cables("node", _of_node)
_cables("daemon", _of_daemon)
_cables("etcd", lambda game, shot: game.etcd_player())


@_named("flap-cable")
def _flap_cable(game: Game, shot: Shot) -> Iterator[str]:
    player = _of_node(game, shot)
    for _ in range(3):
        player.host.pull()
        time.sleep(FLAP_S)
        player.host.plug()
        time.sleep(FLAP_S)
    yield player.name


# ------------------------------------------------------------------------------------------------ things run out


@_named("full-disk")
def _full_disk(game: Game, shot: Shot) -> Iterator[str]:
    node = _node(game, shot)
    ballast = node.logs / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as full:
                if full.errno != errno.ENOSPC:
                    raise
    try:
        _kill_some_worker(game, shot)
        yield node.name
    finally:
        ballast.unlink()


@contextmanager
def _few_files(player: Player) -> Iterator[str]:
    pid = player.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir(f"/proc/{pid}/fd")))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 1, before[1]))
    try:
        yield f"{player.name}, {used + 1} descriptors"
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@_named("few-files-launcher")
def _few_files_launcher(game: Game, shot: Shot) -> Iterator[str]:
    with _few_files(_node(game, shot)) as target:
        _kill_some_worker(game, shot)
        yield target


@_named("few-files-daemon")
def _few_files_daemon(game: Game, shot: Shot) -> Iterator[str]:
    node = _node(game, shot)
    with _few_files(game.leader()) as target:
        node.kill()
        node.start()  # whose new connection there is no descriptor for
        yield target


# ------------------------------------------------------------------------------------------------ strangers

_PHRASES = (
    b"GET / HTTP/1.1\r\nHost: head\r\n\r\n",
    b"POST /rendezvousd.v1.Rendezvous/Join HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,  # HTTP/2, and then a frame of 16 MB of an unknown type
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
)


@_named("garbage")
def _garbage(game: Game, shot: Shot) -> Iterator[str]:
    """Whoever scans ports says these things, over and over."""
    daemon, over = game.leader(), threading.Event()
    chance = random.Random(shot.pick)

    def babble() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.socket() as mouth:
                mouth.settimeout(1.0)
                mouth.connect((daemon.host.address, DAEMON_PORT))
                mouth.sendall(chance.choice((*_PHRASES, chance.randbytes(4096))))
                if chance.random() < 0.5:
                    mouth.recv(1024)

    talkers = [
        threading.Thread(target=lambda: game.outsider.do(babble), name=f"babble {i}", daemon=True) for i in range(4)
    ]
    for talker in talkers:
        talker.start()
    try:
        yield daemon.name
    finally:
        over.set()
        for talker in talkers:
            talker.join()


@_named("idle-connections")
def _idle_connections(game: Game, shot: Shot) -> Iterator[str]:
    daemon = game.leader()
    held: list[socket.socket] = []

    def connect() -> None:
        for _ in range(IDLE_CONNECTIONS):
            held.append(socket.socket())
            held[-1].settimeout(5.0)
            with contextlib.suppress(OSError):
                held[-1].connect((daemon.host.address, DAEMON_PORT))

    try:
        game.outsider.do(connect)
        yield f"{daemon.name}, {len(held)} connections"
    finally:
        for each in held:
            each.close()


def small_disk(directory: Path, mib: int) -> None:
    """A file system of so many MiB on this directory. Only in a cage."""
    from tests.chaos.net import run

    run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "small", str(directory))
