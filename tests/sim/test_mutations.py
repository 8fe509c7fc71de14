"""A guard that is taken out of the core is missed: a history of test_invariants.py or a story finds it.

Each mutation is a change of the source of one function, so it is the guard itself that is tested and not a stand-in.
A mutation whose text is not found any more fails: the guard has moved, and so must this line.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from rendezvousd.core import machine, ranks, tally
from rendezvousd.core.rules import admit, ending, growth, hear, seats, suspects, verdict
from tests.sim.test_invariants import AnyHistory
from tests.unit import (
    test_rules_admit,
    test_rules_ending,
    test_rules_growth,
    test_rules_ranks,
    test_rules_sealing,
    test_rules_suspects,
    test_rules_verdict,
)

Mutation: TypeAlias = tuple[Callable[..., object], str, str]  # a function, its guard, what stands there instead

HUNT = settings(
    max_examples=600,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # found is enough; nobody reads the smallest example
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

# Found by chance, within some hundred histories.
BY_HISTORIES: dict[str, Mutation] = {
    "an offer counts whatever round it names as over": (
        tally.offer_counts,
        " and node.offer.after == job.known.round_uid",
        "",
    ),
    "a count is not taken back": (tally._add, "busy=tally.busy + sign * (", "busy=tally.busy + ("),
    "a seat that was given up is still held": (tally.holds_seat, "and node.uid not in job.round.forfeits", ""),
    "a member whose end is not known counts as stopped": (tally.stance, " or part_open(job, node)", ""),
    "sealing does not wait for members": (seats.blocked, " or tally.members_ready < tally.members", ""),
    "the settle time is woken for while others are waited for": (
        seats.seal_due_at,
        "blocked(job)",
        "job.enough_at is None",
    ),
    "newcomers are seated before members": (
        seats._seal,
        "newcomers = choose(job.round, strangers, job.spec.max_nodes - len(survivors))",
        "newcomers = choose(job.round, strangers, job.spec.max_nodes)\n"
        "    survivors = survivors[: job.spec.max_nodes - len(newcomers)]",
    ),
    "more nodes than max are seated": (seats._seal, "job.spec.max_nodes - len(survivors)", "job.spec.max_nodes"),
    "a round number is used again": (seats._seal, "number = job.known.round + 1", "number = max(1, job.known.round)"),
    "ranks leave a gap": (ranks.deal, "first_rank += node.spec.slots", "first_rank += node.spec.slots + 1"),
    "the verdict does not wait for all ends": (verdict.fix_verdict, "len(round_.ends) < len(round_.seats)", "False"),
    "a lost node is charged": (
        verdict.fix_verdict,
        "round_.cause.kind is CauseKind.WORKER_FAILED",
        "round_.cause.kind in (CauseKind.WORKER_FAILED, CauseKind.NODE_LOST)",
    ),
    "failures are free": (verdict.fix_verdict, "round_.cause.kind is CauseKind.WORKER_FAILED", "False"),
    "the first told is to blame": (
        verdict.blame,
        "tuple(sorted((*round_.evidence, cause), key=_order)[:EVIDENCE_MAX])",
        "(*round_.evidence, cause)",
    ),
    "the budget has no end": (verdict._charge, "known.restarts_used >= job.spec.max_restarts", "False"),
    "a loss breaks nothing": (verdict.vanish, "return job if kept else blame(job, cause, now)", "return job"),
    "who left comes back": (hear.heard, "if event.uid in job.gone:", "if False:"),
    "who left is seated": (hear.leave, "node = replace(node, leaving=departure)", "node = replace(node)"),
    "who leaves is not waited for": (hear.leave, "job if node.stance is Stance.BUSY else depart", "depart"),
    "old failures break new rounds": (
        hear._held,
        "here = held is not None and held.round_uid == round_.uid",
        "here = held is not None",
    ),
    "a full round grows": (growth.room, "len(round_.seats) < job.spec.max_nodes", "True"),
    "too few for ever": (machine.settle, "job = ending.fail_if_hopeless(job, now)", "pass"),
    "nothing ends a wait": (machine.settle, "job = verdict.give_up_overdue(job, now)", "pass"),
    "the first failure of a node is free": (
        suspects._again,
        "suspect.rounds >= ROUNDS_IN_A_ROW",
        "suspect.rounds >= 1",
    ),
    "a node sits out that its peers cannot do without": (suspects.weigh, "others < job.spec.min_nodes", "False"),
    "success of one is success of all": (ending.succeed, "round_.done < len(round_.seats)", "round_.done == 0"),
}

# What it takes to miss these is too rare for chance, or fails nobody: a story tells it.
BY_STORIES: dict[str, Mutation] = {
    "rank 0 goes to a newcomer": (ranks.order, "if places[0] is None and survivors:", "if False:"),
    "survivors are dealt anew": (ranks.order, "rank < size", "rank < 0"),
    "grow=never grows": (growth.growth_due_at, "spec.grow is Grow.NEVER or ", ""),
    "a node with live workers is not busy": (tally.stance, "node.alive or ", ""),
    "sealing does not wait for old workers": (seats.blocked, "or tally.busy > 0", ""),
    "who was late is waited for anew": (verdict._give_up, ", stance=stance(job, node)", ""),
    "the loss of a done node breaks the round": (verdict.vanish, "job if kept else blame", "blame"),
    "a node is let in though others are done": (growth.room, " and round_.done == 0", ""),
    "success is not noticed": (ending.succeed, "round_.done < len(round_.seats)", "True"),
    "the join timeout is woken for while the verdict is open": (ending.too_few_due_at, " or job.judging", ""),
    "half of all nodes fail and sit out": (
        suspects._to_blame,
        "len(few) == 1 or 2 * len(few) < len(round_.seats)",
        "True",
    ),
    "a bad host comes back by another launcher": (suspects.inherit, "suspect is None", "True"),
    "newcomers that trickle in cost a restart each": (growth._backed_off_until, "calm.admitted_at is None", "True"),
    "numbers begin anew with a new submission": (
        admit.superseding,
        "return replace(job, known=replace(job.known, round=old.known.round, round_uid=old.known.round_uid))",
        "return job",
    ),
}


@contextmanager
def mutated(function: Callable[..., object], guard: str, instead: str) -> Iterator[None]:
    """Let `function` run with `instead` in the place of `guard`, for everybody who has imported it."""
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(guard) == 1, f"{guard!r} is not in {function.__qualname__} once"
    space: dict[str, object] = {}
    future = "from __future__ import annotations\n"
    exec(compile(future + source.replace(guard, instead), function.__code__.co_filename, "exec"), space)
    changed = space[function.__name__]
    changed = changed.fget if isinstance(changed, property) else changed
    assert isinstance(changed, FunctionType)
    whole = function.__code__
    function.__code__ = changed.__code__
    try:
        yield
    finally:
        function.__code__ = whole


@pytest.mark.parametrize("name", BY_HISTORIES)
def test_a_guard_that_is_taken_out_is_missed_in_some_history(name: str) -> None:
    with mutated(*BY_HISTORIES[name]), pytest.raises(Exception):  # noqa: B017, PT011
        run_state_machine_as_test(AnyHistory, settings=HUNT)


def stories() -> list[Callable[[], None]]:
    """Return the stories of the rules that need nothing of pytest."""
    modules = (test_rules_admit, test_rules_ending, test_rules_growth, test_rules_ranks, test_rules_sealing)
    functions = [
        f
        for m in (*modules, test_rules_suspects, test_rules_verdict)
        for n, f in vars(m).items()
        if n.startswith("test_")
    ]
    return [f for f in functions if not inspect.signature(f).parameters]


def tell_all() -> None:
    for story in stories():
        story()


@pytest.mark.parametrize("name", BY_STORIES)
def test_a_guard_that_is_taken_out_is_missed_in_some_story(name: str) -> None:
    with mutated(*BY_STORIES[name]), pytest.raises(Exception):  # noqa: B017, PT011
        tell_all()
