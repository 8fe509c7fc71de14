"""Log files of workers, where torchrun puts them.

    <log dir>/<run id>_xxxxxxxx/attempt_<n>/<local rank>/stdout.log, stderr.log, error.json
                                attempt_<n>/filtered_stdout.log, filtered_stderr.log

The attempt counts the rounds of the job from 0. All nodes agree on it, and no two rounds share one: torchrun's restart
count stays the same when a node was lost, and it then deletes the files of the round before.
"""

from __future__ import annotations

import os
import tempfile

OUT, ERR = 1, 2  # torchrun's numbers of the streams; 3 is both
NAMES = {OUT: "stdout", ERR: "stderr"}


def streams_of(text: str, slots: int) -> tuple[int, ...]:
    """Return OUT | ERR for each local rank. `text`: one number for all, or LOCAL_RANK:STREAMS,..."""
    if ":" not in text:
        return (int(text),) * slots
    pairs = (part.split(":") for part in text.split(","))
    by_rank = {int(local_rank): int(streams) for local_rank, streams in pairs}
    return tuple(by_rank.get(local_rank, 0) for local_rank in range(slots))


class LogDir:
    """The directory of one launcher's log files. Nothing is made before it is needed."""

    def __init__(self, log_dir: str | None, run_id: str) -> None:
        self._log_dir = log_dir
        self._run_id = run_id
        self.path = ""  # of this run, once it is made

    def attempt(self, number: int) -> str:
        """Return the directory of one round, which is there. Blocks. Raises OSError."""
        if not self.path:
            self.path = self._make()
        directory = os.path.join(self.path, f"attempt_{number}")
        os.makedirs(directory, exist_ok=True)
        return directory

    def worker(self, number: int, local_rank: int) -> str:
        """Return the directory of one worker of one round, which is there. Blocks. Raises OSError."""
        directory = os.path.join(self.attempt(number), str(local_rank))
        os.makedirs(directory, exist_ok=True)
        return directory

    def _make(self) -> str:
        if self._log_dir is None:
            base = tempfile.mkdtemp(prefix="torchelastic_")  # as torchrun's: there people look for them
        else:
            base = os.path.abspath(self._log_dir)
            os.makedirs(base, exist_ok=True)
        # A run id may hold anything and be longer than a name of a file may be.
        return tempfile.mkdtemp(prefix=f"{self._run_id.replace(os.sep, '_')[:60]}_", dir=base)


def append_to(path: str) -> int:
    """Return a descriptor that appends to this file. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def last_bytes(path: str, size: int) -> bytes:
    """Return the end of a file; nothing of one that cannot be read. Blocks."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size)
    except OSError:
        return b""
