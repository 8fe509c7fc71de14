"""The store holder: one process per node that serves its bootstrap stores, one for each offer.

Run by path, by the interpreter that the workers use, with its wire to the launcher as descriptor 3. It imports torch's
store once, alone if that can be (bare_torch.py), else with all of torch, as it does if its argument is `whole`. What is
to be served is a socket that listens already: whoever connects before the import is done waits in its backlog.

The wire. From the launcher, each with a field `do`: serve {offer_id, port} + the listening socket; drop {offer_id}.
To the launcher: failed {text}, before this process gives up. It ends when the launcher closes the wire.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rdzv.processes import bare_torch
    from rdzv.processes.wire import Body, Channel, Gone
else:  # run by path: sys.path[0] is this directory, and must not be where torch's own imports look
    import bare_torch
    from wire import Channel, Gone

    del sys.path[0]

WIRE_FD = 3
WHOLE = "whole"
# torch's libuv server takes over a listening socket since 2.8; before, only the older server does.
LIBUV_TAKES_SOCKETS = (2, 8)
# Our own connection to the store that we serve, through the loopback and behind those who came earlier.
CONNECT = timedelta(seconds=60)


class Holder:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stores: dict[str, Any] = {}  # by offer; the launcher drops all but the last few

    def run(self) -> None:
        """Serve until the launcher is gone, which Gone tells."""
        make, use_libuv = _tcp_store(), bare_torch.version() >= LIBUV_TAKES_SOCKETS
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while True:
            poll.poll()
            for body, fds in self._channel.receive():
                self._obey(make, use_libuv, body, fds)

    def _obey(self, make: Any, use_libuv: bool, body: Body, fds: list[int]) -> None:
        match body["do"]:
            case "serve":
                [listener] = fds  # the store's to close from here on
                self._stores[body["offer_id"]] = make(
                    "127.0.0.1",
                    body["port"],
                    None,
                    True,
                    timeout=CONNECT,
                    wait_for_workers=False,
                    master_listen_fd=listener,
                    use_libuv=use_libuv,
                )
            case "drop":
                # The last reference: the server's thread ends, and the port is free.
                self._stores.pop(body["offer_id"], None)
            case unknown:
                raise ValueError(f"the launcher asks for {unknown!r}")


def _tcp_store() -> Any:
    """torch's class. Whatever goes wrong with it alone: this process begins again, with the whole."""
    if sys.argv[1:] != [WHOLE]:
        try:
            return bare_torch.tcp_store()
        except bare_torch.WholeTorch:
            pass
        except Exception:  # noqa: BLE001  nothing was heard or said on the wire yet
            os.set_inheritable(WIRE_FD, True)
            os.execv(sys.executable, [*sys.orig_argv, WHOLE])
    from torch.distributed import TCPStore

    return TCPStore


def _ask_no_name_server() -> None:
    """torch looks up the name of everybody who connects, for its log, and serves nobody meanwhile: for 5 s and longer
    where a name server is slow, or a packet was lost. From here on this process knows /etc/hosts and nothing else."""
    with contextlib.suppress(AttributeError):  # of the GNU C library
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


def main() -> int:
    # Each worker of the job holds a connection to the store of the round: the usual 1,024 are soon used up.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.set_inheritable(WIRE_FD, False)
    channel = Channel(socket.socket(fileno=WIRE_FD))
    _ask_no_name_server()
    try:
        Holder(channel).run()
    except Gone:
        return 0
    except Exception as problem:  # noqa: BLE001  its stderr is /dev/null: this is the only way to tell
        channel.post({"is": "failed", "text": f"{type(problem).__name__}: {problem}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
