"""How the spawner's processes come to be: by fork and exec, or out of the zygote. All else goes by their pids."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from typing import NoReturn

    from rdzv.processes.dispositions import Given, of_zygote, set_for_exec
    from rdzv.processes.wire import Body, Channel, Gone, to_bytes
else:  # run by path: sys.path[0] is this directory
    from dispositions import Given, of_zygote, set_for_exec
    from wire import Channel, Gone, to_bytes

PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Order:
    """A process that is to be started, and the descriptors that it gets; they are closed here when it has them."""

    __slots__ = ("body", "fds", "ident", "is_worker", "withdrawn")

    def __init__(self, body: Body, fds: list[int]) -> None:
        self.ident: int = body["id"]
        self.is_worker: bool = body["kind"] == "worker"
        self.body = body
        self.fds = fds
        self.withdrawn = False  # nobody wants it any more, and it may be on its way

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def start(order: Order, given: Given) -> tuple[int, int]:
    """Fork, and let the child become the program. Returns its pid and a descriptor that ends when the exec has
    succeeded, or first says why it has not. `given`: how it finds signals. Raises OSError."""
    argv = [to_bytes(word) for word in order.body["argv"]]
    env = {to_bytes(name): to_bytes(value) for name, value in order.body["env"].items()}
    own_pid = os.getpid()
    exec_fd, child_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pid = os.fork()
    except OSError:
        os.close(exec_fd)
        os.close(child_fd)
        raise
    if pid == 0:
        _become(argv, env, order.fds, child_fd, own_pid, given)
    os.close(child_fd)
    order.close()
    return pid, exec_fd


def _become(
    argv: list[bytes], env: dict[bytes, bytes], fds: list[int], error_fd: int, parent: int, given: Given
) -> NoReturn:
    """In the child: turn into the program. What prevents it is written to `error_fd`."""
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(127)
        os.setsid()
        signal.set_wakeup_fd(-1)
        set_for_exec(given)
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


def read_now(fd: int) -> bytes | None:
    """What a descriptor that does not block has to say; None: nothing yet."""
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return None


class Zygote:
    """A zygote, seen from the spawner, its parent."""

    def __init__(self, sock: socket.socket, pid: int, start_fd: int) -> None:
        """`start_fd`: what tells how its start went."""
        self.pid = pid
        self.channel = Channel(sock)
        self.ready = False
        self.start_fd = start_fd
        self._problem: Body = {}

    @classmethod
    def start(cls, order: Order, given: Given) -> Zygote:
        """The first one, by exec. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            order.fds.append(os.dup(theirs.fileno()))
            try:
                zygote = cls(ours, *start(order, of_zygote(given)))
            except OSError:
                ours.close()
                raise
        signals = {"ignored": list(given.ignored), "blocked": list(given.blocked)}
        zygote.channel.post({**order.body["prepare"], **signals})
        return zygote

    def beget(self, modules: list[str]) -> Zygote:
        """Have it fork the next one, which imports these modules as well. Its pid is 0 until `hear_pid`. Raises Gone,
        OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return Zygote(ours, 0, self._ask({"heir": modules}, [theirs.fileno()]))
            except OSError:
                ours.close()
                raise

    def hear_pid(self) -> None:
        """Find out, of one that was begotten, which process it is, if that is known by now."""
        if not self.pid:
            text = read_now(self.start_fd) or b""
            if text.isdigit():
                self.pid = int(text)
            elif text:
                self._problem = {"text": text.decode("utf-8", "replace")}

    def fork(self, order: Order) -> int:
        """Have it fork a process that runs the order's script. Returns a descriptor that tells its pid, or why it could
        not be started, or just ends when it will never be. Raises Gone, OSError. The order's descriptors are copied."""
        body = {"argv": order.body["argv"], "env": order.body["env"], "worker": order.is_worker}
        return self._ask(body, order.fds)

    def _ask(self, body: Body, fds: list[int]) -> int:
        """For a process. Returns the descriptor that tells its pid. Raises Gone, OSError."""
        start_fd, child_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.channel.post(body, [*fds, child_fd])
        except OSError:  # Gone is one
            os.close(start_fd)
            raise
        finally:
            os.close(child_fd)
        return start_fd

    def hear(self) -> None:
        """Take in what it says. Raises Gone."""
        for body, fds in self.channel.receive():
            for fd in fds:
                os.close(fd)  # it sends none
            if body["is"] == "ready":
                self.ready = True
            else:
                self._problem = body

    def close(self) -> None:
        """Let it end, which it does when it hears no more."""
        self.channel.close()
        os.close(self.start_fd)

    def bury(self) -> Body:
        """After its death. Returns what it said of it: `text`, and `missing`: there is just no torch."""
        try:
            while not self._problem:
                self.hear()
        except Gone:
            pass
        text = (read_now(self.start_fd) or b"").decode("utf-8", "replace")
        self.close()
        return {"text": self._problem.get("text", text), "missing": self._problem.get("missing", False)}
