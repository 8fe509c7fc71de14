"""What can go wrong, one function for each kind, by its name."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.sim.world.machines import Process
from tests.sim.world.plan import Fault

if TYPE_CHECKING:
    from tests.sim.world.cluster import Cluster

BUSY_TURN_S = 0.02  # each turn of the loop, on a host that is busy
NOTICED_S = 40.0  # for so long after it, a fault may be why a node was lost
ETCD_WELL_S = 10.0  # so long after a trouble of etcd, commits take the usual time again


def befall(cluster: Cluster, fault: Fault) -> None:
    """Let a fault happen. One that finds nobody to befall does nothing."""
    if fault.what.startswith("etcd-"):
        if cluster.etcd is None:
            return
        until = cluster.world.now + fault.for_s
        cluster.etcd_troubled_until = max(cluster.etcd_troubled_until, until + ETCD_WELL_S)
    FAULTS[fault.what](cluster, fault)


# ------------------------------------------------------------------------------------------------ nodes


def _kill(cluster: Cluster, fault: Fault) -> None:
    node = cluster.nodes[fault.who]
    node.kill()
    cluster.world.after(fault.for_s, cluster.restart_node, node)


def _power(cluster: Cluster, fault: Fault) -> None:
    node = cluster.nodes[fault.who]
    node.lose_power()
    cluster.world.after(fault.for_s, cluster.restart_node, node)


def _leave(cluster: Cluster, fault: Fault) -> None:
    node = cluster.nodes[fault.who]
    cluster.judge.trouble(node.name)
    node.signal(signal.SIGTERM)
    cluster.world.after(fault.for_s + 3.0, cluster.restart_node, node)


def _join(cluster: Cluster, fault: Fault) -> None:
    job = cluster.job_of(fault.who)
    node = cluster.nodes.get(fault.who) or job.add_node(fault.who, {"ahead_s": 5.0, "rate": 1.0})
    node.boot()


def _newcomer(cluster: Cluster, fault: Fault) -> None:
    if fault.who not in cluster.nodes:
        cluster.job.add_node(fault.who, {"ahead_s": 3.0, "rate": 1.0}, fault.other)
    cluster.nodes[fault.who].boot()


def _requeue(cluster: Cluster, fault: Fault) -> None:
    """The scheduler takes a job's nodes away, and starts it again: another attempt of the same submission."""
    job = cluster.jobs[fault.who]
    if job.token:
        job.attempt += 1
    for node in list(job.nodes.values()):
        if node.up:
            node.kill()
            cluster.world.after(fault.for_s, cluster.restart_node, node)


def _slow_reader(cluster: Cluster, fault: Fault) -> None:
    cluster.judge.trouble(fault.who, fault.for_s + NOTICED_S)
    cluster.net.slow_readers[fault.who] = cluster.world.now + fault.for_s


def _aged(cluster: Cluster, fault: Fault) -> None:
    """A node counts as one that has not reached its peers for days, until some time."""
    for daemon in cluster.daemons.values():
        daemon.age(cluster.job_of(fault.who).run_id, fault.who)
    if cluster.world.now < fault.at + fault.for_s and not cluster.peaceful:
        cluster.world.after(0.25, _aged, cluster, fault)


def _stores(cluster: Cluster, fault: Fault) -> None:
    cluster.nodes[fault.who].lose_stores()


def _pause(cluster: Cluster, fault: Fault) -> None:
    node = cluster.nodes[fault.who]
    cluster.judge.trouble(node.name, fault.for_s + NOTICED_S)
    _stop(cluster, node.process, fault.for_s)


def _slow(cluster: Cluster, fault: Fault) -> None:
    node = cluster.nodes[fault.who]
    cluster.judge.trouble(node.name, fault.for_s + NOTICED_S)
    _busy(cluster, node.process, fault.for_s)


# ------------------------------------------------------------------------------------------------ workers


def _fail(cluster: Cluster, fault: Fault) -> None:
    living = _running(cluster, fault)
    if living:
        worker, code = living[fault.number % len(living)], fault.number
        worker.node.training.fail(worker, 0 if code > 128 else code, code - 128 if code > 128 else 0)


def _hang(cluster: Cluster, fault: Fault) -> None:
    for worker in _running(cluster, fault)[:1]:
        worker.node.training.hang(worker)


def _early(cluster: Cluster, fault: Fault) -> None:
    for worker in _running(cluster, fault)[:1]:
        worker.node.training.end(worker)


def _running(cluster: Cluster, fault: Fault) -> list[Any]:
    return [worker for worker in cluster.nodes[fault.who].living() if not worker.told_to_stop]


# ------------------------------------------------------------------------------------------------ the network


def _cut(cluster: Cluster, fault: Fault) -> None:
    cluster.judge.trouble(fault.who, fault.for_s + NOTICED_S)
    cluster.net.cut(fault.who, fault.other, fault.for_s)
    cluster.net.cut(fault.other, fault.who, fault.for_s)


def _one_way(cluster: Cluster, fault: Fault) -> None:
    cluster.judge.trouble(fault.who, fault.for_s + NOTICED_S)
    source, target = (fault.who, fault.other) if fault.number else (fault.other, fault.who)
    cluster.net.cut(source, target, fault.for_s)


def _reset(cluster: Cluster, fault: Fault) -> None:
    cluster.judge.trouble(fault.who, NOTICED_S)
    cluster.net.reset(fault.who, fault.other)


def _unreachable(cluster: Cluster, fault: Fault) -> None:
    cluster.net.cut(fault.who, fault.other, fault.for_s)
    cluster.net.cut(fault.other, fault.who, fault.for_s)


# ------------------------------------------------------------------------------------------------ daemons


def _daemon_kill(cluster: Cluster, fault: Fault) -> None:
    daemon = cluster.daemons[fault.who]
    daemon.kill()
    cluster.world.after(fault.for_s, daemon.boot)


def _daemon_power(cluster: Cluster, fault: Fault) -> None:
    daemon = cluster.daemons[fault.who]
    daemon.lose_power()
    cluster.world.after(fault.for_s, daemon.boot)


def _daemon_end(cluster: Cluster, fault: Fault) -> None:
    daemon = cluster.daemons[fault.who]
    daemon.terminate()
    cluster.world.after(fault.for_s + 2.0, daemon.boot)


def _daemon_pause(cluster: Cluster, fault: Fault) -> None:
    _stop(cluster, cluster.daemons[fault.who].process, fault.for_s)


def _daemon_slow(cluster: Cluster, fault: Fault) -> None:
    for name in cluster.nodes:
        cluster.judge.trouble(name, fault.for_s + NOTICED_S)
    _busy(cluster, cluster.daemons[fault.who].process, fault.for_s)


def _daemon_cut(cluster: Cluster, fault: Fault) -> None:
    others = [*cluster.nodes, *cluster.daemons, *(cluster.etcd.members if cluster.etcd is not None else ())]
    for other in others:
        cluster.judge.trouble(other, fault.for_s + NOTICED_S)
        if other != fault.who:
            cluster.net.cut(fault.who, other, fault.for_s)
            cluster.net.cut(other, fault.who, fault.for_s)


# ------------------------------------------------------------------------------------------------ etcd, operators


def _etcd_late(cluster: Cluster, fault: Fault) -> None:
    assert cluster.etcd is not None
    cluster.etcd.late_until = cluster.world.now + fault.for_s


def _etcd_leaderless(cluster: Cluster, fault: Fault) -> None:
    assert cluster.etcd is not None
    cluster.etcd.lose_leader(fault.for_s)


def _etcd_alone(cluster: Cluster, fault: Fault) -> None:
    assert cluster.etcd is not None
    cluster.etcd.alone[fault.who] = cluster.world.now + fault.for_s


def _etcd_cut(cluster: Cluster, fault: Fault) -> None:
    if fault.number != 1:
        cluster.net.cut(fault.who, fault.other, fault.for_s)
    if fault.number != 2:
        cluster.net.cut(fault.other, fault.who, fault.for_s)


def _operator(cluster: Cluster, fault: Fault) -> None:
    for daemon in cluster.daemons.values():
        daemon.operate(fault.what, cluster.job.run_id, fault.other)


# ------------------------------------------------------------------------------------------------ in general


def _stop(cluster: Cluster, process: Process | None, seconds: float) -> None:
    if process is not None and not process.dead:
        process.pause()
        cluster.net.paused(process)
        cluster.world.after(seconds, process.go_on)


def _busy(cluster: Cluster, process: Process | None, seconds: float) -> None:
    if process is not None and not process.dead:
        process.turn_s = BUSY_TURN_S
        cluster.world.after(seconds, setattr, process, "turn_s", 0.0)


FAULTS: dict[str, Callable[[Cluster, Fault], None]] = {
    "kill": _kill,
    "power": _power,
    "leave": _leave,
    "join": _join,
    "newcomer": _newcomer,
    "requeue": _requeue,
    "slow-reader": _slow_reader,
    "aged": _aged,
    "stores": _stores,
    "pause": _pause,
    "slow": _slow,
    "fail": _fail,
    "hang": _hang,
    "early": _early,
    "cut": _cut,
    "one-way": _one_way,
    "reset": _reset,
    "unreachable": _unreachable,
    "daemon-kill": _daemon_kill,
    "daemon-power": _daemon_power,
    "daemon-end": _daemon_end,
    "daemon-pause": _daemon_pause,
    "daemon-slow": _daemon_slow,
    "daemon-cut": _daemon_cut,
    "etcd-late": _etcd_late,
    "etcd-leaderless": _etcd_leaderless,
    "etcd-alone": _etcd_alone,
    "etcd-cut": _etcd_cut,
    "restart": _operator,
    "close": _operator,
    "remove": _operator,
}
