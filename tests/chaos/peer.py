"""The same faults, done to stock torchrun and to rdzvrun, in the same run: what each survives, and how long it takes.

    python -m tests.chaos.peer [--only NAME]... [--repeat N] [--bound S]

Three hosts, each a network namespace with one worker; two suffice (--nnodes=2:3). torchrun's store is on the first of
them, where its users have it, and our daemon is on a fourth host. Everything else is as it comes: torchrun with c10d,
with and without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. The workers train with DistributedDataParallel on gloo, have done
so for a minute, and give up on a collective after 20 s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.report import machine
from tests.chaos import cage, net
from tests.chaos.game import end_quietly
from tests.chaos.history import Reader
from tests.chaos.players import DAEMON_PORT, Launcher, NotReady, Player, command_path, daemon_on, wait_until

HOSTS = {"n0": 2, "n1": 3, "n2": 4, "head1": 11}
FORM_S = 180.0
CALM_S = 60.0  # of training before the fault: most jobs are older when something happens to them
PORT = 29500
OWN_STORE = "torchrun, own store"  # with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
OURS = "rdzvrun"
RESTARTS = 20


@dataclass
class Job:
    """One launcher's job in one scenario."""

    side: str
    directory: Path
    hosts: dict[str, net.Host]
    port: int
    nodes: list[Launcher] = field(default_factory=list)
    daemon: Player | None = None
    noted: str = ""  # what the time does not say

    def __post_init__(self) -> None:
        self.history = self.directory / "history.jsonl"
        self.history.touch()
        self.reader = Reader(self.history)
        self.checkpoints = self.directory / "checkpoints"
        self.checkpoints.mkdir()
        if self.side == OURS:
            self.daemon = daemon_on(self.hosts["head1"], self.directory, None)
            self.daemon.start()
            self.daemon.await_port(DAEMON_PORT)

    def launch(self, name: str) -> Launcher:
        """Start this host's launcher."""
        host = self.hosts[name]
        common = ["--nnodes=2:3", "--nproc-per-node=1", f"--max-restarts={RESTARTS}", "--rdzv-id=job"]
        if self.daemon is not None:
            endpoint = f"--rdzv-endpoint={self.daemon.host.address}:{DAEMON_PORT}"
            command = [command_path("rdzvrun"), *common, endpoint, f"--rdzv-conf=node_name={name}"]
        else:
            endpoint = f"--rdzv-endpoint={self.hosts['n0'].address}:{self.port}"
            conf = f"--rdzv-conf=is_host={int(name == 'n0')}"
            command = [command_path("torchrun"), *common, "--rdzv-backend=c10d", endpoint, conf]
            command.append(f"--local-addr={host.address}")
        files = (self.history, self.checkpoints, self.directory / "finish")
        node = Launcher(host, self.directory, command, files)
        if self.side == OWN_STORE:
            node.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        node.start()
        self.nodes.append(node)
        return node

    def trains(self, size: int, since: float, within_s: float) -> float | None:
        """When the first world of this size had made a step that it began after `since`; None: not in time."""
        found: list[float] = []

        def look() -> bool:
            self.reader.more()
            worlds = {e["pid"]: (e["world_uid"], e["world"]) for e in self.reader.events if e["event"] == "resume"}
            ranks: dict[str, dict[int, float]] = {}
            for event in self.reader.events:
                if event["event"] == "step" and event["t0"] > since and worlds[event["pid"]][1] == size:
                    ranks.setdefault(worlds[event["pid"]][0], {}).setdefault(event["rank"], event["t"])
            found.extend(max(ends.values()) for ends in ranks.values() if len(ends) == size)
            return bool(found)

        return min(found) if wait_until(look, within_s) else None

    def steps_since(self, since: float) -> int:
        self.reader.more()
        return sum(event["event"] == "step" and event["t0"] > since for event in self.reader.events)

    def form(self, *names: str) -> None:
        """Start these, and wait until all of them train. NotReady."""
        began_at = time.monotonic()
        for name in names:
            self.launch(name)
        if self.trains(len(names), began_at, FORM_S) is None:
            raise NotReady(f"{self.side}: no first world; {self.directory}")
        time.sleep(CALM_S)

    def kill_host(self, name: str) -> None:
        """All its processes in one instant, and nothing is heard of it any more."""
        self.hosts[name].drop("both")
        self._kill_all(name)

    def _kill_all(self, name: str) -> None:
        for node in self.nodes:
            if node.name == name:
                node.kill_everything()

    def clear(self) -> None:
        for node in self.nodes:
            node.kill_everything()
        if self.daemon is not None and self.daemon.alive:
            self.daemon.kill()
        for host in self.hosts.values():
            host.mend()


Scenario = Callable[[Job, float], float | None]


def worker_killed(job: Job, bound_s: float) -> float | None:
    job.form("n0", "n1", "n2")
    return _after(job, bound_s, 3, job.nodes[2].find("worker")[0].kill)


def worker_stopped(job: Job, bound_s: float) -> float | None:
    job.form("n0", "n1", "n2")
    return _after(job, bound_s, 3, job.nodes[2].find("worker")[0].suspend)


def launcher_killed(job: Job, bound_s: float) -> float | None:
    job.form("n0", "n1", "n2")
    workers = job.nodes[2].find("worker")
    taken_s = _after(job, bound_s, 2, job.nodes[2].kill)
    if any(worker.is_running() for worker in workers):
        job.noted = "its worker runs on"
    return taken_s


def host_dies(job: Job, bound_s: float) -> float | None:
    job.form("n0", "n1", "n2")
    return _after(job, bound_s, 2, lambda: job.kill_host("n2"))


def node_cut_off(job: Job, bound_s: float) -> float | None:
    job.form("n0", "n1", "n2")
    return _after(job, bound_s, 2, lambda: job.hosts["n2"].drop("both"))


def coordinator_dies(job: Job, bound_s: float) -> float | None:
    """The host of torchrun's store, which is a node; that of our daemon, which is none."""
    job.form("n0", "n1", "n2")
    if job.daemon is None:
        return _after(job, bound_s, 2, lambda: job.kill_host("n0"))
    daemon = job.daemon

    def die() -> None:
        daemon.host.drop("both")
        daemon.kill()

    taken_s = _after(job, bound_s, 3, die)
    pids = {event["pid"] for event in job.reader.events if event["event"] == "start"}
    job.noted = "no worker notices" if len(pids) == 3 else ""
    return taken_s


def third_node_joins(job: Job, bound_s: float) -> float | None:
    job.form("n0", "n1")
    return _after(job, bound_s, 3, lambda: job.launch("n2"))


def node_comes_back(job: Job, bound_s: float) -> float | None:
    """After its host was down, and the others have gone on without it."""
    job.form("n0", "n1", "n2")
    began_at = time.monotonic()
    job.kill_host("n2")
    if job.trains(2, began_at, bound_s) is None:
        job.noted = "the others did not go on without it"
    job.hosts["n2"].mend()
    return _after(job, bound_s, 3, job.nodes[2].start)


def _after(job: Job, bound_s: float, size: int, act: Callable[[], object]) -> float | None:
    """Seconds from the act until a world of this size has made a step."""
    began_at = time.monotonic()
    act()
    at = job.trains(size, began_at, bound_s)
    if at is None:
        alive = sum(node.alive for node in job.nodes)
        went_on = job.steps_since(time.monotonic() - 5.0) > 0
        job.noted = job.noted or ("the old world trains on" if went_on else f"{alive} launchers live, nobody trains")
    return None if at is None else at - began_at


SCENARIOS: dict[str, tuple[str, Scenario]] = {
    "worker-killed": ("a worker is killed (SIGKILL); all three train again", worker_killed),
    "worker-stopped": ("a worker is stopped (SIGSTOP) and stays so; all three train again", worker_stopped),
    "launcher-killed": ("a launcher is killed (SIGKILL); the other two train", launcher_killed),
    "host-dies": ("a host dies without a word; the other two train", host_dies),
    "node-cut-off": ("a node is cut off silently; the other two train", node_cut_off),
    "coordinator-dies": ("the coordinator's host dies; whoever is left trains", coordinator_dies),
    "node-joins": ("a third node joins two that train; all three train", third_node_joins),
    "node-returns": ("a host that died is started again; all three train", node_comes_back),
}
SIDES = ("torchrun", OWN_STORE, OURS)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.peer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="this scenario; may be repeated")
    parser.add_argument("--side", action="append", choices=SIDES, help="this side; may be repeated")
    parser.add_argument("--repeat", type=int, default=1, metavar="N")
    parser.add_argument("--bound", type=float, default=120.0, metavar="S", help="longer is not waited for (120)")
    options = parser.parse_args()
    if why := cage.missing():
        print(f"cannot be done here: {why}", file=sys.stderr)
        return 2
    cage.enter(die_with_parent=False)
    end_quietly()
    print(", ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    hosts = net.build(HOSTS)
    table: dict[tuple[str, str], list[tuple[float | None, str]]] = {}
    port = PORT
    with tempfile.TemporaryDirectory(prefix="rdzv-peer-") as folder:
        for name in options.only or SCENARIOS:
            for turn in range(options.repeat):
                for side in options.side or SIDES:
                    port += 1
                    directory = Path(folder, f"{name}-{side.replace(', ', '-').replace(' ', '-')}-{turn}")
                    directory.mkdir()
                    result = play(Job(side, directory, hosts, port), SCENARIOS[name][1], options.bound)
                    table.setdefault((name, side), []).append(result)
                    print(f"{name}, {side}: {cell([result], options.bound)}", flush=True)
    print()
    print_table(table, options.bound)
    return 0


def play(job: Job, scenario: Scenario, bound_s: float) -> tuple[float | None, str]:
    """What came of it: seconds, or None, and a remark."""
    try:
        return scenario(job, bound_s), job.noted
    except NotReady as failed:
        return None, f"did not even start: {failed}"
    finally:
        job.clear()


def cell(results: list[tuple[float | None, str]], bound_s: float) -> str:
    times = [taken_s for taken_s, _ in results if taken_s is not None]
    remark = next((noted for _, noted in results if noted), "")
    said = f"{statistics.median(times):.1f} s" if times else f"not within {bound_s:.0f} s"
    if times and len(times) < len(results):
        said += f" ({len(times)} of {len(results)} times)"
    return f"{said}; {remark}" if remark else said


def print_table(table: dict[tuple[str, str], list[tuple[float | None, str]]], bound_s: float) -> None:
    sides = [side for side in SIDES if any(side == found for _, found in table)]
    print(f"| what happens, and what is waited for | {' | '.join(sides)} |")
    print(f"| --- |{' --- |' * len(sides)}")
    for name, (what, _) in SCENARIOS.items():
        if any(name == found for found, _ in table):
            print(f"| {what} | {' | '.join(cell(table[name, side], bound_s) for side in sides)} |")


if __name__ == "__main__":
    sys.exit(main())
