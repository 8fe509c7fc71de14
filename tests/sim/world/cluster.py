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
from tests.sim.world.daemons import PORT, Daemon
from tests.sim.world.etcd import Etcd
from tests.sim.world.faults import befall
from tests.sim.world.jobs import JobRun, Judges
from tests.sim.world.machines import World
from tests.sim.world.network import Network
from tests.sim.world.nodes import Node
from tests.sim.world.plan import HEALED_S, Fault, Mode, Plan
from tests.sim.world.wide import plan


class Cluster:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        world = self.world = World(plan.seed)
        self.net = Network(world, delay_s=plan.delay_s, loss=plan.loss)
        self.etcd = Etcd(world, self.net, plan.members) if plan.members else None
        members = tuple(self.etcd.members) if self.etcd is not None else ()
        names = [f"d{i}" for i in range(plan.daemons)]
        self.endpoints = ",".join(f"{name}:{PORT}" for name in names)
        self.peaceful = False
        self.etcd_troubled_until = -1.0
        self.nodes: dict[str, Node] = {}
        self.jobs: dict[str, JobRun] = {}
        for each in (plan, *([plan.wide.beside] if plan.wide.beside is not None else [])):
            self.jobs[each.run_id] = JobRun(self, world, each)
        self.job = self.jobs[plan.run_id]  # the one that most faults are for
        self.judge = Judges(world, self.jobs, self.net)
        settles_s = plan.wide.settles_s or (None,) * plan.daemons
        self.daemons = {
            name: Daemon(world, self.net, self.judge, name, members, settle_s, ahead_s=ahead_s, rate=rate)
            for name, settle_s, (ahead_s, rate) in zip(names, settles_s, plan.clocks[plan.nodes :], strict=True)
        }
        if self.etcd is not None:
            self.etcd.on_write = self.judge.etcd_wrote
            self.etcd.limit(plan.wide.operations_max)
            self.etcd.compacts = plan.wide.compacts

    def machine(self, name: str) -> Node | None:
        return self.nodes.get(name)

    def node_of(self, uid: str) -> Node | None:
        return self.nodes.get(uid.partition(".")[0])

    def job_of(self, name: str) -> JobRun:
        """Return the job whose nodes are called so."""
        return next((job for job in self.jobs.values() if name.startswith(job.plan.names)), self.job)

    def calm_backend(self) -> bool:
        """Whether a commit takes no longer than it usually does."""
        return self.world.now > self.etcd_troubled_until

    # ------------------------------------------------------------------------------------------------ carrying out

    def begin(self) -> None:
        for daemon in self.daemons.values():
            daemon.boot()
        for job in self.jobs.values():
            job.begin()
            for fault in job.plan.faults:
                self.world.at(fault.at, self._befall, fault)
        if self.plan.mode == "liveness":
            self.world.at(self.plan.wide.quiet_at_s, self._make_peace)

    def _befall(self, fault: Fault) -> None:
        if not self.peaceful:
            self.world.say(f"fault: {fault}")
            befall(self, fault)

    def restart_node(self, node: Node) -> None:
        """As a scheduler would: not when the job is known to be over."""
        if not node.judge.endings:
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
        self.world.changed = True
        for job in self.jobs.values():
            job.fill_up()
        self.world.after(2.0, self._fill_up)

    def done(self) -> bool:
        return all(job.done() for job in self.jobs.values())

    def check_end(self) -> None:
        """In peace every job comes to an end, and to the right one."""
        for job in self.jobs.values():
            if not self.world.failure:
                job.check_end(HEALED_S)


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
    with _patched(plan):
        cluster = Cluster(plan)
        world = cluster.world
        nodes._worlds.append(world)
        try:
            with _loud(world):
                cluster.begin()
                world.run(plan.lasts_s, cluster.done)
                if plan.mode == "liveness":
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
def _patched(plan: Plan) -> Iterator[None]:
    """Put simulated things where our code touches the machine, in this scope."""
    made = [*nodes.patches(), *daemons.patches(plan.wide), (grpc.aio, "insecure_channel", _channel)]
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
