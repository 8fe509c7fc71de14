"""Whether memory has run out: the kernel counts the processes that it kills for that."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_ROOT = "/"


def oom_kills(root: str = _ROOT) -> tuple[int, ...]:
    """Return how often the OOM killer has struck: in the cgroup of this process, and on this host, as far as the kernel
    tells (a missing count is 0). Blocks. `root`: where /proc and /sys are found."""
    return tuple(_count(path) for path in (os.path.join(root, "proc/vmstat"), *_cgroup_files(root)))


def moved(before: Sequence[int], after: Sequence[int]) -> bool:
    """Return whether the OOM killer has struck in between."""
    return any(new > old for old, new in zip(before, after, strict=False))


def _cgroup_files(root: str) -> list[str]:
    """Where a cgroup's counts are, of version 2 and of version 1. In a container the path that the process is told may
    be that of the host, and the mount the container's own: then the top of the mount is the cgroup."""
    files = []
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, colon, rest = line.partition(":")
        controllers, second_colon, path = rest.partition(":")
        if not colon or not second_colon:
            continue
        if not controllers:
            mount, name = "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        mount = os.path.join(root, mount)
        own = os.path.join(mount, path.lstrip("/"), name)
        files.append(own if os.path.exists(own) else os.path.join(mount, name))
    return files


def _count(path: str) -> int:
    found = re.search(r"^oom_kill (\d{1,18})$", _read(path), re.MULTILINE)
    return int(found[1]) if found else 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""
