"""What a launcher asks of its processes, and the facts that it is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """One worker to start. The working directory and umask are those the launcher was started with."""

    local_rank: int
    fork: bool = False  # from the zygote, if there is one: argv is PYTHON [-u] SCRIPT ... or PYTHON [-u] -m MODULE ...
    argv: tuple[str, ...]  # argv[0] without a slash is looked up in the PATH of `env`
    env: Mapping[str, str]  # all of it
    stdin: int = 0
    stdout: int = 1
    stderr: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygotePlan:
    """A zygote that workers can be forked from."""

    worker_argv: tuple[str, ...]  # of any worker: its python, which is run, and where it finds modules
    env: Mapping[str, str]  # what workers are started with, less what is the round's or the rank's
    modules: tuple[str, ...]  # to import, "torch" first
    later: tuple[str, ...] = ()  # to import as well, beside the first round that lasts
    later_s: float = 20.0  # ... for so long: it is about to go on, and what is slow about its beginning is over


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    """A worker has ended, by itself or because it was stopped."""

    round_uid: str
    local_rank: int
    exit_code: int  # 0 when a signal ended it
    signal: int  # that ended it, or 0
    at: float  # when it was noticed, by the loop's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperEnded:
    """A helper has ended though nobody told it to, or could not be started by `begin_helper` (exit code 127)."""

    name: str
    exit_code: int
    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnerEnded:
    """The spawner died, and with it all workers and helpers: their facts follow when they are gone. The next `spawn`
    or `start_helper` starts a new one."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteEnded:
    """There is no zygote (any more): from here on all are started by exec. Those that run are not touched."""

    text: str
    missing: bool  # there is no torch: nothing is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """Workers have ended, and a stop waits for processes that they started."""

    names: tuple[str, ...]  # of the first few, with their pids
    kill_s: float  # until they are killed


@dataclass(frozen=True, slots=True, kw_only=True)
class HeirEnded:
    """What was to be imported later could not be: the zygote goes on without it."""

    text: str


ProcessFact: TypeAlias = WorkerEnded | HelperEnded | SpawnerEnded | ZygoteEnded | HeirEnded | LeftBehind


class SpawnFailed(Exception):
    """A worker could not be started, so that none of its round lives. `text` is for people."""

    def __init__(self, local_rank: int, text: str) -> None:
        super().__init__(f"local rank {local_rank}: {text}")
        self.local_rank = local_rank
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    name: str
    pid: int
