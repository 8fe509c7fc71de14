"""A guard that is taken out of the engine, its table of nodes, or a rule for what was before it, is missed in a story.

As test_mutations.py, for what histories of the core alone do not reach. Whole clusters are mutated in world/bugs.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from rendezvousd.attendance import Attendance, Table
from rendezvousd.core.rules import admit, fence, lost, recover
from rendezvousd.delivery import Delivery
from rendezvousd.engine import Engine
from tests.sim import test_answers, test_engine, test_engine_faults, test_engine_streams, test_engine_takeover
from tests.sim.test_mutations import Mutation, mutated
from tests.unit import (
    test_attendance,
    test_rules_admit,
    test_rules_fence,
    test_rules_lost,
    test_rules_recover,
)

STORIES = (
    test_attendance,
    test_engine_streams,
    test_engine_takeover,
    test_rules_admit,
    test_rules_fence,
    test_rules_lost,
    test_rules_recover,
    test_answers,
    test_engine,
    test_engine_faults,
)

BY_ENGINE: dict[str, Mutation] = {
    "two folds of one job at a time": (Engine._fold_for_ever, "if r not in self._serving", "if True"),
    "a new leader believes nodes for a second": (
        Engine.take_over,
        "lease_s=max(believed.lease_s, job.spec.timing.recovery_s)",
        "lease_s=1.0",
    ),
    "what comes in while a job is written is forgotten": (
        Engine._serve,
        "if run_id in self._inbox:\n        self._letters.set()",
        "pass",
    ),
    "a heartbeat of an older stream counts": (
        Engine.heartbeat,
        "not row.attached or row.stream is not stream",
        "not row.attached",
    ),
    "a heartbeat of a lost node counts": (
        Engine.heartbeat,
        "not row.attached or row.stream is not stream",
        "row.stream is not stream",
    ),
    "who slept through the end starts the job anew": (
        Engine._which_job,
        "(why := self._finished.get(event.known.job_uid)) is not None",
        "(why := None) is not None",
    ),
    "a store outlives its job": (Engine.check, "if job_uid != room.job.uid:", "if False:"),
    "a store outlives its round": (Engine._end_namespaces, "if before.running is not None and", "if False and"),
    "what changes is not told at once": (Delivery.tell_all, "row.stream.notify()", "pass"),
}
BY_TABLE: dict[str, Mutation] = {
    "a node that does not obey stays": (
        Attendance.deadline,
        "min(due_at, obeys_at) if self.told > self.seen else due_at",
        "due_at",
    ),
    "a stream that breaks prolongs a lease": (
        Attendance.deadline,
        "min(returns_at, self.spoke_at + self.lease_s)",
        "returns_at",
    ),
    "a shorter lease holds before it is heard of": (
        Attendance.tell,
        "self.lease_s = max(self.lease_s, lease_s)",
        "self.lease_s = lease_s",
    ),
    "an older stream speaks": (Table.attend, "if stream.stream_no < row.stream.stream_no:", "if False:"),
    "an older stream's end counts": (
        Table.stream_ended,
        "row.stream is not stream or not row.attached",
        "not row.attached",
    ),
}
BY_RULES: dict[str, Mutation] = {
    "any word takes a fence down": (fence.heard, "not _proves(event, found.round_uid)", "False"),
    "the end of any round takes a fence down": (
        fence._proves,
        "(held.alive or held.round_uid != round_uid)",
        "held.alive",
    ),
    "fences that stand are not moved": (fence.note_lease, "until_at=f.until_at + more_s", "until_at=f.until_at"),
    "clocks are all the same": (
        fence.bound_s,
        "(lease_s / (1 - CLOCK_RATE) + kill_s) * (1 + CLOCK_RATE)",
        "lease_s + kill_s",
    ),
    "restarts are forgotten with the daemon": (
        admit.learn,
        "if known.restarts_used > mine.restarts_used:",
        "if False:",
    ),
    "a straggler stops a round that runs": (
        admit.learn,
        "learning = job.running is None or now < job.spec.timing.recovery_max_s or stands_alone(event)",
        "learning = True",
    ),
    "a job gives way to a stale launcher at any time": (
        admit.gives_way,
        "now < job.provisional_until_at",
        "job.provisional_until_at > 0",
    ),
    "a launcher of another submission joins": (
        admit._other_submission,
        "return bool(event.submission) and bool(job.submission) and event.submission != job.submission",
        "return False",
    ),
    "a job whose nodes fell silent gives way": (lost.note_lost, "return replace(job, lost_at=now)", "return job"),
    "who goes on with a lost job does not wait": (
        lost.admitted,
        "return replace(job, hold_until_at=now + job.spec.timing.recovery_s)",
        "return job",
    ),
    "a round is adopted without one of its members": (
        recover.complete,
        "0 < recovery.size <= len(recovery.heard)",
        "0 < recovery.size - 1 <= len(recovery.heard)",
    ),
    "a round that was being stopped goes on": (
        recover._resume_stopping,
        "if any(held.failures for held in helds) or all(held.phase in GOES_ON for held in helds):",
        "if True:",
    ),
    "the wait for members has no end": (
        recover.due_at,
        "min(recovery.last_at + timing.recovery_s, recovery.began_at + timing.recovery_max_s)",
        "recovery.last_at + timing.recovery_s",
    ),
}
MUTATIONS = {**BY_ENGINE, **BY_TABLE, **BY_RULES}


def stories() -> list[Callable[[], None]]:
    """Return the stories that need nothing of pytest."""
    functions = [f for module in STORIES for name, f in vars(module).items() if name.startswith("test_")]
    return [f for f in functions if inspect.isfunction(f) and not inspect.signature(f).parameters]


def tell_all() -> None:
    for story in stories():
        story()


def test_without_mutations_all_stories_hold() -> None:
    tell_all()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_guard_that_is_taken_out_is_missed(name: str) -> None:
    with mutated(*MUTATIONS[name]), pytest.raises(BaseException):  # noqa: B017, PT011 -- pytest.fail raises one
        tell_all()
