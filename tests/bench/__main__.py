"""How fast we are, against the peers, in the same run."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.bench import durable, scale, scenarios
from tests.bench.harness import BenchFailed
from tests.bench.report import Case, machine, write_json

HELP = """\
benchmarks:
  launch      launch -> first all-reduce: 1 node x 2 workers (standalone), 2 nodes x 1
  restart     worker SIGKILL -> first all-reduce of the next round: 1 x 2, 2 x 1, 1 x 8
  node_loss   launcher SIGKILL -> survivors' first all-reduce: 2:3, three nodes x 1
  join        a third node joins a job on two nodes (1:3) -> first all-reduce of three
  scale       N simulated nodes on real streams against a real daemon, and against a bare echo server
  takeover    the leader of two daemons on etcd SIGKILL -> 8 nodes attended by the next one
  adopt       a memory daemon SIGKILL and started again -> 8 nodes attended
  commit      a join written to etcd, against a bare transaction of the same size
  etcd_rounds 256 simulated nodes on etcd
  all         each of them

The launchers take turns, so that both meet the same machine. Medians, all values and ratios are printed. Run it on a
quiet machine.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=__doc__,
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="+", choices=[*scenarios.BENCHES, "scale", *durable.BENCHES, "all"], metavar="NAME"
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times each side is measured (3)")
    parser.add_argument(
        "--peer-repeat", type=int, metavar="N", help="times torchrun is measured (as --repeat; node_loss: 2)"
    )
    parser.add_argument(
        "--side",
        action="append",
        default=[],
        choices=["torchrun", "ours", "echo"],
        help="measure only this side; may be repeated",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        action="append",
        metavar="N",
        help="scale: simulated nodes; may be repeated (1000 and 10000)",
    )
    parser.add_argument("--idle", type=float, default=20.0, metavar="S", help="scale: seconds of idling (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    options = parser.parse_args(arguments)
    if options.repeat < 1 or (options.peer_repeat or 1) < 1:
        parser.error("--repeat and --peer-repeat are at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for. 0; 1 if something could not be measured."""
    options = parse(arguments)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)  # so that what was started is cleared away in both cases
    names = (
        [*scenarios.BENCHES, "scale", *durable.BENCHES]
        if "all" in options.names
        else list(dict.fromkeys(options.names))
    )
    cases: list[Case] = []
    tables: dict[str, object] = {}
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    failed = False
    for name in names:
        try:
            if name == "scale":
                measured = scale.run(options.nodes or [1_000, 10_000], options.repeat, options.idle, options.side)
                tables["scale"] = measured
            elif name in durable.BENCHES:
                cases += durable.BENCHES[name](options.repeat)
            else:
                cases += scenarios.run(name, options.repeat, options.peer_repeat, options.side)
        except BenchFailed as failure:
            print(f"{name}: could not be measured: {failure}", file=sys.stderr)
            failed = True
    print()
    print("\n".join(line for case in cases for line in case.lines()))
    if options.json:
        write_json(options.json, cases, tables)
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
