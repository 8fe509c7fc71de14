"""Thousands of simulated nodes against a real daemon, and the same streams against a server that only echoes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from tests.bench.harness import REPOSITORY, BenchFailed, stage, start_daemon, start_server
from tests.bench.report import median
from tests.ports import free_port

SWARM_BOUND_S = 600.0

Figures = dict[str, float]  # swarm.Figures

ROWS = (
    ("first_s", "first round", "s"),
    ("told_s", "everybody told to stop", "s"),
    ("next_s", "next round", "s"),
    ("first_cpu_us", "server CPU a node, first round", "us"),
    ("next_cpu_us", "server CPU a node, next round", "us"),
    ("first_up", "messages from a node, first round", ""),
    ("first_down", "messages to a node, first round", ""),
    ("next_up", "messages from a node, next round", ""),
    ("next_down", "messages to a node, next round", ""),
    ("rss_mb", "server memory", "MB"),
    ("idle_percent", "server CPU when idle", "% of a core"),
    ("idle_up_per_s", "heartbeats a second when idle", ""),
    ("swarm_cpu_s", "CPU of the load generator, both rounds", "s"),
)


def measure(kind: str, nodes: int, idle_s: float, options: Sequence[str] = ()) -> Figures:
    """One run against a fresh server of this kind ("daemon" or "echo"; the former with these options). Raises
    BenchFailed."""
    with stage() as scene:
        port = free_port()
        if kind == "daemon":
            server = start_daemon(scene, port, *options)
        else:
            command = [sys.executable, "-m", "tests.bench.echo_server", str(port)]
            server = start_server(scene, "echo", command, port)
        swarm = [sys.executable, "-m", "tests.bench.swarm", kind, str(port), str(server.pid), str(nodes), str(idle_s)]
        try:
            done = subprocess.run(
                swarm, cwd=REPOSITORY, capture_output=True, text=True, timeout=SWARM_BOUND_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise BenchFailed(f"{nodes} nodes, {kind}: not done after {SWARM_BOUND_S:.0f} s") from None
        if done.returncode != 0:
            raise BenchFailed(f"{nodes} nodes, {kind}: {done.stderr[-2_000:]}\n{scene.log_tails()}")
        figures: Figures = json.loads(done.stdout)
        return figures


def run(sizes: Sequence[int], repeat: int, idle_s: float, only: Sequence[str]) -> dict[str, dict[str, list[Figures]]]:
    """Measure each size, daemon and echo taking turns; print a table each. All figures, by size and kind."""
    kinds = [kind for kind, side in (("echo", "echo"), ("daemon", "ours")) if not only or side in only]
    found: dict[str, dict[str, list[Figures]]] = {}
    for size in sizes:
        runs: dict[str, list[Figures]] = {kind: [] for kind in kinds}
        print(f"scale, {size} nodes", flush=True)
        for _ in range(repeat):
            for kind in kinds:
                figures = measure(kind, size, idle_s)
                runs[kind].append(figures)
                print(f"    {kind:<8} first {figures['first_s']:.3f} s, next {figures['next_s']:.3f} s", flush=True)
        print("\n".join(table(size, runs)), flush=True)
        found[str(size)] = runs
    return found


def table(size: int, runs: dict[str, list[Figures]]) -> list[str]:
    """Medians of every figure, and what the daemon costs beside the bare streams that it needs."""
    lines = [f"scale, {size} nodes (medians)" + "".join(f"{kind:>14}" for kind in runs)]
    middles = {
        kind: {key: median([run[key] for run in figures]) for key, _, _ in ROWS} for kind, figures in runs.items()
    }
    for key, title, unit in ROWS:
        cells = "".join(f"{middles[kind][key]:>14.3f}" for kind in runs)
        lines.append(f"  {title + (f' ({unit})' if unit else ''):<44}{cells}")
    if {"daemon", "echo"} <= middles.keys():
        ours, echo = middles["daemon"], middles["echo"]
        pair_us = echo["next_cpu_us"] / echo["next_up"]
        bare_first_us = echo["first_cpu_us"] + (ours["first_up"] - 1) * pair_us
        lines += [
            f"  one message and its echo, bare: {pair_us:.1f} us; on a new stream: {echo['first_cpu_us']:.1f} us",
            f"  first round: {ours['first_cpu_us'] / bare_first_us:.2f} x bare streams with as many messages",
            f"  next round:  {ours['next_cpu_us'] / ours['next_up'] / pair_us:.2f} x a bare message and its echo, "
            f"for each message from a node",
        ]
    return lines
