"""What durability costs, and how soon the nodes are attended again when a daemon dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from rendezvousd.backends.etcd import EtcdBackend
from rendezvousd.backends.etcd_client import EtcdClient
from rendezvousd.core.machine import step
from rendezvousd.core.model import JobSpec, JobUid
from rendezvousd.core.rules.admit import found
from rendezvousd.etcd.v1 import etcd_pb2 as pb
from tests.bench import scale
from tests.bench.attendee import Attendee, attending, until
from tests.bench.harness import Stage, sigkill, stage, start_daemon
from tests.bench.report import Case
from tests.etcd import Cluster, connected, etcd
from tests.ports import free_ports
from tests.wire.test_etcd_backend import lead, says

NODES = 8
COMMITS = 100
BOUND_S = 60.0


def on_etcd(cluster: Cluster) -> tuple[str, ...]:
    return ("--backend=etcd", f"--etcd-endpoints={','.join(cluster.endpoints)}")


async def _again(case: Case, side: str, attendees: list[Attendee], since: float) -> None:
    """Note when the last node was attended by another term, and whether any had to start its worker anew."""
    await until(lambda: all(a.attended_since(since) for a in attendees), "all are attended again")
    last = max(a.attended_since(since) or 0.0 for a in attendees)
    case.add(side, last - since)
    restarted = sum(len(a.started) > 1 for a in attendees)
    if restarted:
        print(f"    {restarted} of {len(attendees)} nodes started their worker anew")


def takeover(repeat: int) -> list[Case]:
    """The leading one of two daemons on etcd is killed."""
    case = Case(f"takeover, {NODES} nodes: leader SIGKILL -> all attended by the next leader (TTL 2 s)", "s", BOUND_S)

    async def story(scene: Stage, cluster: Cluster) -> None:
        ports = free_ports(2)
        leader, standby = start_daemon(scene, ports[0], *on_etcd(cluster)), None
        async with attending([f"127.0.0.1:{port}" for port in ports], NODES) as attendees:
            for turn in range(repeat):
                standby = start_daemon(scene, ports[(turn + 1) % 2], *on_etcd(cluster))
                await asyncio.sleep(1.0 + turn % 10 / 10)  # it sees that another one leads; any phase of the lease
                since = sigkill(leader.pid)
                leader.wait()
                await _again(case, "ours", attendees, since)
                leader = standby

    with stage() as scene, etcd(scene.folder) as cluster:
        asyncio.run(story(scene, cluster))
    return [case]


def adopt(repeat: int) -> list[Case]:
    """A daemon with its state in memory is killed and started again."""
    case = Case(f"adopt, {NODES} nodes: a memory daemon that was killed listens again -> all attended", "s", BOUND_S)

    async def story(scene: Stage) -> None:
        (port,) = free_ports(1)
        daemon = start_daemon(scene, port)
        async with attending([f"127.0.0.1:{port}"], NODES) as attendees:
            for _ in range(repeat):
                sigkill(daemon.pid)
                daemon.wait()
                daemon = start_daemon(scene, port)
                await _again(case, "ours", attendees, time.time())

    with stage() as scene:
        asyncio.run(story(scene))
    return [case]


def commit(repeat: int) -> list[Case]:
    """A node joins a job of so many: one write of the record, against a bare transaction that puts as many bytes."""
    cases = []
    for nodes in (2, 256, 1000):
        case = Case(f"commit of a join, {nodes} nodes, against a bare transaction (mean of {COMMITS})", "ms", BOUND_S)
        for _ in range(repeat):
            with stage() as scene, etcd(Path(scene.folder)) as cluster:
                bare, ours = asyncio.run(_commits(cluster, nodes))
            case.add("bare", bare)
            case.add("ours", ours)
        cases.append(case)
        print(f"    {case.median('ours') / case.median('bare'):.2f} x bare")
    return cases


async def _commits(cluster: Cluster, nodes: int) -> tuple[float, float]:
    """Return the mean milliseconds of a bare transaction and of ours, taking turns."""
    spec = JobSpec(min_nodes=nodes + COMMITS + 1, max_nodes=nodes + COMMITS + 1)
    async with connected(cluster.access()) as client:
        fence = await lead(client)
        backend = EtcdBackend(client, fence)
        await backend.load(0.0)
        job = found("run", says(0, spec), uid=JobUid("u"), seed="s", now=0.0)
        for number in range(nodes):
            job = step(job, says(number, spec), 0.0)
        at = await backend.write(job, expected=0)
        sizes: list[int] = []
        spent = [0.0, 0.0]
        for number in range(nodes, nodes + COMMITS):
            job = step(job, says(number, spec), 0.0)
            before = time.perf_counter()
            at = await backend.write(job, expected=at)
            spent[1] += time.perf_counter() - before
            sizes = await _size(client, at)
            put = [pb.RequestOp(put=pb.PutRequest(key=b"/bare/%d" % i, value=b"x" * n)) for i, n in enumerate(sizes)]
            compare = pb.Compare(target=pb.Compare.CREATE, key=fence.key, create_revision=fence.revision)
            before = time.perf_counter()
            await client.txn(pb.TxnRequest(compare=[compare], success=put))
            spent[0] += time.perf_counter() - before
        return spent[0] / COMMITS * 1000, spent[1] / COMMITS * 1000


async def _size(client: EtcdClient, revision: int) -> list[int]:
    """Return the sizes of what was put at this revision."""
    found = await client.range(b"/rendezvousd/jobs/", b"/rendezvousd/jobs0")
    return [len(kv.value) for kv in found.kvs if kv.mod_revision == revision]


def etcd_rounds(repeat: int) -> list[Case]:
    """Rounds of 256 simulated nodes, each step of which is durable."""
    first = Case("256 simulated nodes on etcd: first round", "s", BOUND_S)
    following = Case("256 simulated nodes on etcd: next round", "s", BOUND_S)
    for _ in range(repeat):
        with stage() as scene, etcd(Path(scene.folder)) as cluster:
            figures = scale.measure("daemon", 256, 1.0, on_etcd(cluster))
        first.add("ours", figures["first_s"])
        following.add("ours", figures["next_s"])
    return [first, following]


BENCHES: dict[str, Callable[[int], list[Case]]] = {
    "takeover": takeover,
    "adopt": adopt,
    "commit": commit,
    "etcd_rounds": etcd_rounds,
}
