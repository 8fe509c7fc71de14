"""Namespaces in which a game of chaos is played, so that nothing of it can reach, or stay on, the machine around it.

The whole game runs below one `unshare` process: in a PID namespace (whatever ends the game, the kernel ends all that
it started), a network namespace and a mount namespace (with the last process they are gone, and with them every
bridge, address, packet filter and file system made in them).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

NETNS = Path("/run/netns")  # where `ip netns` keeps its names
_CAGED = "RDZV_CHAOS_CAGED"
_UNSHARE = ("unshare", "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_PR_SET_PDEATHSIG = 1


def missing() -> str:
    """Why there can be no cage on this machine, or "" if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [name for name in ("unshare", "nsenter", "ip", "nft", "mount") if shutil.which(name) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (Debian: util-linux, iproute2, nftables)"
    attempt = "ip link add one type veth peer name two && nft add table inet x && mount -t tmpfs x /mnt"
    tried = subprocess.run([*_UNSHARE, "sh", "-c", attempt], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


def enter(*, die_with_parent: bool) -> None:
    """Return inside a cage, as its first process's child. Anywhere else, start this program again in one.

    `die_with_parent`: the cage ends with the process that started this one.
    """
    if _CAGED not in os.environ:
        if die_with_parent:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ[_CAGED] = "1"
        os.execvp(_UNSHARE[0], [*_UNSHARE, sys.executable, *sys.orig_argv[1:]])
    if os.getpid() == 1:
        player = os.fork()
        if player:
            _reap_until_gone(player)
    os.setsid()  # a Ctrl-C is for those who play by the rules: it reaches us through the first process
    NETNS.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "netns", str(NETNS)], check=True)


def _reap_until_gone(player: int) -> NoReturn:
    """The first process of the namespace: whoever loses its parent becomes its child. Ends as the player does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(player, number))
    while True:
        pid, status = os.wait()
        if pid == player:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
