"""Any order of events, any spacing in time, any delay and loss: what must always hold, holds; and peace heals all.

The nodes keep to the protocol (tests/stage.py), the ledger judges every step (tests/ledger.py). To hunt longer than a
test run does: HUNT=5000 pytest tests/sim/test_invariants.py, with a new seed each time, which is printed on failure.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rendezvousd.core.model import Failure, Grow, Phase
from tests.stage import LIVE, Player, Stage

NODES_MAX = 7  # more launchers at a time find nothing that these do not
WHO = st.integers(0, NODES_MAX - 1)
LATE = st.sampled_from([False, False, True])
SECONDS = st.sampled_from([0.0, 0.2, 1.0, 1.0, 3.0, 5.0, 10.0, 35.0, 70.0])
AGES = st.sampled_from([0.0, 0.0, 0.1, 2.0, 30.0])
# A job that can heal does so within: stop grace and lease, the time to offer, a cool-down, a settle or growth cap.
HEALED_S = 35.0 + 30.0 + 60.0 + 30.0 + 30.0


class AnyHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()

    @initialize(
        size=st.sampled_from(["1", "2", "1:2", "2:3", "3:4", "1:4"]),
        max_restarts=st.integers(0, 3),
        grow=st.sampled_from(Grow),
        short_rounds_max=st.sampled_from([3, 20]),
        nodes=st.integers(0, 4),
    )
    def begin(self, size: str, max_restarts: int, grow: Grow, short_rounds_max: int, nodes: int) -> None:
        self.stage = Stage(size, max_restarts=max_restarts, grow=grow, short_rounds_max=short_rounds_max)
        if nodes:
            self.stage.join(*"abcd"[:nodes])

    # ------------------------------------------------------------------------------------------- the nodes

    def who(self, index: int) -> Player:
        players = self.players()
        return players[index % len(players)]

    def players(self) -> list[Player]:
        return [p for p in self.stage.players if not p.exited]

    def anybody(self) -> bool:
        return bool(self.players())

    def there_is_a_job(self) -> bool:
        return self.stage.job_or_none is not None

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

    @precondition(anybody)
    @rule(who=WHO, late=LATE)
    def speaks(self, who: int, late: bool) -> None:
        player = self.who(who)
        if player.cut:
            return
        player.outbox.append(player.state(self.stage.now))
        if not late:
            self.flush(player)

    def flush(self, player: Player) -> None:
        while player.outbox and not player.refused:
            self.stage.deliver(player.outbox.pop(0))

    @precondition(lambda self: self.anybody() and self.there_is_a_job())
    @rule(who=WHO, late=LATE)
    def is_told(self, who: int, late: bool) -> None:
        player = self.who(who)
        if player.cut:
            return
        player.mail.append(self.stage.told(player))
        if not late:
            while player.mail and not player.exited:
                player.obey(player.mail.pop(0))

    @precondition(anybody)
    @rule(who=WHO)
    def works(self, who: int) -> None:
        """Start what is to be started, end what is to be stopped."""
        player = self.who(who)
        if player.held is None:
            return
        if player.held.phase is Phase.STARTING and not player.doomed:
            player.start()
        elif player.held.phase not in LIVE and player.alive:
            player.stopped()

    @precondition(anybody)
    @rule(who=WHO)
    def finishes(self, who: int) -> None:
        player = self.who(who)
        if player.held is not None and player.held.phase is Phase.RUNNING:
            player.finish()

    @precondition(anybody)
    @rule(who=WHO, age_s=AGES, victim=st.booleans(), alive=st.integers(0, 1), signal=st.sampled_from([0, 9]))
    def fails(self, who: int, age_s: float, victim: bool, alive: int, signal: int) -> None:
        player = self.who(who)
        if player.held is None or not player.alive or player.held.phase not in (*LIVE, Phase.FAILED):
            return
        rank = 10 * self.stage.players.index(player) + len(player.held.failures)
        player.fail(
            self.stage.now, Failure(rank=rank, age_s=age_s, victim_hint=victim, signal=signal, exit_code=3), alive=alive
        )

    @precondition(anybody)
    @rule(who=WHO)
    def cannot_reach_its_peers(self, who: int) -> None:
        player = self.who(who)
        if player.held is not None and player.held.phase is Phase.STARTING:
            player.cannot_reach_master()

    @precondition(anybody)
    @rule(who=WHO)
    def loses_its_store(self, who: int) -> None:
        player = self.who(who)
        if player.held is not None and player.held.phase in LIVE:
            player.store_dies()

    @precondition(anybody)
    @rule(who=WHO)
    def leaves(self, who: int) -> None:
        self.who(who).leave("got SIGTERM")

    # ---------------------------------------------------------------------------------- what befalls them

    @precondition(anybody)
    @rule(who=WHO)
    def is_cut_off(self, who: int) -> None:
        self.who(who).cut = True

    @precondition(anybody)
    @rule(who=WHO)
    def stream_breaks(self, who: int) -> None:
        self.stage.break_stream(self.who(who))

    @precondition(anybody)
    @rule(who=WHO)
    def returns(self, who: int) -> None:
        player = self.who(who)
        if player.cut:
            player.cut = False
            player.outbox.clear()  # what was on the way when the stream broke is lost
            player.mail.clear()

    @precondition(anybody)
    @rule(who=WHO)
    def dies(self, who: int) -> None:
        self.stage.die(self.who(who))

    @precondition(there_is_a_job)
    @rule(who=WHO, silent_s=st.sampled_from([0.0, 1.0, 5.0]))
    def is_given_up(self, who: int, silent_s: float) -> None:
        gone = [p for p in self.stage.players if p.cut and p.uid in self.stage.job.nodes]
        if gone:
            self.stage.lose(gone[who % len(gone)], silent_s=silent_s)

    @precondition(lambda self: self.anybody() and self.there_is_a_job())
    @rule(who=WHO)
    def says_old_things_again(self, who: int) -> None:
        """A message comes twice, or after a newer one; the next says how things stand."""
        player = self.who(who)
        words = self.stage.ledger.spoken.get(player.uid)
        if words and player.leaving is None and not player.cut and player.uid in self.stage.job.nodes:
            self.stage.deliver(words[who % len(words)])
            self.speaks(self.players().index(player), late=False)

    @precondition(there_is_a_job)
    @rule(who=WHO, sure=st.integers(0, 3))
    def is_removed(self, who: int, sure: int) -> None:
        if not sure and self.anybody():
            self.stage.remove(self.who(who))

    @precondition(there_is_a_job)
    @rule()
    def operator_restarts(self) -> None:
        self.stage.restart()

    @precondition(there_is_a_job)
    @rule(sure=st.integers(0, 30), success=st.booleans())
    def operator_closes(self, sure: int, success: bool) -> None:
        if not sure:
            self.stage.close(success=success)

    # ------------------------------------------------------------------------------------------------ time

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.stage.wait(seconds)
        self.forget()

    @precondition(there_is_a_job)
    @rule()
    def time_comes(self) -> None:
        self.stage.to_wake()
        self.forget()

    @rule(times=st.integers(1, 4))
    def all_behave(self, times: int) -> None:
        self.stage.play(times)

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
