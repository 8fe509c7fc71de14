"""A directory of this process for what it has no better place for: error files of workers that nobody keeps logs of.

It is locked for as long as its owner lives, whatever ends that: whoever can lock one may remove it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile

PREFIX = "rdzvrun-"
MAKE_TRIES = 10  # somebody who clears up takes an empty one away, now and then


class Scratch:
    """The directory at `path`. All methods block."""

    def __init__(self, base: str | None = None) -> None:
        """Raises OSError."""
        for _ in range(MAKE_TRIES):
            self.path = tempfile.mkdtemp(prefix=PREFIX, dir=base)
            self._fd = _open(self.path)
            with contextlib.suppress(OSError):  # a file system without locks: then nobody takes it for left behind
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            with contextlib.suppress(OSError):  # removed before it was locked
                if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                    return
            os.close(self._fd)
        raise OSError(f"cannot keep a directory in {os.path.dirname(self.path)}: somebody removes it")

    def remove(self) -> None:
        """Idempotent; what cannot be removed stays."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def remove_stale(base: str | None = None) -> int:
    """Remove what killed launchers of this user left behind. Returns how many directories that was. Blocks."""
    removed = 0
    with contextlib.suppress(OSError), os.scandir(base or tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    removed += _remove_if_stale(entry.path)
    return removed


def _remove_if_stale(path: str) -> bool:
    fd = _open(path)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            return False  # mkdtemp makes them ours alone
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(fd)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
