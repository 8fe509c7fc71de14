"""A training on two nodes that survives what happens to it: `make demo`.

Starts a daemon and two nodes on this machine, each with two workers, which learn handwritten digits. Then it kills a
worker, kills a whole node, and starts that node again; in the end the training is finished and the times are told.
Each step waits for what the others print or do, never for a time that ought to be enough.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TRAINING = Path(__file__).with_name("digits_ddp.py")
WORKERS = 2  # on each node
EPOCHS = 24
STEP_DELAY_S = 0.06  # makes an epoch last about 1.5 s, so that there is something to disturb
ACCURACY_MIN = 0.95

START_BOUND_S = 120.0  # importing torch and scikit-learn four times on a busy machine
NOTICE_BOUND_S = 30.0
AGAIN_BOUND_S = 120.0
END_BOUND_S = 180.0

COLOURS = {"demo": "1", "daemon": "35", "node-a": "36", "node-b": "33"}
VICTIM_NOISE = re.compile(r"\[rank\d+\]:")  # torch's prefix of a traceback: a worker that lost its peer


class DemoFailed(Exception):
    """Something that must happen did not; the text says what."""


@dataclass(frozen=True, slots=True)
class Line:
    """What somebody printed, and when (monotonic, s)."""

    at: float
    speaker: str
    text: str


class Screen:
    """Prints everybody's lines, each with its speaker, and remembers them all. Used from several threads."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._lines: list[Line] = []
        self._said = threading.Condition()
        self._folded: dict[str, list[str]] = {}
        self._coloured = sys.stdout.isatty()

    def say(self, speaker: str, text: str) -> None:
        """Print and remember one line. A traceback of a worker that lost its peer becomes one line on the screen."""
        line = Line(time.monotonic(), speaker, text.rstrip())
        with self._said:
            self._lines.append(line)
            self._said.notify_all()
            if VICTIM_NOISE.search(line.text):
                self._folded.setdefault(speaker, []).append(line.text)
                return
            if folded := self._folded.pop(speaker, []):
                self._print(line.at, speaker, f"({len(folded)} lines of traceback: {folded[-1].strip()[:90]} ...)")
            self._print(line.at, speaker, line.text)

    def demo(self, text: str) -> float:
        """Say something ourselves; the instant."""
        self.say("demo", text)
        return time.monotonic()

    def find(self, pattern: str, since: float, speakers: Iterable[str] = ("node-a", "node-b")) -> Line | None:
        """The first line since then in which the pattern occurs."""
        with self._said:
            return next(
                (x for x in self._lines if x.at >= since and x.speaker in speakers and re.search(pattern, x.text)), None
            )

    def wait_for_more(self, timeout_s: float) -> None:
        """Until somebody says something more."""
        with self._said:
            self._said.wait(timeout_s)

    def tail(self, speaker: str, count: int = 25) -> list[str]:
        """The last lines of one speaker, as they came."""
        with self._said:
            return [line.text for line in self._lines if line.speaker == speaker][-count:]

    def _print(self, at: float, speaker: str, text: str) -> None:
        name = f"{speaker:<6}"
        if self._coloured:
            name = f"\033[{COLOURS[speaker]}m{name}\033[0m"
        print(f"{at - self.began:6.1f} s  {name} | {text}", flush=True)


@dataclass
class Cast:
    """The processes of the demo. All are gone when it is left, with all that they started."""

    screen: Screen
    port: int
    checkpoint: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _seen: dict[int, psutil.Process] = field(default_factory=dict)  # everything ever found below them

    def start_daemon(self) -> None:
        """Until it takes connections."""
        self._start("daemon", [command("rendezvousd"), "--listen", f"127.0.0.1:{self.port}"])
        give_up_at = time.monotonic() + START_BOUND_S
        while not self._listens():
            self.check()
            if time.monotonic() > give_up_at:
                raise DemoFailed(f"the daemon does not listen on port {self.port} after {START_BOUND_S:.0f} s")
            self.screen.wait_for_more(0.05)

    def start_node(self, name: str) -> None:
        """One launcher, as on a machine of its own."""
        options = [
            "--nnodes=1:2",
            f"--nproc-per-node={WORKERS}",
            "--max-restarts=3",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=demo",
            f"--rdzv-conf=node_name={name}",
            # DistributedDataParallel imports it: once a node, and not in each worker of each round
            "--preload=torch._dynamo",
        ]
        script = [
            str(TRAINING),
            f"--epochs={EPOCHS}",
            f"--step-delay={STEP_DELAY_S}",
            f"--checkpoint={self.checkpoint}",
        ]
        self._start(name, [command("rdzvrun"), *options, *script])

    def workers(self, name: str) -> list[psutil.Process]:
        """The node's training processes, oldest first."""
        launcher = psutil.Process(self.running[name].pid)
        found = []
        for process in launcher.children(recursive=True):
            self._seen[process.pid] = process
            with contextlib.suppress(psutil.NoSuchProcess):
                if str(TRAINING) in process.cmdline():
                    found.append(process)
        if not found:
            raise DemoFailed(f"{name} has no worker processes")
        return sorted(found, key=lambda process: process.create_time())

    def kill_node(self, name: str) -> float:
        """SIGKILL to the launcher alone; the instant just before."""
        launcher = self.running.pop(name)
        killed_at = time.monotonic()
        launcher.kill()
        launcher.wait()
        return killed_at

    def check(self) -> None:
        """Raises DemoFailed when somebody ended who should run."""
        for name, process in self.running.items():
            if process.poll() is not None:
                raise DemoFailed(f"{name} has ended by itself, with exit code {process.returncode}")

    def wait_for(self, what: str, pattern: str, since: float, bound_s: float) -> Line:
        """The first such line of a node since then. Raises DemoFailed when it does not come."""
        give_up_at = time.monotonic() + bound_s
        while (line := self.screen.find(pattern, since)) is None:
            self.check()
            if time.monotonic() > give_up_at:
                raise DemoFailed(f"{what}: not within {bound_s:.0f} s")
            self.screen.wait_for_more(0.2)
        return line

    def wait_for_end(self, name: str, bound_s: float) -> None:
        """Until the process has ended. Raises DemoFailed unless that is soon and with exit code 0."""
        process = self.running.pop(name)
        try:
            code = process.wait(bound_s)
        except subprocess.TimeoutExpired:
            self.running[name] = process
            raise DemoFailed(f"{name} has not ended after {bound_s:.0f} s") from None
        if code != 0:
            raise DemoFailed(f"{name} has ended with exit code {code}")

    def clear(self) -> None:
        """Kill whatever is left."""
        for process in self.running.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen |= {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
        for process in self.running.values():
            process.kill()
            process.wait()
        for left in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()  # psutil knows when the pid belongs to somebody else by now
        psutil.wait_procs(list(self._seen.values()), timeout=5)

    def _start(self, name: str, arguments: list[str]) -> None:
        told = " ".join([Path(arguments[0]).name, *(shorten(argument) for argument in arguments[1:])])
        self.screen.demo(f"$ {told}" if name not in self._started else f"{name} is started again, by the same command")
        self._started.add(name)
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us; we tell the others
        )
        self.running[name] = process
        threading.Thread(target=self._listen, args=(name, process), daemon=True).start()

    def _listen(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                self.screen.say(name, line.decode(errors="replace"))

    def _listens(self) -> bool:
        with socket.socket() as knock:
            knock.settimeout(1.0)
            return knock.connect_ex(("127.0.0.1", self.port)) == 0


@dataclass(frozen=True, slots=True)
class Chapter:
    """One line of the table at the end. Seconds; None: does not apply."""

    what: str
    noticed_s: float | None  # a launcher says that the round is over
    dealt_s: float  # a launcher has new ranks and starts its workers
    training_s: float  # all of them have imported torch, found one another and the checkpoint


def play(cast: Cast) -> list[str]:
    """The whole story. What to tell of it at the end."""
    screen = cast.screen
    cast.start_daemon()
    began = time.monotonic()
    cast.start_node("node-a")
    cast.start_node("node-b")
    trains = trains_in(cast, 2 * WORKERS, began, START_BOUND_S)
    chapters = [Chapter("both nodes started", None, deals(cast, began) - began, trains.at - began)]
    cast.wait_for("the third epoch", rf"epoch 3/{EPOCHS}:", trains.at, AGAIN_BOUND_S)

    chapters.append(lose_worker(cast, "node-b"))
    chapters.append(lose_node(cast, "node-b"))

    began = time.monotonic()
    cast.start_node("node-b")
    trains = trains_in(cast, 2 * WORKERS, began, AGAIN_BOUND_S)
    chapters.append(Chapter("node-b started again", None, deals(cast, began) - began, trains.at - began))

    for name in ("node-a", "node-b"):
        cast.wait_for_end(name, END_BOUND_S)
    finished_at = time.monotonic()
    pattern = r"accuracy on \d+ held-out digits: ([0-9.]+)"
    told = re.search(pattern, cast.wait_for("the accuracy", pattern, began, NOTICE_BOUND_S).text)
    assert told is not None
    accuracy = float(told[1])
    if accuracy < ACCURACY_MIN:
        raise DemoFailed(f"the accuracy is {accuracy:.4f}, below {ACCURACY_MIN}")
    cast.running["daemon"].terminate()
    cast.wait_for_end("daemon", NOTICE_BOUND_S)
    ending = (
        f"finished: {EPOCHS} epochs in {finished_at - screen.began:.0f} s, accuracy {accuracy:.4f} on held-out digits"
    )
    return [*table(chapters), ending]


def lose_worker(cast: Cast, name: str) -> Chapter:
    """Kill the youngest worker of a node; all of them start anew and go on."""
    victim = cast.workers(name)[-1]
    killed_at = cast.screen.demo(f"kill -9 {victim.pid}   (a worker of {name})")
    victim.kill()
    return recovers(cast, f"a worker of {name} killed", killed_at, 2 * WORKERS)


def lose_node(cast: Cast, name: str) -> Chapter:
    """Kill a node's launcher: its workers die with it, and the other node goes on alone."""
    orphans = cast.workers(name)
    cast.screen.demo(f"kill -9 {cast.running[name].pid}   (the launcher of {name}: the whole node)")
    killed_at = cast.kill_node(name)
    _, alive = psutil.wait_procs(orphans, timeout=NOTICE_BOUND_S)
    if alive:
        raise DemoFailed(f"{len(alive)} workers of {name} outlive their launcher by {NOTICE_BOUND_S:.0f} s")
    return recovers(cast, f"{name} killed", killed_at, WORKERS)


def recovers(cast: Cast, what: str, killed_at: float, world: int) -> Chapter:
    """The round is over, ranks are dealt anew, training goes on in a world of that size."""
    noticed = cast.wait_for("a launcher notices", r"round \d+ is over", killed_at, NOTICE_BOUND_S)
    dealt_at = deals(cast, killed_at)
    trains = trains_in(cast, world, killed_at, AGAIN_BOUND_S)
    return Chapter(what, noticed.at - killed_at, dealt_at - killed_at, trains.at - killed_at)


def deals(cast: Cast, since: float) -> float:
    """When the first launcher after that had ranks for its workers."""
    return cast.wait_for("new ranks", r"round \d+: ranks? ", since, AGAIN_BOUND_S).at


def trains_in(cast: Cast, world: int, since: float, bound_s: float) -> Line:
    """Training has started in a world of this size. It is believed when an epoch later."""
    line = cast.wait_for(f"training in a world of {world}", rf"world of {world}: training from epoch", since, bound_s)
    cast.wait_for(f"an epoch in a world of {world}", rf"epoch \d+/.* world of {world}$", line.at, bound_s)
    return line


def table(chapters: list[Chapter]) -> list[str]:
    """The chapters, for people."""
    lines = [f"{'what happened':<26}{'noticed after':>16}{'new ranks after':>18}{'training after':>17}"]
    for chapter in chapters:
        noticed = "" if chapter.noticed_s is None else f"{chapter.noticed_s:.2f} s"
        lines.append(f"{chapter.what:<26}{noticed:>16}{chapter.dealt_s:>16.2f} s{chapter.training_s:>15.1f} s")
    return lines


def shorten(argument: str) -> str:
    """Paths as people would type them."""
    return argument.replace(f"{TRAINING.parent.parent}/", "").replace(tempfile.gettempdir() + "/", "")


def command(name: str) -> str:
    """The program `name` of this Python's environment. Raises DemoFailed."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise DemoFailed(f"{path} is not installed: run `make demo`, or `pip install -e '.[torch,dev]'`")
    return str(path)


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def cast_on_stage() -> Iterator[Cast]:
    """The processes and their checkpoint; nothing of them is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="rdzv-demo-") as folder:
        cast = Cast(Screen(), free_port(), Path(folder, "digits.pt"))
        try:
            yield cast
        finally:
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_IGN)  # impatience must not leave anybody behind
            cast.clear()


def main() -> int:
    """0 when everything happened as it should, 1 when not, 130 when interrupted."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)  # a polite end is the same as Ctrl-C
    try:
        with cast_on_stage() as cast:
            try:
                story = play(cast)
            except DemoFailed as failure:
                for speaker in cast.running:
                    print(f"\n--- the last lines of {speaker}", *cast.screen.tail(speaker), sep="\n", file=sys.stderr)
                print(f"\nthe demo failed: {failure}", file=sys.stderr)
                return 1
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started is gone", file=sys.stderr)
        return 130
    print("", *story, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
