"""The spawner: a small single-threaded process between the launcher and everything that the launcher starts.

The launcher has threads and gRPC and must not fork; this process may. It starts workers and helpers, notices every
death below it, stops what it is told to stop, and outlives the launcher just long enough to leave nobody behind:

    the launcher dies          the socket ends: everything below is killed, then this process exits
    this process dies          its children die by their parent-death signal; the launcher, a subreaper too, clears
                               away the rest
    a child loses its parent   it is adopted here (subreaper), reaped when it ends, and swept away at the next stop

Run by path as `python -S -E -s spawner.py SOCKET IGNORED NOFILE`: the descriptor of the socket, the signals that the
launcher was started with ignored (comma separated), and the limit of open files it was started with. Working directory,
umask and signal mask are those the launcher was started with, by plain inheritance.

The wire. From the launcher, each with a field `do`:

    start {id, kind: worker|helper, argv, env} + descriptors   they become 0, 1, 2, ... of the new process
    stop {signal, grace_s}                                     workers, and whatever else is not a helper
    hurry {}                                                   the stop in progress has no grace left
    signal {signal}                                            each worker that runs its program, alone
    end {id, grace_s}                                          one helper

To the launcher, each with a field `is`: ready; started {id, pid}; failed {id, text}: it never ran;
ended {id, exit_code, signal, at}, `at` by CLOCK_MONOTONIC; stopped {left}.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from rdzv.processes import tree
    from rdzv.processes.wire import Body, Channel, Gone, to_bytes
else:  # run by path: sys.path[0] is this directory
    import tree
    from wire import Channel, Gone, to_bytes

# From TERM to KILL for what is left of a group whose leader has ended. An immediate KILL would also take
# multiprocessing's resource_tracker, which then leaves its files in /dev/shm.
LINGER_S = 0.1
# How long a stop goes on after KILL, and how long we go on after the launcher's death. Only processes in
# uninterruptible sleep live that long, and nobody can hurry those.
SWEEP_S = 5.0
# Between two rounds of killing; a self-respawning chain loses against it.
TICK_S = 0.01

# Signals that this process, or any Python, treats otherwise than a program expects to find them.
ALTERED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGCHLD,
)

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Process:
    """A process that was started here and has not been reaped."""

    __slots__ = ("exec_fd", "ident", "is_worker", "kill_at", "pid")

    def __init__(self, ident: int, pid: int, is_worker: bool, exec_fd: int) -> None:
        self.ident = ident
        self.pid = pid
        self.is_worker = is_worker
        self.exec_fd = exec_fd  # tells how its exec went; -1 once told
        self.kill_at = float("inf")  # a helper that was told to end


class Stop:
    """A stop in progress."""

    __slots__ = ("give_up_at", "kill_at", "killed")

    def __init__(self, kill_at: float) -> None:
        self.kill_at = kill_at
        self.killed = False
        self.give_up_at = float("inf")


class Spawner:
    def __init__(self, channel: Channel, wakeup_fd: int, ignored: frozenset[int]) -> None:
        self._channel = channel
        self._wakeup_fd = wakeup_fd
        self._ignored = ignored
        self._processes: dict[int, Process] = {}  # by pid
        self._lingering: dict[int, float] = {}  # group whose leader has ended → when it is killed
        self._stop: Stop | None = None

    def run(self) -> NoReturn:
        """Serve until the launcher is gone, which Gone tells."""
        self._channel.post({"is": "ready"})
        while True:
            readable = self._wait()
            if self._wakeup_fd in readable:
                os.read(self._wakeup_fd, 4096)
            for process in list(self._processes.values()):
                if process.exec_fd in readable:
                    self._tell_exec(process)
            self._reap()
            if self._channel.fileno() in readable:
                for body, fds in self._channel.receive():
                    self._obey(body, fds)
            self._channel.flush()
            self._advance(time.monotonic())

    def _wait(self) -> set[int]:
        """Sleep until something happens or is due. Returns the descriptors that can be read or have ended."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.pending else 0))
        poll.register(self._wakeup_fd, select.POLLIN)
        for process in self._processes.values():
            if process.exec_fd >= 0:
                poll.register(process.exec_fd, select.POLLIN)
        due = self._due(time.monotonic())
        return {fd for fd, _ in poll.poll(None if due is None else due * 1000)}

    def _due(self, now: float) -> float | None:
        """Seconds until `_advance` has something to do; None: nothing is planned."""
        instants = [*self._lingering.values(), *(process.kill_at for process in self._processes.values())]
        if self._stop is not None:
            instants.append(now + TICK_S if self._stop.killed else self._stop.kill_at)
        first = min(instants, default=float("inf"))
        return None if first == float("inf") else max(0.0, first - now)

    # ------------------------------------------------------------------------------------------------ orders

    def _obey(self, body: Body, fds: list[int]) -> None:
        match body["do"]:
            case "start":
                self._start(body, fds)
            case "stop":
                self._begin_stop(body["signal"], body["grace_s"])
            case "hurry":
                if self._stop is not None:
                    self._stop.kill_at = 0.0
            case "signal":
                for process in self._workers():
                    if process.exec_fd < 0:
                        send(os.kill, process.pid, body["signal"])
            case "end":
                self._end(body["id"], body["grace_s"])
            case unknown:
                raise ValueError(f"the launcher asks for {unknown!r}")

    def _start(self, body: Body, fds: list[int]) -> None:
        """How a process comes to be is known here and in `_become` alone; all else goes by its pid."""
        argv = [to_bytes(word) for word in body["argv"]]
        env = {to_bytes(name): to_bytes(value) for name, value in body["env"].items()}
        own_pid = os.getpid()
        exec_fd, child_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            pid = os.fork()
        except OSError as refused:
            os.close(exec_fd)
            self._channel.post({"is": "failed", "id": body["id"], "text": f"cannot fork: {refused.strerror}"})
        else:
            if pid == 0:
                _become(argv, env, fds, child_fd, own_pid, self._ignored)
            self._processes[pid] = Process(body["id"], pid, body["kind"] == "worker", exec_fd)
        os.close(child_fd)
        for fd in fds:
            os.close(fd)

    def _tell_exec(self, process: Process) -> None:
        """The exec of `process` has succeeded or failed: tell which. A failed one is as if it never was."""
        text = os.read(process.exec_fd, 4096).decode("utf-8", "replace")
        os.close(process.exec_fd)
        process.exec_fd = -1
        if text:
            os.waitpid(process.pid, 0)  # it does nothing any more but exit
            del self._processes[process.pid]
            self._channel.post({"is": "failed", "id": process.ident, "text": text})
        else:
            self._channel.post({"is": "started", "id": process.ident, "pid": process.pid})

    def _begin_stop(self, number: int, grace_s: float) -> None:
        kill_at = time.monotonic() + grace_s
        if self._stop is None:
            self._stop = Stop(kill_at)
        else:
            self._stop.kill_at = min(self._stop.kill_at, kill_at)
        for process in self._workers():
            # Before its exec a process would miss the signal, and has run nothing that deserves one.
            signal_group(process, number if process.exec_fd < 0 else signal.SIGKILL)
            signal_group(process, signal.SIGCONT)  # a stopped process could not obey

    def _end(self, ident: int, grace_s: float) -> None:
        for process in self._processes.values():
            if process.ident == ident:
                process.kill_at = time.monotonic() + grace_s
                signal_group(process, signal.SIGTERM)

    # ------------------------------------------------------------------------------------------------ deaths

    def _reap(self) -> None:
        """Bury all who have ended: children that were started here, and adopted ones."""
        while (dead := _dead_child()) is not None:
            process = self._processes.get(dead.si_pid)
            if process is None:
                os.waitpid(dead.si_pid, 0)
            else:
                self._bury(process, dead)

    def _bury(self, process: Process, dead: os.waitid_result) -> None:
        if process.exec_fd >= 0:
            self._tell_exec(process)
            if process.pid not in self._processes:
                return
        # While its leader is not reaped, the group's number cannot mean another group.
        signal_group(process, signal.SIGTERM)
        os.waitpid(process.pid, 0)
        del self._processes[process.pid]
        exited = dead.si_code == os.CLD_EXITED
        self._channel.post(
            {
                "is": "ended",
                "id": process.ident,
                "exit_code": dead.si_status if exited else 0,
                "signal": 0 if exited else dead.si_status,
                "at": time.monotonic(),
            }
        )
        # From here on its remaining members reserve the number. If all of them end before the KILL, the number would
        # have to go round once within LINGER_S to name a stranger.
        if send(os.killpg, process.pid, 0):
            self._lingering[process.pid] = time.monotonic() + LINGER_S

    # ------------------------------------------------------------------------------------------------ time

    def _advance(self, now: float) -> None:
        """Do what is due."""
        for process in self._processes.values():
            if now >= process.kill_at:
                process.kill_at = float("inf")
                signal_group(process, signal.SIGKILL)
        for group, kill_at in list(self._lingering.items()):
            if not send(os.killpg, group, signal.SIGKILL if now >= kill_at else 0) or now >= kill_at:
                del self._lingering[group]
        if self._stop is not None:
            self._advance_stop(self._stop, now)

    def _advance_stop(self, stop: Stop, now: float) -> None:
        """TERM has been sent. Once all have obeyed, or the grace is over: KILL, until nobody is left."""
        if not stop.killed:
            if now < stop.kill_at and (self._lingering or any(self._workers())):
                return
            stop.killed = True
            stop.give_up_at = now + SWEEP_S
            for process in self._workers():
                signal_group(process, signal.SIGKILL)
            for group in self._lingering:
                send(os.killpg, group, signal.SIGKILL)
            self._lingering.clear()
        left = self._strays()
        # A child that ended while /proc was read may have hidden others: then an empty answer is not the last word.
        if (left or _dead_child() is not None) and now < stop.give_up_at:
            for pid in left:
                send(os.kill, pid, signal.SIGKILL)
            return
        self._stop = None
        self._channel.post({"is": "stopped", "left": len(left)})

    def _strays(self) -> list[int]:
        """Children, adopted ones too, that are no helpers. The deeper ones become children as their parents die."""
        helpers = {pid for pid, process in self._processes.items() if not process.is_worker}
        return [pid for pid in tree.children(os.getpid()) if pid not in helpers]

    def _workers(self) -> list[Process]:
        return [process for process in self._processes.values() if process.is_worker]


def _become(
    argv: list[bytes], env: dict[bytes, bytes], fds: list[int], error_fd: int, parent: int, ignored: frozenset[int]
) -> NoReturn:
    """In the child: turn into the program. What prevents it is written to `error_fd`."""
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(127)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in ALTERED:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        # First out of the way of the numbers to be filled, then into place. All else is close-on-exec.
        *above, error_fd = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, len(fds)) for fd in (*fds, error_fd)]
        for place, fd in enumerate(above):
            os.dup2(fd, place)
        os.execvpe(argv[0], argv, env)
    except OSError as refused:
        text = refused.strerror
        if isinstance(refused, FileNotFoundError) and os.path.exists(argv[0]):
            text = "its interpreter (first line), or its loader, is missing"
        os.write(error_fd, f"cannot run {os.fsdecode(argv[0])}: {text}".encode("utf-8", "replace"))
    except BaseException as bug:  # noqa: BLE001  whatever it is, this copy of the spawner must not go on
        os.write(error_fd, f"cannot run {os.fsdecode(argv[0])}: {bug!r}".encode("utf-8", "replace"))
    finally:
        os._exit(127)


def _dead_child() -> os.waitid_result | None:
    """A child that has ended and is not reaped; None: there is none. It stays unreaped."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None


def send(how: Callable[[int, int], None], target: int, number: int) -> bool:
    """Send a signal with os.kill or os.killpg. Returns whether there was anybody who may be signalled."""
    try:
        how(target, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_group(process: Process, number: int) -> None:
    """Send a signal to the group that `process` leads, or will lead as soon as it gets to run."""
    if not send(os.killpg, process.pid, number):
        send(os.kill, process.pid, number)


def clear() -> None:
    """Kill everything below this process, leaves first, until nothing is left (SWEEP_S at most)."""
    deadline = time.monotonic() + SWEEP_S
    while time.monotonic() < deadline:
        while (dead := _dead_child()) is not None:
            os.waitpid(dead.si_pid, 0)
        below = tree.descendants(os.getpid())
        if not below:
            return
        for pid in below:
            send(os.kill, pid, signal.SIGKILL)
        time.sleep(TICK_S)


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    socket_fd, ignored, nofile = sys.argv[1:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(nofile), hard))
    os.set_inheritable(int(socket_fd), False)
    wakeup_fd, signal_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    channel = Channel(socket.socket(fileno=int(socket_fd)))
    try:
        Spawner(channel, wakeup_fd, frozenset(map(int, filter(None, ignored.split(","))))).run()
    except Gone:
        pass
    finally:
        clear()


if __name__ == "__main__":
    main()
