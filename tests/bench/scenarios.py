"""The benchmarks with real workers: each is one story, told to one launcher, and gives seconds."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

import psutil

from tests.bench.harness import Stage, sigkill, stage
from tests.bench.report import Case
from tests.bench.sides import Ours, Side, Torchrun

CALM_S = 1.0  # between a formed world and what is done to it, so that nothing of the forming is measured
BOUND_S = 120.0  # longer is not waited for

Story = Callable[[Side, Stage], float | None]
MakeSide = Callable[[], Side]


def launch(side: Side, scene: Stage, *, nodes: int, workers: int) -> float | None:
    """From starting the launchers to the first all-reduce."""
    if nodes > 1:
        side.prepare(scene)
    began = time.time()
    if nodes == 1:
        side.standalone(scene, workers)
    for index in range(nodes if nodes > 1 else 0):
        side.node(scene, index, str(nodes), workers)
    return _seconds(began, scene.wait_for_world(nodes * workers, began, BOUND_S))


def restart(side: Side, scene: Stage, *, nodes: int, workers: int) -> float | None:
    """From the SIGKILL of one worker to the first all-reduce of the next round. It hits the last rank."""
    _form(side, scene, nodes, str(nodes), workers)
    victim = max(scene.events(), key=lambda event: event.rank)
    killed_at = sigkill(victim.pid)
    return _seconds(killed_at, scene.wait_for_world(nodes * workers, killed_at, BOUND_S))


def node_loss(side: Side, scene: Stage) -> float | None:
    """From the SIGKILL of the last of three launchers (two suffice) to the survivors' first all-reduce.

    A worker of torchrun survives its agent, so it is killed as well: that is how a host dies.
    """
    _form(side, scene, 3, "2:3", 1)
    launcher = psutil.Process(scene.launchers[-1].pid)
    orphans = launcher.children(recursive=True) if side.orphans else []
    killed_at = sigkill(launcher.pid)
    for orphan in orphans:
        orphan.send_signal(signal.SIGKILL)
    return _seconds(killed_at, scene.wait_for_world(2, killed_at, BOUND_S))


def join(side: Side, scene: Stage) -> float | None:
    """From starting a third node of a job on two to the first all-reduce of all three."""
    _form(side, scene, 2, "1:3", 1)
    began = time.time()
    side.node(scene, 2, "1:3")
    return _seconds(began, scene.wait_for_world(3, began, BOUND_S))


def _form(side: Side, scene: Stage, nodes: int, nnodes: str, workers: int) -> None:
    """A job that trains on `nodes` nodes."""
    side.prepare(scene)
    began = time.time()
    for index in range(nodes):
        side.node(scene, index, nnodes, workers)
    scene.need_world(nodes * workers, began)
    time.sleep(CALM_S)


def _seconds(began: float, ended: float | None) -> float | None:
    return None if ended is None else ended - began


SIDES: tuple[MakeSide, ...] = (Torchrun, Ours)
START_SIDES: tuple[MakeSide, ...] = (*SIDES, partial(Ours, name="ours, exec", start_method="exec"))
# After a loss torchrun waits for its "last call", 30 s unless told otherwise: as it comes, and with our settle time.
LOSS_SIDES: tuple[MakeSide, ...] = (*SIDES, partial(Torchrun, name="torchrun, lc=3", conf="last_call_timeout=3"))
# Here the last call only delays the first round, which is not measured.
JOIN_SIDES: tuple[MakeSide, ...] = (
    partial(Torchrun, conf="last_call_timeout=3"),
    Ours,
    partial(Ours, name="ours, grow=now", conf="grow=now"),
)
SHAPES = (("1 node x 2 workers", 1, 2), ("2 nodes x 1 worker", 2, 1))
RESTART_SHAPES = (*SHAPES, ("1 node x 8 workers", 1, 8))

# name: what it measures, its stories by shape, its sides, and how often the peer is measured (None: as often as we are)
BENCHES: dict[str, tuple[str, dict[str, Story], tuple[MakeSide, ...], int | None]] = {
    "launch": (
        "launch -> first all-reduce",
        {shape: partial(launch, nodes=nodes, workers=workers) for shape, nodes, workers in SHAPES},
        START_SIDES,
        None,
    ),
    "restart": (
        "worker SIGKILL -> first all-reduce of the next round",
        {shape: partial(restart, nodes=nodes, workers=workers) for shape, nodes, workers in RESTART_SHAPES},
        START_SIDES,
        None,
    ),
    "node_loss": (
        "launcher SIGKILL -> survivors' first all-reduce",
        {"2:3 nodes x 1 worker": node_loss},
        LOSS_SIDES,
        2,
    ),
    "join": ("a third node is started -> first all-reduce of three", {"1:3 nodes x 1 worker": join}, JOIN_SIDES, None),
}


def run(name: str, repeat: int, peer_repeat: int | None, only: Sequence[str]) -> list[Case]:
    """Measure one benchmark, the sides taking turns. `only`: the names of the sides that play, empty for all."""
    what, stories, makes, default_peer_repeat = BENCHES[name]
    peer_repeat = peer_repeat or default_peer_repeat or repeat
    cases = []
    for shape, story in stories.items():
        case = Case(f"{name}, {shape}: {what}", "s", BOUND_S)
        print(case.title, flush=True)
        for turn in range(max(repeat, peer_repeat)):
            for side in (make() for make in makes):
                if turn >= (peer_repeat if isinstance(side, Torchrun) else repeat):
                    continue
                if only and not any(side.name.startswith(wanted) for wanted in only):
                    continue
                with stage() as scene:
                    case.add(side.name, story(side, scene))
        cases.append(case)
    return cases
