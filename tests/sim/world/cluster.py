"""Nodes, daemons and what befalls them: a plan is carried out, and its history judged."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc

from tests.sim.world import daemons, nodes
from tests.sim.world.daemons import PORT, RUN_ID, Daemon
from tests.sim.world.etcd import Etcd
from tests.sim.world.faults import befall
from tests.sim.world.judge import Judge
from tests.sim.world.machines import World
from tests.sim.world.network import Network
from tests.sim.world.nodes import Node
from tests.sim.world.plan import HEALED_S, QUIET_AT_S, SAFETY_S, Fault, Mode, Plan, plan
from tests.sim.world.training import Training, Worker

SPARE_JOIN_S = 60.0


class Cluster:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        world = self.world = World(plan.seed)
        self.net = Network(world, delay_s=plan.delay_s, loss=plan.loss)
        self.training = Training(world, plan.work_s, plan.stubborn)
        self.judge = Judge(world, self)
        self.etcd = Etcd(world, self.net, plan.members) if plan.members else None
        members = tuple(self.etcd.members) if self.etcd is not None else ()
        names = [f"d{i}" for i in range(plan.daemons)]
        clocks = [{"ahead_s": ahead_s, "rate": rate} for ahead_s, rate in plan.clocks]
        self.daemons = {
            name: Daemon(world, self.net, self.judge, name, members, **clocks[plan.nodes + i])
            for i, name in enumerate(names)
        }
        self.endpoints = ",".join(f"{name}:{PORT}" for name in names)
        self.nodes: dict[str, Node] = {}
        for i in range(plan.nodes):
            self.add_node(f"n{i}", clocks[i])
        self.net.on_data = self.judge.data
        self.net.on_over = self.judge.stream_over
        self.training.on_start = self.judge.worker_started
        self.training.on_meet = self.judge.worker_met
        self.training.on_end = self.judge.worker_ended
        self.training.find_store = self._find_store
        if self.etcd is not None:
            self.etcd.on_write = self.judge.etcd_wrote
        self.peaceful = False
        self.etcd_troubled_until = -1.0

    def add_node(self, name: str, clock: dict[str, float]) -> Node:
        plan = self.plan
        conf = f"join_timeout={SPARE_JOIN_S:g},submission=s,node_name={name},grow={plan.grow}"
        argv = (
            f"--nnodes={plan.size}",
            f"--nproc-per-node={plan.slots}",
            f"--max-restarts={plan.max_restarts}",
            f"--rdzv-endpoint={self.endpoints}",
            f"--rdzv-id={RUN_ID}",
            f"--rdzv-conf={conf}",
            f"--local-addr={name}",
            f"--shutdown-timeout={plan.grace_s:g}",
            "--start-method=exec",
        )
        node = self.nodes[name] = Node(self.world, self.net, self.training, self.judge, name, argv, **clock)
        return node

    def machine(self, name: str) -> Node | None:
        return self.nodes.get(name)

    def node_of(self, uid: str) -> Node | None:
        return self.nodes.get(uid.partition(".")[0])

    def calm_backend(self) -> bool:
        """Whether a commit takes no longer than it usually does."""
        return self.world.now > self.etcd_troubled_until

    def _find_store(self, worker: Worker) -> str:
        host, port = worker.master
        master, net = self.nodes.get(host), self.net
        if master is None or net.is_cut(worker.node.name, host) or net.is_cut(host, worker.node.name):
            return ""
        return master.stores.get(port, "")

    # ------------------------------------------------------------------------------------------------ carrying out

    def begin(self) -> None:
        for daemon in self.daemons.values():
            daemon.boot()
        for at, node in zip(self.plan.arrivals_s, list(self.nodes.values()), strict=True):
            self.world.after(at, node.boot)
        for fault in self.plan.faults:
            self.world.at(fault.at, self._befall, fault)
        if self.plan.mode == "liveness":
            self.world.at(QUIET_AT_S, self._make_peace)

    def _befall(self, fault: Fault) -> None:
        if not self.peaceful:
            self.world.say(f"fault: {fault}")
            befall(self, fault)

    def restart_node(self, node: Node) -> None:
        """As a scheduler would: not when the job is known to be over."""
        if not self.judge.endings:
            node.boot()

    # ------------------------------------------------------------------------------------------------- how it ends

    def _make_peace(self) -> None:
        """From here on all is well: what is broken is mended, and there are nodes enough."""
        self.world.say("peace")
        self.peaceful = True
        self.net.heal()
        if self.etcd is not None:
            self.etcd.heal()
        for process in self.world.processes:
            process.turn_s = 0.0
            if process.paused:
                process.go_on()
        for daemon in self.daemons.values():
            daemon.boot()
        self._fill_up()

    def _fill_up(self) -> None:
        """Start nodes for as long as there are too few for a job that has not ended."""
        self.world.changed = True
        willing = sum(node.up for node in self.nodes.values())
        for i in range(self.plan.min_nodes + 8):
            if willing >= self.plan.min_nodes or self.judge.endings:
                break
            name = f"n{i}"
            node = self.nodes.get(name) or self.add_node(name, {"ahead_s": 7.0, "rate": 1.0})
            if not node.up and not any(said.startswith("job ") for _, said in node.exits):
                node.boot()
                willing += 1
        self.world.after(2.0, self._fill_up)

    def done(self) -> bool:
        return self.judge.started > 0 and not any(node.up for node in self.nodes.values()) and self._nobody_comes()

    def _nobody_comes(self) -> bool:
        return bool(self.judge.endings) or (self.peaceful and bool(self.judge.exits))

    def check_end(self) -> None:
        """In peace a job comes to an end, and to the right one."""
        if self.world.failure:
            return
        up = [node.uid for node in self.nodes.values() if node.up]
        if up:
            self.world.fail("Liveness", f"{', '.join(up)} still there {HEALED_S:g} s after the last fault")
        for uid, code, said in self.judge.exits:
            if said.startswith("job failed"):
                self._check_failure(uid, said)
            elif said != "job succeeded" and not said.startswith("job closed"):
                self.world.fail("Outcome", f"{uid} exits with {code}: {said}")

    def _check_failure(self, uid: str, said: str) -> None:
        failures = sum(1 for book in self.judge.books.values() if book.failures)
        by_worker = "rank" in said and "rounds in a row" not in said and "join timeout" not in said
        if by_worker and failures <= self.plan.max_restarts:
            self.world.fail("Outcome", f"{uid}: {said}, after {failures} rounds with failures")


@dataclass(frozen=True)
class Report:
    plan: Plan
    failure: str
    history: list[str]
    digest: str
    simulated_s: float

    @property
    def rule(self) -> str:
        return self.failure.partition(":")[0]


def run(seed: int, mode: Mode | None = None) -> Report:
    """Run what a seed stands for, and return what came of it."""
    return carry_out(plan(seed, mode))


def carry_out(plan: Plan) -> Report:
    with _patched():
        cluster = Cluster(plan)
        world = cluster.world
        nodes._worlds.append(world)
        try:
            with _loud(world):
                cluster.begin()
                if plan.mode == "safety":
                    world.run(SAFETY_S, cluster.done)
                else:
                    world.run(QUIET_AT_S + HEALED_S, cluster.done)
                    cluster.check_end()
                world.end()
        finally:
            nodes._worlds.pop()
    digest = hashlib.sha256("\n".join(sorted(world.history)).encode()).hexdigest()
    return Report(plan, world.failure, world.history, digest, world.now)


def shrink(report: Report) -> Report:
    """Return the report of the same failure with as few faults as can be found."""
    best = report
    size = max(1, len(best.plan.faults) // 2)
    while True:
        start, shorter = 0, False
        while start < len(best.plan.faults):
            faults = best.plan.faults[:start] + best.plan.faults[start + size :]
            tried = carry_out(replace(best.plan, faults=faults))
            if tried.rule == best.rule:
                best, shorter = tried, True
            else:
                start += size
        if size == 1 and not shorter:
            return best
        size = max(1, size // 2)


def story(report: Report, lines: int = 60) -> str:
    """Return what to print of a failure: what happened, the end of its history, and how to see it again."""
    shortest = shrink(report)
    tail = shortest.history if len(shortest.history) <= lines else ["...", *shortest.history[-lines:]]
    return "\n".join(
        [
            f"{report.plan}",
            f"FAILED {report.failure}",
            f"the shortest story that fails so ({shortest.failure}):",
            *(f"  {fault}" for fault in shortest.plan.faults),
            *tail,
            f"again: make sim SEED={report.plan.seed}",
        ]
    )


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Put simulated things where our code touches the machine, in this scope."""
    made = [*nodes.patches(), *daemons.patches(), (grpc.aio, "insecure_channel", _channel)]
    before = [(where, name, getattr(where, name)) for where, name, _ in made]
    for where, name, what in made:
        setattr(where, name, what)
    collects = gc.isenabled()
    gc.disable()  # a run's garbage is one piece, and goes after it
    try:
        yield
    finally:
        for where, name, what in before:
            setattr(where, name, what)
        if collects:
            gc.enable()


def _channel(target: str, options: Any = None, **more: Any) -> Any:
    world = nodes._worlds[-1]
    assert world.current is not None
    return world.current.owner.net.channel(target, options, **more)


class _Loud(logging.Handler):
    """An error that is logged is a bug, whoever survives it."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else ""
        self._world.fail("bug", f"{record.name}: {record.getMessage()} {error!r}")


@contextlib.contextmanager
def _loud(world: World) -> Iterator[None]:
    handler = _Loud(world)
    loggers = [logging.getLogger(name) for name in ("rendezvousd", "rdzv")]
    before = [(logger, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, propagate, level in before:
            logger.removeHandler(handler)
            logger.propagate, logger.level = propagate, level
