"""How etcd is, in words: for the log when it changes, and for the status line at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from rendezvousd.backends.etcd_errors import EtcdError, Trouble
from rendezvousd.etcd.v1 import etcd_pb2 as pb

log = logging.getLogger(__name__)

# An answer that took so long is worth a word: a node waits for two or three of them.
SLOW_S = 0.5
# Members choose a leader within a second or two. Without one for longer, there are too few of them.
LEADERLESS_S = 5.0
# A trouble not met again for so long is over: attempts are at most a deadline and a pause apart.
FORGOTTEN_S = 10.0

Answers = Mapping[str, pb.StatusResponse | EtcdError]  # by endpoint
Statuses = Callable[[], Awaitable[Answers]]

# What only a look at all members tells apart: the caller sees that one of them did not answer.
_UNCLEAR = (
    Trouble.UNREACHABLE,
    Trouble.SLOW,
    Trouble.CHANGING_LEADER,
    Trouble.NO_QUORUM,
    Trouble.LEARNER,
    Trouble.BROKEN,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One trouble. Instants are the event loop's."""

    trouble: Trouble
    text: str
    path: str  # of the method that met it
    since_at: float
    met_at: float


class Health:
    """What the calls of one client have shown of etcd."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses
        self._report: Report | None = None
        self._look: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> Trouble | None:
        """What is wrong; None: nothing that is known."""
        report = self._current()
        return None if report is None else report.trouble

    def describe(self) -> str:
        """Return what is wrong, why, and since when, in one line; empty if nothing is."""
        report = self._current()
        if report is None:
            return ""
        lasted_s = asyncio.get_running_loop().time() - report.since_at
        return f"etcd {report.trouble.value} (for {lasted_s:.0f} s): {report.text}"

    def worked(self, path: str, took_s: float) -> None:
        """Take in that a call was answered."""
        if took_s >= SLOW_S:
            self._note(Trouble.SLOW, f"it took {took_s:.1f} s to answer", path)
            return
        report = self._report
        if report is None or (report.trouble not in _UNCLEAR and report.path != path):
            return  # an etcd without space still answers readers
        lasted_s = asyncio.get_running_loop().time() - report.since_at
        log.info("etcd answers again, after %.1f s in which it %s", lasted_s, _past(report.trouble))
        self._report = None

    def failed(self, target: str, path: str, failure: EtcdError) -> EtcdError:
        """Take in that a call failed, and return the failure."""
        if failure.trouble is Trouble.MISUSED:
            return failure  # the trouble is the caller's
        report = self._current()
        known = report is not None and report.trouble in _UNCLEAR and failure.trouble in _UNCLEAR
        if known and report is not None:  # a look has said better what it is, or will
            self._report = replace(report, met_at=asyncio.get_running_loop().time())
        else:
            self._note(failure.trouble, f"{target}: {failure.text}", path)
        if failure.trouble in _UNCLEAR and (self._look is None or self._look.done()):
            self._look = asyncio.create_task(self._diagnose())
        return failure

    async def close(self) -> None:
        """Stop looking."""
        if self._look is not None:
            self._look.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._look

    async def _diagnose(self) -> None:
        """Ask all members how they are, and say what that means."""
        answers = await self._statuses()
        report = self._current()
        if report is None or report.trouble not in _UNCLEAR:
            return
        lasted_s = asyncio.get_running_loop().time() - report.since_at
        found = diagnose(answers, lasted_s)
        if found is not None:
            self._note(*found, report.path)

    def _current(self) -> Report | None:
        if self._report is not None and asyncio.get_running_loop().time() - self._report.met_at > FORGOTTEN_S:
            self._report = None
        return self._report

    def _note(self, trouble: Trouble, text: str, path: str) -> None:
        now, before = asyncio.get_running_loop().time(), self._current()
        since_at = now if before is None else before.since_at
        if before is None or before.trouble is not trouble:
            log.warning("etcd %s: %s", trouble.value, text)
        self._report = Report(trouble=trouble, text=text, path=path, since_at=since_at, met_at=now)


def diagnose(answers: Answers, lasted_s: float) -> tuple[Trouble, str] | None:
    """Return what the members' words on themselves mean, after a trouble of so many seconds; None: they are well."""
    alive = [answer for answer in answers.values() if isinstance(answer, pb.StatusResponse)]
    silent = {target: answer for target, answer in answers.items() if isinstance(answer, EtcdError)}
    learners = [t for t, answer in answers.items() if isinstance(answer, pb.StatusResponse) and answer.is_learner]
    count = f"{len(alive)} of {len(answers)} endpoint{'s' if len(answers) > 1 else ''}"
    if not alive:
        unreachable = all(answer.trouble is Trouble.UNREACHABLE for answer in silent.values())
        trouble = Trouble.UNREACHABLE if unreachable else Trouble.SLOW
        return trouble, f"{count} answer{'s' if len(answers) == 1 else ''}; {_each(silent)}"
    if len(learners) == len(alive):
        others = f"; {_each(silent)}" if silent else ""
        return Trouble.LEARNER, f"of the endpoints only {', '.join(learners)} answers, as a learner{others}"
    if any("space" in error.lower() for answer in alive for error in answer.errors):
        return Trouble.OUT_OF_SPACE, "it has raised its alarm NOSPACE"
    if not any(answer.leader for answer in alive):
        few = len(answers) > 1 and 2 * len(alive) <= len(answers)
        lost = few or lasted_s >= LEADERLESS_S
        trouble = Trouble.NO_QUORUM if lost else Trouble.CHANGING_LEADER
        return trouble, f"{count} answer{'s' if len(alive) == 1 else ''}, and know{'s' * (len(alive) == 1)} no leader"
    return None


def _each(silent: Mapping[str, EtcdError]) -> str:
    """Return what the members' failures are, in words; members that fail alike are named together."""
    by_text: dict[str, list[str]] = {}
    for target, error in silent.items():
        by_text.setdefault(error.text.replace(target, "it"), []).append(target)
    return "; ".join(f"{', '.join(targets)}: {text}" for text, targets in by_text.items())


def _past(trouble: Trouble) -> str:
    return {
        Trouble.UNREACHABLE: "could not be reached",
        Trouble.SLOW: "was too slow",
        Trouble.CHANGING_LEADER: "was changing its leader",
        Trouble.NO_QUORUM: "had no quorum",
        Trouble.LEARNER: "was asked at a learner",
        Trouble.OUT_OF_SPACE: "was out of space",
        Trouble.PASSWORD: "refused the password",
        Trouble.DENIED: "denied permission",
        Trouble.BROKEN: "failed",
        Trouble.MISUSED: "did not accept the request",
    }[trouble]
