"""Several daemons on a real etcd, and what may befall them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import grpc

from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.daemon import Daemon
from tests.e2e.kit import Stage, ask, until
from tests.etcd import Cluster, Member, etcd

WHOLE = os.environ.get("FAILOVER") == "all"
STOPPED_S = 30.0 if WHOLE else 0.0  # how long a daemon or member that is stopped stays so, at least


@dataclass
class Site:
    """Daemons on one etcd, in the scope of a stage."""

    stage: Stage
    cluster: Cluster
    daemons: list[Daemon] = field(default_factory=list)

    def daemon(self, listen: str = "127.0.0.1:0") -> Daemon:
        options = ("--backend=etcd", f"--etcd-endpoints={','.join(self.cluster.endpoints)}")
        served = self.stage.daemon(*options, listen=listen)
        self.daemons.append(served)
        return served

    @property
    def endpoint(self) -> str:
        """As launchers are given it: all daemons'."""
        return ",".join(dict.fromkeys(daemon.endpoint for daemon in self.daemons))

    def running(self) -> list[Daemon]:
        return [daemon for daemon in self.daemons if daemon.process.poll() is None]

    def leader(self, *, other_than: Daemon | None = None) -> Daemon:
        """Return the daemon that leads, once one of those that answer does."""
        candidates = [daemon for daemon in self.running() if daemon is not other_than]
        return until(lambda: next(filter(leads, candidates), None), "a daemon leads")


def leads(daemon: Daemon) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return about(daemon).leads
    return False


def about(daemon: Daemon) -> pb.DaemonView:
    """What the daemon says of itself. grpc.RpcError."""
    return ask(daemon.endpoint, "GetDaemon", pb.GetDaemonRequest(), pb.DaemonView, limit_s=2.0)


@contextlib.contextmanager
def site(stage: Stage, *, members: int = 1, daemons: int = 2) -> Iterator[Site]:
    with etcd(stage.directory, members=members) as cluster:
        it = Site(stage, cluster)
        for _ in range(daemons):
            it.daemon()
        if daemons:
            it.leader()
        try:
            yield it
        finally:
            for daemon in it.running():
                daemon.send(signal.SIGCONT)


# ------------------------------------------------------------------------------------------------------- faults

# Each is a scope: the fault is there when it begins; whatever can be repaired is when it ends.


@contextlib.contextmanager
def leader_killed(site: Site) -> Iterator[None]:
    leader = site.leader()
    leader.process.kill()
    yield
    leader.process.wait()
    site.leader()
    site.daemon(listen=leader.endpoint)


@contextlib.contextmanager
def leader_stopped(site: Site) -> Iterator[None]:
    """Until another one leads, and longer: then it goes on, and must notice before it says anything."""
    leader = site.leader()
    leader.send(signal.SIGSTOP)
    until_at = time.monotonic() + STOPPED_S
    try:
        yield
        site.leader(other_than=leader)
        _pass(until_at)
    finally:
        leader.send(signal.SIGCONT)
    until(lambda: not leads(leader), "the old leader has noticed")


@contextlib.contextmanager
def all_daemons_killed(site: Site) -> Iterator[None]:
    killed = site.running()
    for daemon in killed:
        daemon.process.kill()
    for daemon in killed:
        daemon.process.wait()
    yield
    for daemon in killed:
        site.daemon(listen=daemon.endpoint)
    site.leader()


@contextlib.contextmanager
def all_daemons_stopped(site: Site) -> Iterator[None]:
    """Past the leader's lease."""
    stopped = site.running()
    for daemon in stopped:
        daemon.send(signal.SIGSTOP)
    until_at = time.monotonic() + STOPPED_S
    try:
        yield
        until(partial(_leaderless, site), "etcd has ended the leader's lease")
        _pass(until_at)
    finally:
        for daemon in stopped:
            daemon.send(signal.SIGCONT)
    site.leader()


def _pass(until_at: float) -> None:
    """Let the rest of a pause pass, which is what is tested."""
    time.sleep(max(0.0, until_at - time.monotonic()))


def _leaderless(site: Site) -> bool:
    found = site.cluster.members[0].ask("kv/range", key="L3JlbmRlenZvdXNkL2xlYWRlcg==")  # /rendezvousd/leader
    return "kvs" not in found


@contextlib.contextmanager
def _without(site: Site, gone: list[Member]) -> Iterator[None]:
    for member in gone:
        member.kill()
    yield
    for member in gone:
        member.start()
    until(lambda: all(member.answers() for member in gone), "all members are back")
    site.leader()


@contextlib.contextmanager
def etcd_member_killed(site: Site) -> Iterator[None]:
    leader = site.cluster.leader()
    others = [member for member in site.cluster.members if member is not leader]
    with _without(site, others[:1] or [leader]):
        yield


@contextlib.contextmanager
def etcd_leader_killed(site: Site) -> Iterator[None]:
    with _without(site, [site.cluster.leader()]):
        yield


@contextlib.contextmanager
def _frozen(members: list[Member]) -> Iterator[float]:
    """Yields until when they have to stay so, at least."""
    for member in members:
        member.freeze()
    try:
        yield time.monotonic() + STOPPED_S
    finally:
        for member in members:
            member.thaw()


@contextlib.contextmanager
def etcd_member_stopped(site: Site) -> Iterator[None]:
    leader = site.cluster.leader()
    with _frozen([member for member in site.cluster.members if member is not leader][:1]) as until_at:
        yield
        site.leader()
        _pass(until_at)


@contextlib.contextmanager
def etcd_leader_stopped(site: Site) -> Iterator[None]:
    with _frozen([site.cluster.leader()]) as until_at:
        yield
        site.leader()
        _pass(until_at)


@contextlib.contextmanager
def quorum_stopped(site: Site) -> Iterator[None]:
    """Until nobody leads, as the lease of whoever did has run out."""
    with _frozen(site.cluster.members[:2]) as until_at:
        yield
        until(lambda: not any(map(leads, site.running())), "nobody leads without etcd")
        _pass(until_at)
    site.leader()


@contextlib.contextmanager
def quorum_lost(site: Site) -> Iterator[None]:
    """Until the daemons say so."""
    with _without(site, site.cluster.members[:2]):
        yield
        says_so = partial(_says, site, "no quorum")
        until(says_so, "a daemon says that etcd has no quorum", detail=lambda: str(list(map(about, site.running()))))


def _says(site: Site, text: str) -> bool:
    return any(text in about(daemon).explain for daemon in site.running())
