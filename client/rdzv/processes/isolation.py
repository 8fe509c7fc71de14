"""A PID namespace for everything that the spawner starts: the kernel ends all of it when the spawner ends, however that
comes about and whoever else is dead. `--isolate=pid` asks for it.

With it, workers see only each other in /proc. Without root's rights it takes a user namespace, in which files of other
users and groups than one's own seem to be nobody's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_REC, MS_SLAVE = 0x4000, 0x80000
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def prepare() -> str:
    """In the keeper: its children will be in a PID namespace of their own. Returns what forbids it; empty: nothing."""
    if _libc.unshare(CLONE_NEWPID) == 0:
        return ""
    uid, gid = os.geteuid(), os.getegid()
    if ctypes.get_errno() == errno.EPERM and _libc.unshare(CLONE_NEWPID | CLONE_NEWUSER) == 0:
        try:
            for name, text in (("uid_map", f"{uid} {uid} 1"), ("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError as refused:
            return _forbidden(f"a user namespace ({refused.strerror})")
        return ""
    return _forbidden(f"a PID namespace ({os.strerror(ctypes.get_errno())})")


def enter() -> str:
    """In the first process of the namespace: dies with the keeper, and sees its own processes in /proc. Returns what
    forbids it; empty: nothing."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if (
        _libc.unshare(CLONE_NEWNS)
        or _libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None)
        or _libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    ):
        return _forbidden(f"a /proc of its own ({os.strerror(ctypes.get_errno())})")
    return ""


def _forbidden(what: str) -> str:
    return (
        f"--isolate=pid: this system does not permit {what}; it takes root (CAP_SYS_ADMIN), or user namespaces that "
        "are not switched off. Leave the option out: only the death of three processes at once then leaves orphans"
    )
