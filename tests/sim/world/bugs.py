"""Deliberate bugs: what the simulation must not let pass.

Each is a change of the source of functions of ours, as in test_mutations.py, and a range of seeds known to find it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rdzv import node, rules
from rdzv.session import Session
from rendezvousd.attendance import Clock
from rendezvousd.backends import etcd
from rendezvousd.core import liveness, machine, ranks, tally
from rendezvousd.core.kv import Namespace
from rendezvousd.core.rules import admit, hear, lost, recover, seats, verdict
from rendezvousd.election import Election
from rendezvousd.engine import Engine
from rendezvousd.rpc.durable import Durable
from rendezvousd.rpc.rendezvous import Renderer
from tests.sim.test_mutations import Mutation, mutated

MARGIN = 40


@dataclass(frozen=True)
class Bug:
    changes: tuple[Mutation, ...]
    first: int  # seed that is known to find it; as the code changes, another one near it may

    @property
    def seeds(self) -> range:
        return range(self.first, self.first + MARGIN)

    def planted(self) -> ExitStack:
        """Return a scope in which the code has it."""
        stack = ExitStack()
        for change in self.changes:
            stack.enter_context(mutated(*change))
        return stack


def _bug(first: int, function: Callable[..., Any], guard: str, instead: str) -> Bug:
    return Bug(((function, guard, instead),), first)


BUGS: dict[str, Bug] = {
    "the guard against news of an older round is dropped": _bug(
        1290,
        hear._held,
        "here = held is not None and held.round_uid == round_.uid",
        "here = held is not None",
    ),
    "an offer counts whatever round it names as over": _bug(
        139, tally.offer_counts, " and node.offer.after == job.known.round_uid", ""
    ),
    "a spare is seated before a member": _bug(
        146,
        seats._seal,
        "newcomers = choose(job.round, strangers, job.spec.max_nodes - len(survivors))",
        "newcomers = choose(job.round, strangers, job.spec.max_nodes)\n"
        "    survivors = survivors[: job.spec.max_nodes - len(newcomers)]",
    ),
    "sealing does not wait for old workers": _bug(1134, seats.blocked, "or tally.busy > 0", ""),
    "a round's number is taken for its identity": _bug(
        0,
        node.Agent.valid.fget,  # type: ignore[attr-defined]
        "self.place.valid_round_uid == self.held.round_uid",
        "self.place.known.round == self.held.assignment.round",
    ),
    "the loss of a node is charged": _bug(
        18,
        verdict.fix_verdict,
        "round_.cause.kind is CauseKind.WORKER_FAILED",
        "round_.cause.kind in (CauseKind.WORKER_FAILED, CauseKind.NODE_LOST)",
    ),
    "a pause of the daemon is taken for silence": _bug(
        415, Clock.now, "min(self._time() - self._ticked_at, CREDIT_MAX_S)", "self._time() - self._ticked_at"
    ),
    "a dead joiner is sealed in": _bug(50, machine._unheard, "node is None or node.offer is None", "True"),
    "nodes are told before it is durable": _bug(
        0,
        Engine._commit,
        "before = None if room is None else room.job\n",
        "before = None if room is None else room.job\n"
        "    if room is not None:\n"
        "        room.job = job\n"
        "        self._delivery.tell_all(room)\n",
    ),
    "a round's number is used again after a restart": Bug(
        (
            (
                admit.found,
                "known = event.known if event.known.job_uid else Known(job_uid=uid)",
                "known = Known(job_uid=event.known.job_uid or uid)",
            ),
            (admit.learn, "if known.job_uid != mine.job_uid or (", "if True or ("),
        ),
        first=2,
    ),
    "ranks are dealt with a gap": _bug(
        1, ranks.deal, "first_rank += node.spec.slots", "first_rank += node.spec.slots + 1"
    ),
    "who waits is lost at a failover": _bug(0, Session._attend_for_ever, "turn += 1", "turn += 0"),
    "who says nothing new is not answered": _bug(
        165, Engine._commit, "self._delivery.answer(room, letters)\n        room.wakes_at", "room.wakes_at"
    ),
    "a daemon acts after losing its lease": _bug(
        35, Election._renew, "max(term.valid_until, sent_at + left_s)", "max(term.valid_until, sent_at + left_s + 3.0)"
    ),
    "a daemon answers without looking whether it leads": _bug(330, Renderer.place, "self.engine.check_lead()", "pass"),
    "a node offers itself while its workers live": _bug(0, rules._offerable, "not agent.idle or ", ""),
    "a candidate whose lease has ended gives up": _bug(
        300946, Election._take, "if not lease_ended(refusal):", "if True:"
    ),
    # What plan2 has (world/wide.py): other jobs, tokens and options, and its stories.
    "a job whose nodes fell silent gives way at once": _bug(
        80, lost.note_lost, "return replace(job, lost_at=now)", "return job"
    ),
    "a job whose nodes fell silent is kept for too short": _bug(
        200, lost.may_return, "job.spec.timing.recovery_max_s", "1.0"
    ),
    "a job whose nodes fell silent gives way to another submission at once": _bug(
        80, admit.in_the_way, "or lost.expected(job, now)", ""
    ),
    "a launcher of another submission joins a job that runs": _bug(
        50,
        admit._other_submission,
        "return bool(event.submission) and bool(job.submission) and event.submission != job.submission",
        "return False",
    ),
    "a job gives way to a stale launcher at any time": _bug(
        40, admit.gives_way, "now < job.provisional_until_at", "job.provisional_until_at > 0"
    ),
    "a straggler stops a round that runs": _bug(
        60,
        admit.learn,
        "learning = job.running is None or now < job.spec.timing.recovery_max_s or stands_alone(event)",
        "learning = True",
    ),
    "nobody waits for workers that end with their lease": _bug(515, seats.blocked, "or bool(job.fences)", ""),
    "a member of another round counts as one of the round that is learnt": _bug(
        0, recover.note, "event.held.round_uid != recovery.uid", "False"
    ),
    "the store answers before it is durable": _bug(
        20, Durable.settled, "while self._written < number:", "while False:"
    ),
    "the store does an addition again that is tried again": _bug(
        75, Namespace.add, 'done = self._done(op_id, "add", key)', "done = None"
    ),
    "a record is written at once whatever its size": _bug(
        220,
        etcd._fits,
        "return len(parts) < OPERATIONS_MAX // 2 and sum(map(len, parts)) <= BYTES_MAX",
        "return True",
    ),
    "what a node does not give is taken for a wish": _bug(
        20, admit.disagreement, "for name in node.given:", "for name in job.timing.__struct_fields__:"
    ),
    "how often a node sat out has no bound": _bug(20, liveness.pause_s, "min(max(0, times), DOUBLINGS_MAX)", "times"),
    "two folds of one job at a time": _bug(20, Engine._fold_for_ever, "if r not in self._serving", "if True"),
    "a loss is not weighed against what it caused": _bug(575, verdict._order, ", cause.at)", ", -cause.at)"),
}
