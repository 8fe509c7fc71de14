"""The zygote: a process that has imported torch, and forks those that need it: workers, the store holder, its heir.

Run by path by the workers' interpreter, with the workers' flags, environment, working directory and dispositions, so
that what it forks differs as little as may be from `python -u script.py` (script.py has the rest of that). Its wire to
the spawner is descriptor 3. It is single-threaded and stays pristine: no gRPC, no CUDA context, no parallel operation,
because a fork of a process that has these hangs or fails.

The wire. From the spawner, first what to prepare {argv, modules, ignored, blocked}: a worker's command line, what to
import, "torch" first, and how a worker finds signals. Then, whenever a process is wanted, {argv, env, worker} and
descriptors: those that become 0, 1, 2, ... of the new process, and one on which the process says its pid, or why there
is none. With {heir: modules} instead the process that is wanted is the next zygote, which imports these as well, and
its only descriptor is its wire. To the spawner, each with a field `is`: ready; failed {text, missing}, before it gives
up; `missing`: there is no torch to import.

What it forks is adopted by the spawner: it is forked by an intermediate process that ends at once.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import warnings

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.processes import command_line
    from rdzv.processes.dispositions import Given, set_for_worker
    from rdzv.processes.hidden import Recorder, Shelf, TorchVariables
    from rdzv.processes.script import Command
    from rdzv.processes.wire import Body, Channel, Gone, to_bytes
else:  # run by path. Nothing of this may be found later, neither the directory nor the modules.
    if sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import command_line
    from dispositions import Given, set_for_worker
    from hidden import Recorder, Shelf, TorchVariables
    from script import Command
    from wire import Channel, Gone, to_bytes

    del sys.path[0]
    for _name in ("command_line", "dispositions", "hidden", "script", "wire"):
        del sys.modules[_name]

# What a main module has to begin with, by this interpreter's version.
PRISTINE = {name: value for name, value in globals().items() if name.startswith("__")}
WIRE_FD = 3
PR_SET_PDEATHSIG = 1
# With it torch.cuda.is_available() asks NVML: a module that only asks this when it is imported may be preloaded.
HARMLESS_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
# Added to the priority value of the thread in which an heir imports: the workers of this node train beside it. Some
# seconds of one CPU are to become a minute at most where no CPU is free.
NICER_BY = 10
_libc = ctypes.CDLL(None, use_errno=True)


class Unfit(Exception):
    """It cannot be forked from. The text is for people."""


class Request:
    """A process that is wanted."""

    def __init__(self, body: Body, fds: list[int]) -> None:
        *self.fds, self.start_fd = fds
        self.heir: list[str] | None = body.get("heir")
        self.worker: bool = body.get("worker", False)
        self.argv = [to_bytes(word) for word in body.get("argv", ())]
        self.env = {to_bytes(name): to_bytes(value) for name, value in body.get("env", {}).items()}

    def close(self) -> None:
        for fd in (*self.fds, self.start_fd):
            os.close(fd)

    def fail(self, refused: OSError) -> None:
        os.write(self.start_fd, f"cannot fork: {refused.strerror}".encode())


# ---------------------------------------------------------------------------------------------------- what it imports


class Imports:
    """What has been imported, on a shelf."""

    def __init__(self, modules: list[str]) -> None:
        """Import, as a worker would. Raises Unfit, ModuleNotFoundError."""
        os.environ.setdefault(HARMLESS_CUDA_CHECK, "1")
        self._recorder = Recorder()
        self._threads = 0
        gc.disable()  # an eighth of the time of `import torch`, in which hardly anything becomes garbage
        self._import(modules[:1], _here)
        gc.enable()
        self._threads = len(os.listdir("/proc/self/task"))  # those that come with torch, if any, do no harm
        self._import(modules[1:], _here)
        self.shelf = self._recorder.hide()

    def add(self, modules: list[str]) -> None:
        """Import these as well, and take one's time. Raises Unfit."""
        self._recorder.resume(self.shelf)
        self._import(modules, _aside, "--preload-later")
        self.shelf = self._recorder.hide()

    def _import(
        self, modules: list[str], run: Callable[[Callable[[], object]], None], option: str = "--preload"
    ) -> None:
        umask, cwd = os.umask(0o077), os.getcwd()
        os.umask(umask)
        for name in modules:
            self._recorder.watch(name)
            try:
                run(lambda name=name: importlib.import_module(name))  # type: ignore[misc]
            except ModuleNotFoundError as error:
                if error.name == "torch" == name:
                    raise
                raise Unfit(f"import {name}: {error}") from error
            except BaseException as error:
                raise Unfit(f"import {name}: {type(error).__name__}: {error}") from error
            more = _harmful_threads(option, name) - self._threads
            if self._threads and more > 0:
                raise Unfit(f"{option} {name}: it starts {more} thread(s), which forked workers would lack")
        os.umask(umask)
        os.chdir(cwd)


def _here(act: Callable[[], object]) -> None:
    act()


def _aside(act: Callable[[], object]) -> None:
    """In a thread of low priority, which is gone when this returns. (Only a privileged process can raise its priority
    again; but each thread has one of its own.) Raises what `act` raises."""
    problems: list[BaseException] = []
    threads: list[int] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            threads.append(_thread.get_native_id())
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICER_BY)  # of this thread
            act()
        except BaseException as problem:  # noqa: BLE001  it is raised below
            problems.append(problem)
        finally:
            done.release()

    _thread.start_new_thread(run, ())
    done.acquire()
    while os.path.exists(f"/proc/self/task/{threads[0]}"):  # or it would be counted among those that a fork lacks
        os.sched_yield()
    if problems:
        raise problems[0]


def _harmful_threads(option: str, name: str) -> int:
    """How many threads there are that a fork does not end (OpenBLAS ends and restarts its own). Raises Unfit."""
    pid = _fork()
    if pid == 0:
        torch = sys.modules.get("torch")
        devices = [getattr(torch, kind, None) for kind in ("cuda", "xpu")]
        os._exit(any(getattr(device, "_is_in_bad_fork", bool)() for device in devices))
    if os.waitpid(pid, 0)[1]:
        raise Unfit(f"{option} {name}: it initialises CUDA, which forked workers could not use then")
    return len(os.listdir("/proc/self/task"))


# ---------------------------------------------------------------------------------------------------- what it forks


def serve(channel: Channel) -> Born:
    """Fork what is asked for. Returns in the forked processes only. Raises Gone."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        requests = [Request(body, fds) for body, fds in channel.receive()]
        if requests:
            # Or each would write what is buffered here once more.
            sys.stdout.flush()
            sys.stderr.flush()
            _libc.fflush(None)
            born = _fork_all(requests)
            for request in requests:
                if born is None or request is not born.request:
                    request.close()
            if born is not None:
                return born
        poll.poll()


def _fork_all(requests: list[Request]) -> Born | None:
    """By way of a process that ends at once. Returns in each of the forked processes, and, here, None."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        pid = _fork()
    except OSError as refused:
        pid = -1
        for request in requests:
            request.fail(refused)
    if pid == 0:
        parent = os.getpid()
        for request in requests:
            try:
                if _fork() == 0:
                    os.close(writer)
                    os.write(request.start_fd, b"%d" % os.getpid())
                    return Born(request, parent, reader)
            except OSError as refused:
                request.fail(refused)
        os._exit(0)
    os.close(reader)
    os.close(writer)
    if pid > 0:
        os.waitpid(pid, 0)
    return None


def _fork() -> int:
    with warnings.catch_warnings():
        # Since 3.12 Python warns when there are threads, which here are OpenBLAS's.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# ---------------------------------------------------------------------------------------------------- what it becomes


class Born:
    """In a forked process: what it is to become."""

    def __init__(self, request: Request, parent: int, parent_fd: int) -> None:
        self.request = request
        self._parent = parent
        self._parent_fd = parent_fd  # ends when the parent does

    def become(self, shelf: Shelf, path: list[str], given: Given) -> Command:
        """Be as a fresh interpreter would be; `path`: sys.path without its first entry. Returns what is to be run."""
        request = self.request
        if request.worker:
            set_for_worker(given)
        for place, fd in enumerate(request.fds):
            os.dup2(fd, place)
            os.close(fd)
        command_line.show(request.argv, request.env)
        variables = TorchVariables()
        os.environb.clear()
        os.environb.update(request.env)
        _renew(shelf)
        shelf.on_return("torch", variables.catch_up)
        shelf.open()
        # Without it what is frozen now is not destroyed at the end: unclosed files would stay empty.
        atexit.register(gc.unfreeze)
        command = Command([os.fsdecode(word) for word in request.argv])
        command.set_up(path)
        return command

    def inherit(self, spawner: int) -> Channel:
        """Be the next zygote. Returns its wire."""
        (wire_fd,) = self.request.fds
        os.dup2(wire_fd, WIRE_FD, inheritable=False)
        os.close(wire_fd)
        self.settle(spawner)
        return Channel(socket.socket(fileno=WIRE_FD))

    def settle(self, spawner: int) -> None:
        """Returns once the spawner is the parent. From here on its death is this process's."""
        os.setsid()
        os.read(self._parent_fd, 1)
        os.close(self._parent_fd)
        while os.getppid() == self._parent:  # its last descriptor is closed a moment before it is gone
            os.sched_yield()
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != spawner:
            os._exit(127)
        os.close(self.request.start_fd)


def _renew(shelf: Shelf) -> None:
    """What is random, or goes by the process, is made anew. (`random` sees to itself when it is forked.)"""
    if (threading := sys.modules.get("threading")) is not None:
        threading.main_thread()._set_native_id()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
    if (numpy_random := shelf.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := shelf.get("torch")) is not None:
        torch.default_generator.seed()


def main() -> Command:
    """Returns in the forked processes only, with what each is to run."""
    spawner = os.getppid()
    os.set_inheritable(WIRE_FD, False)
    channel = Channel(socket.socket(fileno=WIRE_FD))
    try:
        select.select([channel], [], [])
        [(plan, _)] = channel.receive()
        given = Given(frozenset(plan["ignored"]), frozenset(plan["blocked"]))
        prepared = Command(plan["argv"])
        prepared.set_up(list(sys.path))
        imports = Imports(plan["modules"])
        while True:
            gc.freeze()  # garbage and all: to find that takes longer than it is worth, and somebody is waiting
            channel.post({"is": "ready"})
            born = serve(channel)
            channel.close()
            if born.request.heir is None:
                break
            channel = born.inherit(spawner)
            imports.add(born.request.heir)
    except Gone:
        os._exit(0)
    except (Unfit, ModuleNotFoundError) as problem:
        channel.post({"is": "failed", "text": str(problem), "missing": isinstance(problem, ModuleNotFoundError)})
        os._exit(1)
    rest = sys.path[1:] if sys.path[:1] == [prepared.path0] else list(sys.path)
    command = born.become(imports.shelf, rest, given)
    born.settle(spawner)
    return command


if __name__ == "__main__":
    COMMAND = main()
    COMMAND.run(PRISTINE)
