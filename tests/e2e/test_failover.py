"""There is no process whose death ends a job: daemons and members of etcd are killed and stopped in each of its phases.

The quick share of the matrix runs always; all of it, and who is stopped for 30 s, with FAILOVER=all.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.e2e import site as sites
from tests.e2e.history import check, rounds
from tests.e2e.kit import TOGETHER, Launcher, Stage, until
from tests.e2e.site import Site, about, leads, site

Fault = Callable[[Site], contextlib.AbstractContextManager[None]]

OF_DAEMONS: list[Fault] = [
    sites.leader_killed,
    sites.leader_stopped,
    sites.all_daemons_killed,
    sites.all_daemons_stopped,
]
OF_ETCD: list[Fault] = [
    sites.etcd_member_killed,
    sites.etcd_member_stopped,
    sites.etcd_leader_killed,
    sites.etcd_leader_stopped,
    sites.quorum_lost,
    sites.quorum_stopped,
]
PHASES = ("gathering", "running", "worker dies", "node dies", "ending")
QUICK = {
    ("leader_killed", "gathering"),
    ("leader_killed", "worker dies"),
    ("leader_killed", "ending"),
    ("leader_stopped", "running"),
    ("leader_stopped", "node dies"),
    ("all_daemons_killed", "worker dies"),
    ("all_daemons_stopped", "running"),
    ("etcd_member_killed", "worker dies"),
    ("etcd_leader_killed", "running"),
    ("etcd_leader_stopped", "node dies"),
    ("quorum_lost", "worker dies"),
}
CHOSEN = [
    pytest.param(fault, phase, 3 if fault in OF_ETCD else 1, id=f"{fault.__name__}-{phase}")
    for fault in [*OF_DAEMONS, *OF_ETCD]
    for phase in PHASES
    if sites.WHOLE or (fault.__name__, phase) in QUICK
]


@pytest.mark.parametrize(("fault", "phase", "members"), CHOSEN)
def test_the_job_goes_on_and_forms_no_more_rounds_than_it_must(
    stage: Stage, fault: Fault, phase: str, members: int
) -> None:
    with site(stage, members=members) as at:
        formed, codes = STORIES[phase](at, fault)
        assert [node.ends() for node in stage.launchers] == codes
    check(stage.progress())
    assert len(rounds(stage.progress())) == formed, "rounds were formed that nothing called for"


def launch(at: Site, name: str, nnodes: str = "2", *, restarts: int = 1) -> Launcher:
    together = {"last_call_timeout": "60"}  # the first round is of both, however late one of them comes up
    return at.stage.launch(name, nnodes, restarts=restarts, endpoint=at.endpoint, conf=together)


def gathering(at: Site, fault: Fault) -> tuple[int, list[int]]:
    """One node waits for the other when it happens."""
    launch(at, "a").says("waiting: 1 of 2 nodes")
    with fault(at):
        launch(at, "b")
    at.stage.world(2)
    at.stage.order("finish")
    return 1, [0, 0]


def running(at: Site, fault: Fault) -> tuple[int, list[int]]:
    """Nobody's workers notice."""
    launch(at, "a"), launch(at, "b")
    world = at.stage.world(2)
    with fault(at):
        at.stage.goes_on(world)
    at.stage.goes_on(world)
    at.stage.order("finish")
    return 1, [0, 0]


def worker_dies(at: Site, fault: Fault) -> tuple[int, list[int]]:
    """At the same time. What the launcher could not tell at once it tells later."""
    launch(at, "a"), launch(at, "b")
    world = at.stage.world(2)
    os.kill(world.pids[0], signal.SIGKILL)
    with fault(at):
        pass
    again = at.stage.world(2, after=world)
    assert (again.restart, set(again.nodes)) == (1, {"a", "b"})
    at.stage.order("finish")
    return 2, [0, 0]


def node_dies(at: Site, fault: Fault) -> tuple[int, list[int]]:
    """At the same time. It costs no restart."""
    launch(at, "a", "1:2", restarts=0)
    doomed = launch(at, "b", "1:2", restarts=0)
    world = at.stage.world(2)
    doomed.kill()
    with fault(at):
        pass
    again = at.stage.world(1, after=world)
    assert (again.restart, again.nodes) == (0, ("a",))
    at.stage.order("finish")
    return 2, [0, -signal.SIGKILL]


def ending(at: Site, fault: Fault) -> tuple[int, list[int]]:
    """One node's workers have succeeded when it happens, the other's do so afterwards."""
    launch(at, "a"), launch(at, "b")
    at.stage.world(2)
    at.stage.order("finish-a")
    until(lambda: at.stage.progress(event="end", node="a"), "a's worker has ended")
    with fault(at):
        pass
    at.stage.order("finish-b")
    return 1, [0, 0]


STORIES = {
    "gathering": gathering,
    "running": running,
    "worker dies": worker_dies,
    "node dies": node_dies,
    "ending": ending,
}


def test_training_together_goes_on_whatever_daemon_leads(stage: Stage) -> None:
    """With real collectives: three times the leader is killed, and then a worker."""
    with site(stage, daemons=3) as at:
        for name in ("a", "b"):
            stage.launch(name, "2", restarts=1, endpoint=at.endpoint, worker=TOGETHER)
        world = stage.world(2)
        for _ in range(3):
            with sites.leader_killed(at):
                stage.goes_on(world)
        os.kill(world.pids[1], signal.SIGKILL)
        again = stage.world(2, after=world)
        assert again.restart == 1
        stage.order("finish")
        assert [node.ends() for node in stage.launchers] == [0, 0]
    check(stage.progress())


def test_what_a_job_counts_in_its_store_is_counted_once_whatever_daemon_leads(stage: Stage) -> None:
    with site(stage, daemons=3) as at:
        for name in ("a", "b"):
            stage.launch(name, "2", restarts=1, endpoint=at.endpoint, worker=("-m", "tests.e2e.workers.counter"))
        world = stage.world(2)
        for fault in (sites.leader_killed, sites.leader_stopped, sites.leader_killed):
            with fault(at):
                stage.goes_on(world)
        os.kill(world.pids[0], signal.SIGKILL)
        stage.world(2, after=world)
        stage.order("finish")
        assert [node.ends() for node in stage.launchers] == [0, 0]
    counted = stage.progress(event="counted")
    counts = sorted(event["count"] for event in counted)
    # The killed worker may have been counted and not have come to say so.
    assert len(set(counts)) == len(counts)
    assert counts[-1] <= len(counts) + 1
    assert all(event["current"] for event in counted if event["round"] == max(e["round"] for e in counted))


def test_a_standby_says_who_leads_and_a_launcher_finds_it(stage: Stage) -> None:
    with site(stage) as at:
        leader = at.leader()
        (standby,) = [daemon for daemon in at.daemons if daemon is not leader]
        until(lambda: about(standby).leader, "the standby knows who leads")
        view = about(standby)
        assert (view.leads, view.leader, view.backend) == (False, leader.endpoint, "etcd")
        assert view.explain == f"the daemon at {leader.endpoint} leads"
        assert about(leader).daemon_id == view.daemon_id
        node = stage.launch("a", endpoint=f"{standby.endpoint},{leader.endpoint}")
        stage.world(1)
        stage.order("finish")
        assert node.ends() == 0


def test_a_standby_lives_and_does_not_serve(stage: Stage) -> None:
    """What a load balancer sends callers by, and what an orchestrator restarts a daemon by."""
    with site(stage) as at:
        leader = at.leader()
        (standby,) = [daemon for daemon in at.daemons if daemon is not leader]
        until(lambda: about(standby).leader, "the standby knows who leads")
        wanted = {"": leader, "rendezvousd.v1.Rendezvous": leader, "rendezvousd.v1.Store": leader}
        for service, serving in wanted.items():
            for daemon in (leader, standby):
                assert healthy(daemon.endpoint, service) == (daemon is serving), service
        assert healthy(leader.endpoint, "liveness")
        assert healthy(standby.endpoint, "liveness")


def healthy(endpoint: str, service: str) -> bool:
    with grpc.insecure_channel(endpoint) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = check(health_pb2.HealthCheckRequest(service=service), timeout=30)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextlib.contextmanager
def hosts(stage: Stage, name: str, *addresses: str) -> Iterator[list[str]]:
    """What a command begins with that is to know this name by all these addresses."""
    table = stage.directory / "hosts"
    table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address in addresses))
    yield ["unshare", "--mount", "sh", "-c", f'mount --bind {table} /etc/hosts && exec "$@"', "sh"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may let a process see another /etc/hosts")
def test_a_name_with_several_addresses_is_followed_to_the_daemon_that_leads(stage: Stage) -> None:
    with site(stage, daemons=0) as at, hosts(stage, "head.test", "127.0.0.1", "127.0.0.2") as beginning:
        first = at.daemon("127.0.0.1:0")
        at.leader()
        second = at.daemon(f"127.0.0.2:{first.port}")
        nodes = [stage.launch(name, "2", endpoint=f"head.test:{first.port}", before=beginning) for name in ("a", "b")]
        world = stage.world(2)
        first.process.kill()
        until(lambda: leads(second), "the other one leads")
        stage.goes_on(world)
        stage.order("finish")
        assert [node.ends() for node in nodes] == [0, 0]
