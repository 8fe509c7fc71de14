"""The spawner: a small single-threaded process between the launcher and everything that the launcher starts.

The launcher has threads and gRPC and must not fork; this process may. It starts workers and helpers, notices every
death below it, stops what it is told to stop, and outlives the launcher just long enough to leave nobody behind:

    the launcher dies          the socket ends: everything below is killed, then this process exits
    this process dies          its children die by their parent-death signal; the launcher, a subreaper too, clears
                               away the rest
    a child loses its parent   it is adopted here (subreaper), reaped when it ends, and swept away at the next stop

A process is started by fork and exec, or, where the order says `fork` and there is a zygote, out of that: it is born as
a grandchild of the zygote and adopted by the spawner at once, so that all are its children and none is treated
differently. What waits for a zygote that dies before it is ready is started by exec.

A fork of the keeper, which was started by path with these arguments: the descriptor of the socket, the signals that the
launcher was started with ignored, and with blocked (comma separated), and the limit of open files it was started with.
Working directory and umask are those the launcher was started with, by plain inheritance.

The wire. From the launcher, each with a field `do`:

    zygote {argv, env, prepare, later, later_s} + descriptors 0, 1, 2
                                                               `prepare` is for the zygote; `later_s` after workers were
                                                               born it begets an heir, which imports `later` and then
                                                               takes its place
    start {id, kind: worker|helper, fork, argv, env} + descriptors   they become 0, 1, 2, ... of the new process
    withdraw {}                                                workers that still wait for the zygote to be ready
    stop {signal, grace_s, next_round}                         workers, and whatever else is not a helper
    hurry {}                                                   the stop in progress has no grace left
    signal {id, signal}                                        a worker, if it runs its program, alone
    end {id}                                                   one helper: KILL, as it has nothing to save

To the launcher, each with a field `is`: ready; started {id, pid}; failed {id, text}: it never ran;
ended {id, exit_code, signal, at}, `at` by CLOCK_MONOTONIC; leftovers {names, kill_s}; stopped {left};
zygote_ended {text, missing, exit_code, signal}; heir_ended, the same of an heir: its zygote goes on. Before all others,
and as the last: refused {text}.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import time

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from rdzv.processes import tree
    from rdzv.processes.clearing import SWEEP_S, TICK_S, clear, dead_child, send
    from rdzv.processes.dispositions import DEAF, Given
    from rdzv.processes.starting import Order, Zygote, read_now, start
    from rdzv.processes.wire import Body, Channel, Gone
else:  # run by path: sys.path[0] is this directory
    import tree
    from clearing import SWEEP_S, TICK_S, clear, dead_child, send
    from dispositions import DEAF, Given
    from starting import Order, Zygote, read_now, start
    from wire import Channel, Gone

# From the begin of a stop, for what a worker that ended by itself left behind, if the next round waits for this node:
# multiprocessing's resource_tracker needs milliseconds, a data loader some tenths.
LEFTOVER_S = 2.0
# What is still there so long after all workers is named once, so that people know what they wait for.
NAME_AFTER_S = 1.0
NAMES_MAX = 5
# A fork takes milliseconds. A zygote that owes one for so long after the grace is stuck, and holds up the stop.
STUCK_S = 2.0

PR_SET_CHILD_SUBREAPER = 36


class Process:
    """A process that was started here and has not been reaped."""

    __slots__ = ("exec_fd", "ident", "is_worker", "pid")

    def __init__(self, order: Order, pid: int, exec_fd: int = -1) -> None:
        self.ident = order.ident
        self.pid = pid
        self.is_worker = order.is_worker
        self.exec_fd = exec_fd  # tells how its exec went; -1 once told, or without one


class Stop:
    """A stop in progress: TERM to the workers, then to what they left behind, and KILL to all at one deadline."""

    __slots__ = ("give_up_at", "kill_at", "killed", "leftovers_at", "name_at", "polite", "told")

    def __init__(self, kill_at: float, leftovers_at: float) -> None:
        self.kill_at = kill_at
        self.leftovers_at = leftovers_at  # KILL for what workers left behind that ended by themselves
        self.polite = False  # there was a worker to be told
        self.told: set[int] = set()  # of what was left behind
        self.name_at = float("inf")
        self.killed = False
        self.give_up_at = float("inf")


class Spawner:
    def __init__(self, channel: Channel, wakeup_fd: int, given: Given) -> None:
        self._channel = channel
        self._wakeup_fd = wakeup_fd
        self._given = given
        self._processes: dict[int, Process] = {}  # by pid
        self._groups: dict[int, bool] = {}  # of workers that have ended → whether it was by themselves
        self._stop: Stop | None = None
        self._zygote: Zygote | None = None
        self._heir: Zygote | None = None  # on its way to take the zygote's place
        self._later: list[str] = []  # what the heir is to import, until there is one
        self._later_s = 0.0
        self._heir_due_at = float("inf")
        self._waiting: list[Order] = []  # for the zygote to be ready, or buried
        self._forking: dict[int, Order] = {}  # by the descriptor that tells the pid

    def run(self) -> NoReturn:
        """Serve until the launcher is gone, which Gone tells."""
        self._channel.post({"is": "ready"})
        while True:
            readable = self._wait()
            if self._wakeup_fd in readable:
                os.read(self._wakeup_fd, 4096)
            # Those who are about to exec first: what comes after may start others, with descriptors of the same number.
            for process in [p for p in self._processes.values() if p.exec_fd in readable]:
                self._tell_exec(process)
            self._hear_forks()
            self._reap()
            if self._zygote is not None and self._zygote.channel.fileno() in readable:
                self._hear_zygote(self._zygote)
            if self._heir is not None and self._heir.channel.fileno() in readable:
                self._hear_heir(self._heir)
            if self._channel.fileno() in readable:
                for body, fds in self._channel.receive():
                    self._obey(body, fds)
            self._channel.flush()
            self._advance(time.monotonic())

    def _wait(self) -> set[int]:
        """Sleep until something happens or is due. Returns the descriptors that can be read or have ended."""
        poll = select.poll()
        zygotes = [zygote for zygote in (self._zygote, self._heir) if zygote is not None]
        for channel in (self._channel, *(zygote.channel for zygote in zygotes)):
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.pending else 0))
        poll.register(self._wakeup_fd, select.POLLIN)
        for process in self._processes.values():
            if process.exec_fd >= 0:
                poll.register(process.exec_fd, select.POLLIN)
        for start_fd in self._forking:
            poll.register(start_fd, select.POLLIN)
        due = self._due(time.monotonic())
        return {fd for fd, _ in poll.poll(None if due is None else due * 1000)}

    def _due(self, now: float) -> float | None:
        """Seconds until `_advance` has something to do; None: nothing is planned."""
        instants = [self._heir_due_at]
        if (stop := self._stop) is not None:
            instants.append(now + TICK_S if stop.killed else stop.kill_at)
            if not stop.killed and not self._workers():
                instants += [stop.leftovers_at, stop.name_at]
        first = min(instants, default=float("inf"))
        return None if first == float("inf") else max(0.0, first - now)

    # ------------------------------------------------------------------------------------------------ orders

    def _obey(self, body: Body, fds: list[int]) -> None:
        match body["do"]:
            case "start":
                self._start(Order(body, fds))
            case "withdraw":
                self._withdraw(lambda order: order.is_worker)
            case "stop":
                self._begin_stop(body["signal"], body["grace_s"], body["next_round"])
            case "hurry":
                if self._stop is not None:
                    self._stop.kill_at = 0.0
            case "signal":
                self._signal(body["id"], body["signal"])
            case "end":
                self._end(body["id"])
            case "zygote":
                self._later, self._later_s = body["later"], body["later_s"]
                self._start_zygote(Order({**body, "id": 0, "kind": "helper"}, fds))
            case unknown:
                raise ValueError(f"the launcher asks for {unknown!r}")

    def _start(self, order: Order) -> None:
        if not order.body["fork"] or self._zygote is None:
            self._exec(order)
        elif self._zygote.ready:
            self._fork(self._zygote, order)
        else:
            self._waiting.append(order)

    def _exec(self, order: Order) -> None:
        try:
            pid, exec_fd = start(order, self._given if order.is_worker else DEAF)
        except OSError as refused:
            self._fail(order, f"cannot fork: {refused.strerror}")
        else:
            self._processes[pid] = Process(order, pid, exec_fd)

    def _fail(self, order: Order, text: str) -> None:
        order.close()
        self._channel.post({"is": "failed", "id": order.ident, "text": text})

    def _withdraw(self, which: Callable[[Order], bool]) -> None:
        for order in list(filter(which, self._waiting)):
            self._waiting.remove(order)
            self._fail(order, "stopped before it was started")
        for order in filter(which, self._forking.values()):
            order.withdrawn = True

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

    def _begin_stop(self, number: int, grace_s: float, next_round: bool) -> None:
        """To each worker alone: what it started is its own to end, and may be what it needs for a last save."""
        now = time.monotonic()
        if self._stop is None:
            self._stop = Stop(now + grace_s, now + LEFTOVER_S if next_round else float("inf"))
        else:
            self._stop.kill_at = min(self._stop.kill_at, now + grace_s)
        self._withdraw(lambda order: order.is_worker)
        for process in self._workers():
            self._stop.polite = True
            # Before its exec a process would miss the signal, and has run nothing that deserves one.
            send(os.kill, process.pid, number if process.exec_fd < 0 else signal.SIGKILL)
            signal_group(process, signal.SIGCONT)  # a stopped process could not obey

    def _signal(self, ident: int, number: int) -> None:
        for process in self._workers():
            if process.ident == ident and process.exec_fd < 0:
                send(os.kill, process.pid, number)

    def _end(self, ident: int) -> None:
        self._withdraw(lambda order: order.ident == ident)
        for process in self._processes.values():
            if process.ident == ident:
                signal_group(process, signal.SIGKILL)

    # ------------------------------------------------------------------------------------------------ the zygote

    def _start_zygote(self, order: Order) -> None:
        try:
            self._zygote = Zygote.start(order, self._given)
        except OSError as refused:
            order.close()
            text = f"cannot fork: {refused.strerror}"
            self._channel.post({"is": "zygote_ended", "text": text, "missing": False, "exit_code": 0, "signal": 0})

    def _fork(self, zygote: Zygote, order: Order) -> None:
        try:
            self._forking[zygote.fork(order)] = order
        except Gone:
            self._waiting.append(order)  # its death will be noticed
        except OSError as refused:
            self._fail(order, f"cannot fork: {refused.strerror}")

    def _hear_zygote(self, zygote: Zygote) -> None:
        try:
            zygote.channel.flush()
            zygote.hear()
        except Gone:
            send(os.kill, zygote.pid, signal.SIGKILL)  # it may have lost its descriptors only
            return
        if zygote.ready:
            waiting, self._waiting = self._waiting, []
            for order in waiting:
                self._fork(zygote, order)

    def _hear_forks(self) -> None:
        """Find out what became of those that the zygote was to fork."""
        if self._heir is not None:
            self._heir.hear_pid()
        for start_fd, order in list(self._forking.items()):
            text = read_now(start_fd)
            if text is None:
                continue
            os.close(start_fd)
            del self._forking[start_fd]
            if text.isdigit():
                self._born(order, int(text))
            elif text or order.withdrawn:
                self._fail(order, text.decode("utf-8", "replace") or "stopped before it was started")
            else:  # neither it nor anybody who might have become it is there any more
                self._exec(order)

    def _born(self, order: Order, pid: int) -> None:
        order.close()
        process = self._processes[pid] = Process(order, pid)
        self._channel.post({"is": "started", "id": order.ident, "pid": pid})
        if self._later and process.is_worker:
            self._heir_due_at = time.monotonic() + self._later_s
        if order.withdrawn:  # it has run nothing that deserves a grace
            signal_group(process, signal.SIGKILL)

    def _bury_zygote(self, zygote: Zygote, dead: os.waitid_result) -> None:
        os.waitpid(zygote.pid, 0)
        self._zygote = None
        self._channel.post({"is": "zygote_ended", **zygote.bury(), **_how(dead)})
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._exec(order)

    # ------------------------------------------------------------------------------------------------ its heir

    def _beget(self, zygote: Zygote) -> None:
        """In the background: what the first round cannot wait for."""
        try:
            self._heir = zygote.beget(self._later)
        except OSError:  # what is wrong with it will be noticed where it is needed
            return
        self._later = []

    def _hear_heir(self, heir: Zygote) -> None:
        try:
            heir.channel.flush()
            heir.hear()
        except Gone:
            heir.hear_pid()
            if heir.pid:
                send(os.kill, heir.pid, signal.SIGKILL)  # it is buried when it is reaped
            else:
                self._bury_heir(heir, {"text": "the zygote ended first", "exit_code": 0, "signal": 0})

    def _succeed(self, heir: Zygote) -> None:
        """The heir is the zygote from now on; the one before it ends when it hears no more."""
        if self._zygote is not None:
            self._zygote.close()
        self._zygote, self._heir = heir, None

    def _bury_heir(self, heir: Zygote, how: Body) -> None:
        self._heir = None
        self._channel.post({"is": "heir_ended", **heir.bury(), **how})

    # ------------------------------------------------------------------------------------------------ deaths

    def _reap(self) -> None:
        """Bury all who have ended: children that were started here, and adopted ones."""
        while (dead := dead_child()) is not None:
            if dead.si_pid not in self._processes:
                self._hear_forks()  # it may just have said who it is
            process = self._processes.get(dead.si_pid)
            if process is not None:
                self._bury(process, dead)
            elif self._zygote is not None and self._zygote.pid == dead.si_pid:
                self._bury_zygote(self._zygote, dead)
            elif self._heir is not None and self._heir.pid == dead.si_pid:
                os.waitpid(dead.si_pid, 0)
                self._bury_heir(self._heir, _how(dead))
            else:
                os.waitpid(dead.si_pid, 0)

    def _bury(self, process: Process, dead: os.waitid_result) -> None:
        if process.exec_fd >= 0:
            self._tell_exec(process)
            if process.pid not in self._processes:
                return
        # While its leader is not reaped, the group's number cannot mean another group.
        signal_group(process, signal.SIGTERM)
        signal_group(process, signal.SIGCONT)
        os.waitpid(process.pid, 0)
        del self._processes[process.pid]
        self._groups[process.pid] = self._stop is None
        self._channel.post({"is": "ended", "id": process.ident, **_how(dead), "at": time.monotonic()})

    # ------------------------------------------------------------------------------------------------ time

    def _advance(self, now: float) -> None:
        """Do what is due."""
        if now >= self._heir_due_at:
            self._heir_due_at = float("inf")  # a worker that is born later sets it again
            if self._zygote is not None and self._stop is None and self._workers():
                self._beget(self._zygote)
        if self._heir is not None and self._heir.ready and not self._forking:
            self._succeed(self._heir)
        if self._stop is not None:
            self._advance_stop(self._stop, now)

    def _advance_stop(self, stop: Stop, now: float) -> None:
        """TERM has been sent. Once all have obeyed, or the grace is over: KILL, until nobody is left."""
        if not stop.killed:
            if now < stop.kill_at and (self._unborn() or self._workers() or self._leftovers(stop, now)):
                return
            stop.killed = True
            stop.give_up_at = now + SWEEP_S
            for process in self._workers():
                signal_group(process, signal.SIGKILL)
        left = self._strays()
        unborn = self._unborn()
        if unborn and self._zygote is not None and now > stop.give_up_at - SWEEP_S + STUCK_S:
            send(os.kill, self._zygote.pid, signal.SIGKILL)
        # A child that ended while /proc was read may have hidden others: then an empty answer is not the last word.
        if (left or unborn or dead_child() is not None) and now < stop.give_up_at:
            for pid in left:
                send(os.kill, pid, signal.SIGKILL)
            return
        self._stop = None
        self._groups.clear()
        self._channel.post({"is": "stopped", "left": len(left)})

    def _leftovers(self, stop: Stop, now: float) -> bool:
        """All workers have ended. Returns whether something that they left behind is there and may stay for a while:
        it is told to end, and what has had its time is killed."""
        left = self._strays()
        if not left:
            return dead_child() is not None
        for pid in (*left, *tree.descendants(os.getpid(), without=self._helpers())):
            if pid not in stop.told:
                stop.told.add(pid)
                if _group(pid) not in self._groups:  # those got it when their worker ended
                    send(os.kill, pid, signal.SIGTERM)
                    send(os.kill, pid, signal.SIGCONT)
        if now >= stop.leftovers_at:
            for pid in left:
                if not stop.polite or self._groups.get(_group(pid)):
                    send(os.kill, pid, signal.SIGKILL)
            stop.leftovers_at = now + TICK_S  # what they leave behind in their turn
        if stop.name_at == float("inf") and not stop.told.isdisjoint(left):
            stop.name_at = now + NAME_AFTER_S
        elif now >= stop.name_at:
            stop.name_at = stop.kill_at
            names = [f"{tree.name(pid)} (pid {pid})" for pid in left[:NAMES_MAX]]
            more = [f"{len(left) - NAMES_MAX} more"] if len(left) > NAMES_MAX else []
            self._channel.post({"is": "leftovers", "names": names + more, "kill_s": stop.kill_at - now})
        return True

    def _strays(self) -> list[int]:
        """Children, adopted ones too, that are no helpers. The deeper ones become children as their parents die."""
        children = tree.children(os.getpid())
        self._hear_forks()  # who was adopted from the zygote has said so before
        helpers = self._helpers()
        return [pid for pid in children if pid not in helpers]

    def _helpers(self) -> set[int]:
        helpers = {pid for pid, process in self._processes.items() if not process.is_worker}
        helpers.update(zygote.pid for zygote in (self._zygote, self._heir) if zygote is not None)
        return helpers

    def _unborn(self) -> bool:
        return any(order.is_worker for order in self._forking.values())

    def _workers(self) -> list[Process]:
        return [process for process in self._processes.values() if process.is_worker]


def _how(dead: os.waitid_result) -> Body:
    exited = dead.si_code == os.CLD_EXITED
    return {"exit_code": dead.si_status if exited else 0, "signal": 0 if exited else dead.si_status}


def _group(pid: int) -> int:
    """0: it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def signal_group(process: Process, number: int) -> None:
    """Send a signal to the group that `process` leads, or will lead as soon as it gets to run."""
    if not send(os.killpg, process.pid, number):
        send(os.kill, process.pid, number)


def main(channel: Channel, given: Given, nofile: int) -> NoReturn:
    """In a child of the keeper, until the launcher is gone. `given`: how workers are to find signals; `nofile`: their
    soft limit of open files."""
    keeper_pid = os.getppid()
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, hard))
    wakeup_fd, signal_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        Spawner(channel, wakeup_fd, given).run()
    except Gone:
        pass
    finally:
        clear()
        channel.close()
        if keeper_pid and os.getppid() == keeper_pid:
            os.kill(keeper_pid, signal.SIGCONT)  # one that was stopped would stay
    os._exit(0)
