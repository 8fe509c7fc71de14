"""Says something, in one of several ways. Plain Python: it starts in milliseconds.

    speaker.py torrent LINES    so many numbered lines on stdout, in writes that end anywhere
    speaker.py streams          what its streams are, as one line of JSON
    speaker.py both             a line on each stream
    speaker.py dies             rank 1 breaks off in the middle of a line and is killed; the others wait
    speaker.py raises           rank 1 raises without `record`; the others wait
    speaker.py attempts         both streams; in its first round rank 1 then fails with 3 and an error file of its own
    speaker.py signals          tells $STAGE/progress.jsonl of every signal; ends when told to, or by one but USR1

When it is done, or about to wait, it makes $STAGE/said-RANK.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

STAGE = Path(os.environ["STAGE"])
RANK = os.environ["RANK"]
PIECE = 7000  # bytes of a write; no line is so long, and pipes keep writes of over 4096 bytes apart as they like
POLL_S = 0.02


def said(*ranks: str) -> bool:
    return all((STAGE / f"said-{rank}").exists() for rank in ranks)


def wait_for_the_end() -> None:
    (STAGE / f"said-{RANK}").touch()
    while True:
        signal.pause()


def torrent(lines: int) -> None:
    rest = memoryview(b"".join(b"%s %d %s\n" % (RANK.encode(), i, b"x" * (i % 150)) for i in range(lines)))
    while rest:
        rest = rest[os.write(1, rest[:PIECE]) :]


def streams() -> None:
    found = {name: os.isatty(fd) for fd, name in enumerate(("stdin", "stdout", "stderr"))}
    where = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]
    (STAGE / f"streams-{RANK}").write_text(json.dumps({**found, "where": where}))


def both() -> None:
    print(f"out of {RANK}")
    print(f"err of {RANK}", file=sys.stderr)


def dies() -> None:
    both()
    while RANK == "1":
        if said("0"):
            os.write(1, b"a whole line\nand a half")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(POLL_S)
    wait_for_the_end()


def raises() -> None:
    if RANK == "1":
        sys.stdout.write("a line without end")
        raise LookupError("no such shard")
    wait_for_the_end()


def attempts() -> None:
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    print(f"an apple from {RANK}\na pear from {RANK}, attempt {0 if first else 1}")
    print(f"err of {RANK}", file=sys.stderr)
    if not first:
        return
    while RANK == "1":
        if said("0"):
            report = {"message": {"message": "told to", "extraInfo": {"py_callstack": "told to", "timestamp": "1"}}}
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report))
            sys.exit(3)
        time.sleep(POLL_S)
    wait_for_the_end()


def signals() -> None:
    got: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda n, _: got.append(signal.Signals(n).name))
    hidden = STAGE / f".said-{RANK}"
    hidden.write_text(str(os.getpid()))
    hidden.rename(STAGE / f"said-{RANK}")
    told = 0
    while not (STAGE / "orders" / "finish").exists():
        time.sleep(POLL_S)
        for name in got[told:]:
            told += 1
            with (STAGE / "progress.jsonl").open("ab", buffering=0) as file:
                line = {"event": "signal", "rank": int(RANK), "name": name}
                file.write(json.dumps(line).encode() + b"\n")
            if name != "SIGUSR1":
                return


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "torrent":
        torrent(int(arguments[0]))
    else:
        {f.__name__: f for f in (streams, both, dies, raises, attempts, signals)}[what]()
    (STAGE / f"said-{RANK}").touch()


if __name__ == "__main__":
    main()
