"""Chaos: a real job, broken in every way there is, at random; and a judge that reads what everybody saw.

python -m tests.chaos short [--backend etcd] [--seed N]
python -m tests.chaos soak --minutes 60 [--seed N]          both backends, half of the time each
python -m tests.chaos judge HISTORY                         judge an old game again
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import cage
from tests.chaos.checker import check
from tests.chaos.game import Game, GameOver, end_quietly
from tests.chaos.history import Reader
from tests.chaos.players import NotReady
from tests.chaos.report import print_report
from tests.chaos.schedule import Backend, short, soak

SEED_MAX = 2**31 - 1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    for name in ("short", "soak"):
        mode = modes.add_parser(name)
        mode.add_argument("--backend", choices=["memory", "etcd"], action="append", help="default: both")
        mode.add_argument("--seed", type=int, default=random.SystemRandom().randint(0, SEED_MAX))
        mode.add_argument("--out", type=Path, help="a directory for histories and logs; default: a new one")
        mode.add_argument("--die-with-parent", action="store_true", help="end when the process that started this does")
        if name == "soak":
            mode.add_argument("--minutes", type=float, default=60.0, help="of faults, all backends together (60)")
    modes.add_parser("judge").add_argument("history", type=Path)
    return parser.parse_args(arguments)


def main() -> int:
    """0: all is well; 1: something is not as it should be; 2: it could not be played."""
    options = parse(sys.argv[1:])
    if options.mode == "judge":
        return judge(options.history)
    if why := cage.missing():
        print(f"chaos cannot be played here: {why}", file=sys.stderr)
        return 2
    backends: list[Backend] = options.backend or ["memory", "etcd"]
    out = options.out or Path(tempfile.mkdtemp(prefix="rdzv-chaos-"))
    if len(backends) > 1:  # a cage each
        return max(apart(options, backend, out / backend, len(backends)) for backend in backends)
    cage.enter(die_with_parent=options.die_with_parent)
    end_quietly()
    return play(options, backends[0], out)


def apart(options: argparse.Namespace, backend: Backend, out: Path, share: int) -> int:
    """The same with one backend, in a process of its own."""
    command = [sys.executable, "-m", "tests.chaos", options.mode, "--backend", backend, "--seed", str(options.seed)]
    command += ["--out", str(out), "--die-with-parent"]
    if options.mode == "soak":
        command += ["--minutes", str(options.minutes / share)]
    return subprocess.run(command, check=False).returncode


def play(options: argparse.Namespace, backend: Backend, out: Path) -> int:
    """One game, and what the judge says of it."""
    out.mkdir(parents=True, exist_ok=True)
    print(f"chaos: {options.mode}, {backend}, seed {options.seed}, in {out}", flush=True)
    game = Game(out, backend, options.seed)
    failed = 0
    try:
        if options.mode == "short":
            game.play(short(backend, options.seed))
        else:
            game.play(soak(backend, options.seed), time.monotonic() + options.minutes * 60)
    except (GameOver, NotReady) as over:
        print(f"the game is over: {over}", file=sys.stderr)
        failed = 1
    verdict = judge(game.history_file)
    if options.mode == "soak":
        print_report(game.reader.events, game.usage)
    return max(failed, verdict)


def judge(history: Path) -> int:
    reader = Reader(history)
    reader.more()
    found = check(reader.events)
    for violation in found:
        print(f"VIOLATION {violation}")
    print(f"{len(reader.events)} events, {len(found)} violations", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
