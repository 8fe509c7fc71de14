"""Nodes, daemons and what befalls them: a plan is carried out, and its history judged."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc

from tests.sim.world import daemons, nodes
from tests.sim.world.daemons import PORT, RUN_ID, Daemon
from tests.sim.world.etcd import Etcd
from tests.sim.world.judge import Judge
from tests.sim.world.machines import World
from tests.sim.world.network import Network
from tests.sim.world.nodes import Node
from tests.sim.world.plan import HEALED_S, QUIET_AT_S, SAFETY_S, Fault, Mode, Plan, plan
from tests.sim.world.training import Training, Worker

BUSY_TURN_S = 0.02  # each turn of the loop, on a host that is busy
NOTICED_S = 40.0  # for so long after it, a fault may be why a node was lost
SUCCESSOR_S = (0.5, 5.0)  # a scheduler starts a launcher again
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
            self._add_node(f"n{i}", clocks[i])
        self._chance = world.random("cluster")
        self.net.on_data = self.judge.data
        self.net.on_over = self.judge.stream_over
        self.training.on_start = self.judge.worker_started
        self.training.on_meet = self.judge.worker_met
        self.training.on_end = self.judge.worker_ended
        self.training.find_store = self._find_store
        if self.etcd is not None:
            self.etcd.on_write = self.judge.etcd_wrote
        self.peaceful = False
        self._troubled_etcd_until = -1.0

    def _add_node(self, name: str, clock: dict[str, float]) -> Node:
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
        return self.world.now > self._troubled_etcd_until

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
        if self.peaceful:
            return
        self.world.say(f"fault: {fault}")
        if fault.what.startswith("etcd"):
            self._befall_etcd(fault)
        elif fault.who in self.daemons and fault.what.startswith("daemon-"):
            self._befall_daemon(self.daemons[fault.who], fault)
        elif fault.what in ("restart", "close", "remove"):
            for daemon in self.daemons.values():
                daemon.operate(fault.what, fault.other)
        elif fault.what == "join":
            node = self.nodes.get(fault.who) or self._add_node(fault.who, {"ahead_s": 5.0, "rate": 1.0})
            node.boot()
        else:
            self._befall_node(self.nodes[fault.who], fault)

    def _befall_node(self, node: Node, fault: Fault) -> None:
        world, net, process = self.world, self.net, node.process
        living = [w for w in node.living() if not w.told_to_stop]
        match fault.what:
            case "kill" | "power":
                (node.kill if fault.what == "kill" else node.lose_power)()
                world.after(fault.for_s, self._restart_node, node)
            case "fail" if living:
                worker = living[fault.number % len(living)]
                signalled = fault.number > 128
                self.training.fail(worker, 0 if signalled else fault.number, fault.number - 128 if signalled else 0)
            case "hang" if living:
                self.training.hang(living[0])
            case "early" if living:
                self.training.end(living[0])
            case "leave":
                node.signal(signal.SIGTERM)
                world.after(fault.for_s + 3.0, self._restart_node, node)
            case "stores":
                node.lose_stores()
            case "pause" if process is not None and node.up:
                self._pause(node.name, process, fault.for_s)
            case "slow" if process is not None and node.up:
                self._slow(node.name, process, fault.for_s)
            case "reset":
                self.judge.trouble(node.name, NOTICED_S)
                net.reset(node.name, fault.other)
            case "cut" | "one-way" | "unreachable":
                if fault.what != "unreachable":
                    self.judge.trouble(node.name, fault.for_s + NOTICED_S)
                if fault.what != "one-way" or fault.number:
                    net.cut(node.name, fault.other, fault.for_s)
                if fault.what != "one-way" or not fault.number:
                    net.cut(fault.other, node.name, fault.for_s)
            case _:
                pass

    def _restart_node(self, node: Node) -> None:
        """As a scheduler would: not when the job is known to be over."""
        if not self.judge.endings:
            node.boot()

    def _befall_daemon(self, daemon: Daemon, fault: Fault) -> None:
        world, process = self.world, daemon.process
        match fault.what:
            case "daemon-kill" | "daemon-power" | "daemon-end":
                {"daemon-kill": daemon.kill, "daemon-power": daemon.lose_power}.get(fault.what, daemon.terminate)()
                world.after(fault.for_s, daemon.boot)
            case "daemon-pause" if process is not None and daemon.up:
                self._pause(daemon.name, process, fault.for_s)
            case "daemon-slow" if process is not None and daemon.up:
                for node in self.nodes.values():
                    self.judge.trouble(node.name, fault.for_s + NOTICED_S)
                self._slow(daemon.name, process, fault.for_s)
            case "daemon-cut":
                others = [*self.nodes, *self.daemons, *(self.etcd.members if self.etcd is not None else ())]
                for other in others:
                    self.judge.trouble(other, fault.for_s + NOTICED_S)
                    if other != daemon.name:
                        self.net.cut(daemon.name, other, fault.for_s)
                        self.net.cut(other, daemon.name, fault.for_s)
            case _:
                pass

    def _befall_etcd(self, fault: Fault) -> None:
        etcd, net = self.etcd, self.net
        if etcd is None:
            return
        now = self.world.now
        self._troubled_etcd_until = max(self._troubled_etcd_until, now + fault.for_s + 10.0)
        match fault.what:
            case "etcd-late":
                etcd.late_until = now + fault.for_s
            case "etcd-leaderless":
                etcd.lose_leader(fault.for_s)
            case "etcd-alone":
                etcd.alone[fault.who] = now + fault.for_s
            case "etcd-cut":
                if fault.number != 1:
                    net.cut(fault.who, fault.other, fault.for_s)
                if fault.number != 2:
                    net.cut(fault.other, fault.who, fault.for_s)

    def _pause(self, machine: str, process: Any, seconds: float) -> None:
        if machine in self.nodes:
            self.judge.trouble(machine, seconds + NOTICED_S)
        process.pause()
        self.net.paused(process)
        self.world.after(seconds, process.go_on)

    def _slow(self, machine: str, process: Any, seconds: float) -> None:
        if machine in self.nodes:
            self.judge.trouble(machine, seconds + NOTICED_S)
        process.turn_s = BUSY_TURN_S
        self.world.after(seconds, setattr, process, "turn_s", 0.0)

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
            node = self.nodes.get(name) or self._add_node(name, {"ahead_s": 7.0, "rate": 1.0})
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
        if "rank" in said and "rounds in a row" not in said and "join timeout" not in said:
            if failures <= self.plan.max_restarts:
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
