"""Who descends from whom, as /proc tells it."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as in typing, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Collection


def children(pid: int) -> list[int]:
    """The pids of the direct children of a single-threaded process, zombies too. Children that end while this reads may
    hide others: an empty answer is final only if none has ended meanwhile."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or no such process
        return _families().get(pid, [])


def descendants(root: int, without: Collection[int] = ()) -> list[int]:
    """The pids of all processes below `root`, zombies too, every process after its own descendants. `without`: these,
    and who descends from them, are left out."""
    families = _families()
    found: list[int] = []
    level = [root]
    seen = {root, *without}  # pids may be reused while /proc is read: no circle may hold us
    while level:
        level = [child for parent in level for child in families.get(parent, ()) if child not in seen]
        seen.update(level)
        found += level
    found.reverse()
    return found


def is_dead(pid: int) -> bool:
    """Whether nothing of this process runs any more, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = _after_name(file.read())
    except OSError:
        return True
    # A process whose first thread has ended looks like a zombie while others run.
    state, threads = fields[0], int(fields[17])
    return state in (b"Z", b"X") and threads < 2


def name(pid: int) -> str:
    """What the kernel calls the program; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().strip().decode("utf-8", "replace")
    except OSError:
        return ""


def _families() -> dict[int, list[int]]:
    """parent pid → pids of its children. One pass over /proc: about 20 us a process."""
    families: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it ended
        families.setdefault(int(_after_name(stat)[1]), []).append(int(name))
    return families


def _after_name(stat: bytes) -> list[bytes]:
    """The fields from the state on. The one before is the program's name in parentheses, and may hold some itself."""
    return stat[stat.rindex(b")") + 1 :].split()
