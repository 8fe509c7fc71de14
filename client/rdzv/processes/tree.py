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
        # The second field is the program's name in parentheses, and may hold parentheses itself.
        parent = int(stat[stat.rindex(b")") + 1 :].split(None, 2)[1])
        families.setdefault(parent, []).append(int(name))
    return families
