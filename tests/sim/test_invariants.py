"""Any order of events, any spacing in time, any delay and loss: what must always hold, holds; and peace heals all.

The nodes keep to the protocol (tests/stage.py), the ledger judges every step (tests/ledger.py). To hunt longer than a
test run does: HUNT=5000 pytest tests/sim/test_invariants.py, with a new seed each time, which is printed on failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rendezvousd.core.model import Failure, Grow, OnDaemonLoss, Phase
from tests.stage import LIVE, Player, Stage

NODES_MAX = 7  # more launchers at a time find nothing that these do not
WHO = st.integers(0, NODES_MAX - 1)
LATE = st.sampled_from([False, False, True])
SECONDS = st.sampled_from([0.0, 0.2, 1.0, 1.0, 3.0, 5.0, 10.0, 35.0, 70.0])
AGES = st.sampled_from([0.0, 0.0, 0.1, 2.0, 30.0])
# A job that can heal does so within: stop grace and lease, the time to offer, a cool-down, a settle or growth cap;
# and the time in which workers may live that nobody hears of.
HEALED_S = 35.0 + 30.0 + 60.0 + 30.0 + 30.0 + 10.0


T = TypeVar("T")


def pick(among: Sequence[T], index: int) -> T:
    return among[index % len(among)]


def somebody(like: Callable[[Player], bool]) -> Callable[[Any], Any]:
    """Let a rule run only while there is a node like this."""
    return precondition(lambda self: bool(self.some(like)))


class AnyHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()

    @initialize(
        size=st.sampled_from(["1", "2", "1:2", "2:3", "3:4", "1:4"]),
        max_restarts=st.integers(0, 3),
        grow=st.sampled_from(Grow),
        short_rounds_max=st.sampled_from([3, 20]),
        join_s=st.sampled_from([20.0, 600.0]),
        nodes=st.integers(0, 4),
        loss=st.sampled_from(OnDaemonLoss),
    )
    def begin(
        self,
        size: str,
        max_restarts: int,
        grow: Grow,
        short_rounds_max: int,
        join_s: float,
        nodes: int,
        loss: OnDaemonLoss,
    ) -> None:
        wishes = {"max_restarts": max_restarts, "grow": grow, "short_rounds_max": short_rounds_max, "join_s": join_s}
        self.stage = Stage(size, on_daemon_loss=loss, **wishes)  # type: ignore[arg-type]
        if nodes:
            self.stage.run(*"abcd"[:nodes])

    # ------------------------------------------------------------------------------------------- the nodes

    def players(self) -> list[Player]:
        return [p for p in self.stage.players if not p.exited]

    def some(self, like: Callable[[Player], bool]) -> list[Player]:
        return [p for p in self.players() if like(p)]

    @precondition(lambda self: len(self.players()) < NODES_MAX)
    @rule(
        name=st.sampled_from("abcdef"),
        slots=st.integers(1, 3),
        token=st.sampled_from(["", "", "", "s1", "s2"]),
        age_s=st.sampled_from([0.0, 0.0, 100.0]),
        rank=st.none() | st.integers(0, 3),
        grace_s=st.sampled_from([1.0, 30.0]),
    )
    def enters(self, name: str, slots: int, token: str, age_s: float, rank: int | None, grace_s: float) -> None:
        self.stage.enter(name, slots=slots, submission=token, age_s=age_s, node_rank=rank, stop_grace_s=grace_s)

    @somebody(lambda p: not p.cut)
    @rule(who=WHO, late=LATE)
    def speaks(self, who: int, late: bool) -> None:
        player = pick(self.some(lambda p: not p.cut), who)
        player.outbox.append(player.state(self.stage.now))
        if not late:
            self.flush(player)

    def flush(self, player: Player) -> None:
        while player.outbox and not player.refused:
            self.stage.deliver(player.outbox.pop(0))

    def listening(self) -> list[Player]:
        """Who may be told something: whoever spoke and is not cut off."""
        if self.stage.job_or_none is None:
            return []
        return self.some(lambda p: not p.cut and p.uid in self.stage.heard_at)

    @precondition(lambda self: bool(self.listening()))
    @rule(who=WHO, late=LATE)
    def is_told(self, who: int, late: bool) -> None:
        player = pick(self.listening(), who)
        player.mail.append(self.stage.told(player))
        while player.mail and not late and not player.exited:
            player.obey(player.mail.pop(0))

    @somebody(lambda p: not p.cut)
    @rule(who=WHO, then_speaks=st.booleans())
    def behaves(self, who: int, then_speaks: bool) -> None:
        """Read, obey, start or stop, and most often say so."""
        player = pick(self.some(lambda p: not p.cut), who)
        self.stage.behave(player, speak=then_speaks)

    @somebody(lambda p: p.held is not None and p.held.phase is Phase.RUNNING)
    @rule(who=WHO, then_speaks=st.booleans())
    def finishes(self, who: int, then_speaks: bool) -> None:
        player = pick(self.some(lambda p: p.held is not None and p.held.phase is Phase.RUNNING), who)
        player.finish()
        if then_speaks:
            self.say_so(player)

    @somebody(lambda p: p.alive > 0)
    @rule(
        who=WHO,
        age_s=AGES,
        victim=st.booleans(),
        alive=st.integers(0, 1),
        signal=st.sampled_from([0, 9]),
        kind=st.sampled_from(["", "", "", "spawn"]),
        then_speaks=st.booleans(),
    )
    def fails(
        self, who: int, age_s: float, victim: bool, alive: int, signal: int, kind: str, then_speaks: bool
    ) -> None:
        player = pick(self.some(lambda p: p.alive > 0), who)
        if player.held is None or player.held.phase not in (*LIVE, Phase.FAILED):
            return  # it is being stopped: whatever its workers end with is no failure
        rank = 10 * self.stage.players.index(player) + len(player.held.failures)
        failure = Failure(rank=rank, age_s=age_s, victim_hint=victim, signal=signal, exit_code=3, kind=kind)
        player.fail(self.stage.now, failure, alive=alive)
        if then_speaks:
            self.say_so(player)

    def say_so(self, player: Player) -> None:
        if not player.cut:
            player.outbox.append(player.state(self.stage.now))
            self.flush(player)

    @somebody(lambda p: p.held is not None and p.held.phase in LIVE)
    @rule(who=WHO)
    def loses_its_store(self, who: int) -> None:
        pick(self.some(lambda p: p.held is not None and p.held.phase in LIVE), who).store_dies()

    @somebody(lambda p: p.held is not None and p.held.phase is Phase.STARTING)
    @rule(who=WHO)
    def cannot_reach_its_peers(self, who: int) -> None:
        pick(self.some(lambda p: p.held is not None and p.held.phase is Phase.STARTING), who).cannot_reach_master()

    @somebody(lambda p: not p.doomed)
    @rule(who=WHO, then_speaks=st.booleans())
    def leaves(self, who: int, then_speaks: bool) -> None:
        player = pick(self.some(lambda p: not p.doomed), who)
        player.leave("got SIGTERM")
        if then_speaks:
            self.say_so(player)

    # ---------------------------------------------------------------------------------- what befalls them

    @somebody(lambda p: not p.cut)
    @rule(who=WHO, dies=st.booleans(), noticed=st.booleans())
    def is_cut_off(self, who: int, dies: bool, noticed: bool) -> None:
        player = pick(self.some(lambda p: not p.cut), who)
        player.cut = True
        if noticed:
            self.stage.break_stream(player)
        if dies:
            self.stage.die(player)

    @somebody(lambda p: not p.cut)
    @rule(who=WHO)
    def stream_breaks(self, who: int) -> None:
        self.stage.break_stream(pick(self.some(lambda p: not p.cut), who))

    @somebody(lambda p: p.cut)
    @rule(who=WHO, then_speaks=st.booleans())
    def returns(self, who: int, then_speaks: bool) -> None:
        player = pick(self.some(lambda p: p.cut), who)
        player.cut = False
        player.outbox.clear()  # what was on the way when the stream broke is lost
        player.mail.clear()
        if then_speaks:
            self.say_so(player)

    def silent(self) -> list[Player]:
        job = self.stage.job_or_none
        return [p for p in self.stage.players if (p.cut or p.exited) and job is not None and p.uid in job.nodes]

    @precondition(lambda self: bool(self.silent()))
    @rule(who=WHO, silent_s=st.sampled_from([0.0, 1.0, 5.0]))
    def is_given_up(self, who: int, silent_s: float) -> None:
        self.stage.lose(pick(self.silent(), who), silent_s=silent_s)

    def quotable(self) -> list[Player]:
        """Whose old words may come again: nodes that are attended, and such as are shown out for good."""
        job, spoken = self.stage.job_or_none, self.stage.ledger.spoken
        if job is None:
            return []
        return [p for p in self.stage.players if p.uid in spoken and (p.uid in job.gone or p.uid in job.nodes)]

    @precondition(lambda self: bool(self.quotable()))
    @rule(who=WHO, which=WHO)
    def says_old_things_again(self, who: int, which: int) -> None:
        """A message comes twice, or after a newer one; the next says how things stand."""
        player = pick(self.quotable(), who)
        gone = player.uid in self.stage.job.gone
        if player.cut and not gone:
            return
        self.stage.deliver(pick(self.stage.ledger.spoken[player.uid], which))
        if not gone:
            self.say_so(player)

    @somebody(lambda p: True)
    @rule(who=WHO, sure=st.integers(0, 2))
    def is_removed(self, who: int, sure: int) -> None:
        if not sure and self.stage.job_or_none is not None:
            self.stage.remove(pick(self.players(), who))

    @precondition(lambda self: self.stage.job_or_none is not None and self.stage.job.running is not None)
    @rule()
    def operator_restarts(self) -> None:
        self.stage.restart()

    @precondition(lambda self: self.stage.job_or_none is not None)
    @rule(sure=st.integers(0, 30), success=st.booleans())
    def operator_closes(self, sure: int, success: bool) -> None:
        if not sure:
            self.stage.close(success=success)

    # ------------------------------------------------------------------------------------------------ time

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.stage.wait(seconds)
        self.forget()

    @precondition(lambda self: self.stage.job_or_none is not None)
    @rule()
    def time_comes(self) -> None:
        self.stage.to_wake()
        self.forget()

    @rule(times=st.integers(1, 4))
    def all_behave(self, times: int) -> None:
        self.stage.play(times)

    @rule(seconds=SECONDS)
    def all_behave_for_a_while(self, seconds: float) -> None:
        self.stage.play(3)
        self.stage.wait(seconds)
        self.forget()
        self.stage.play(3)

    def forget(self) -> None:
        """An ended job is dropped in time, as the engine does; what still belongs to it goes."""
        job = self.stage.job_or_none
        if job is None or job.ending is None or self.stage.now < job.ending.at + job.spec.timing.ended_s:
            return
        for player in self.players():
            if player.uid in self.stage.ledger.spoken:
                player.refuse()
        self.stage.forget()

    def teardown(self) -> None:
        """Faults stop, all nodes behave, and there are enough: the job runs, or it has ended."""
        stage = self.stage
        if not stage.ledger.content:
            return  # something was found already
        for player in list(stage.players):
            if player.exited and stage.job_or_none is not None and player.uid in stage.job.nodes:
                stage.lose(player)
            player.cut = False
        end_at = stage.now + HEALED_S
        while stage.now < end_at and (stage.job_or_none is None or stage.job.gathering):
            willing = sum(not p.doomed and p.uid not in stage.ledger.barred for p in self.players())
            stage.join(*"uvwxyz"[: max(0, stage.spec.min_nodes - willing)])
            stage.play(3)
            stage.wait(1.0)
        note(f"peace: {stage.said}")
        assert stage.job.running is not None or stage.job.ending is not None, stage.said


HUNT = int(os.environ.get("HUNT", "0"))
AnyHistory.TestCase.settings = settings(
    max_examples=HUNT or 200,
    stateful_step_count=50,
    deadline=None,
    derandomize=not HUNT,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestAnyHistory = AnyHistory.TestCase
