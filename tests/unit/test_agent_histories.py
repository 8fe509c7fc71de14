"""Any order of facts, any spacing in time: what must always hold of a node, holds.

The world around the agent is played by the machine below: it obeys orders late, in its own time, or not at all, and a
daemon deals, breaks, ends, forgets and repeats as it likes.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rdzv.agent import Config, begin, standing, step, wakes_at
from rdzv.model import (
    Assignment,
    CutShort,
    DaemonAway,
    DropStore,
    Ended,
    Exit,
    Fact,
    Hurry,
    Known,
    LeaveAsked,
    MasterReached,
    MasterUnreachable,
    OpenStore,
    Order,
    Outcome,
    Phase,
    Place,
    PlaceHeard,
    ReachMaster,
    Removed,
    Say,
    Spawn,
    SpawnFailed,
    Status,
    Stop,
    StoreFailed,
    StoreLost,
    StoreOpened,
    Tell,
    TimePassed,
    Waiting,
    WaitReason,
    WorkerEnded,
    WorkersGone,
    WorkersStarted,
)

SLOTS = 2


class AnyHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        # the daemon
        self.term, self.revision, self.round, self.valid = 1, 0, 0, ""
        self.said: list[Place] = []
        # the node's world
        self.opening: set[str] = set()
        self.stores: set[str] = set()
        self.minted: set[str] = set()
        self.dealt: set[str] = set()
        self.reaching: set[str] = set()
        self.spawned: list[str] = []
        self.alive: dict[str, set[int]] = {}  # round → local ranks
        self.stopping: set[str] = set()
        self.failed: set[str] = set()  # rounds with a genuine failure
        self.exit: Exit | None = None
        self.agent, orders = begin(
            Config(node_uid="n", endpoints="head", stop_grace_s=30, join_timeout_s=600), self.now
        )
        self.told = standing(self.agent)
        self.obey(orders)

    # ------------------------------------------------------------------------------------------------ the world

    def hear(self, fact: Fact) -> None:
        before = self.agent
        self.agent, orders = step(before, fact, self.now)
        if before.exited:
            assert orders == []
        self.obey(orders)

    def obey(self, orders: list[Order]) -> None:
        for order in orders:
            assert self.exit is None, "an order after the exit"
            match order:
                case OpenStore(offer_id):
                    assert offer_id not in self.minted
                    self.minted.add(offer_id)
                    self.opening.add(offer_id)
                case DropStore(offer_id):
                    self.stores.discard(offer_id)
                    self.opening.discard(offer_id)
                case ReachMaster(round_uid=uid):
                    self.reaching.add(uid)
                case Spawn(seat):
                    self.spawn(seat)
                case Stop(round_uid=uid):
                    assert uid in self.alive, "a stop of what was never started"
                    assert uid not in self.stopping
                    self.stopping.add(uid)
                case Tell(standing=told):
                    self.told = told
                case Exit():
                    assert not self.alive, "an exit over living workers"
                    self.exit = order
                case Hurry() | CutShort() | Say():
                    pass

    def spawn(self, seat: Assignment) -> None:
        assert seat.round_uid == self.agent.place.valid_round_uid  # type: ignore[union-attr]
        assert seat.round_uid not in self.spawned, "started twice"
        assert not self.alive, "started beside another round"
        assert self.agent.leaving is None
        self.spawned.append(seat.round_uid)
        self.alive[seat.round_uid] = set(range(seat.slots))

    # ------------------------------------------------------------------------------------------------ the daemon

    def place(self, status: Status) -> None:
        self.revision += 1
        uid = f"r{self.round}" if self.round else ""
        known = Known(job_uid="j", round=self.round, round_uid=uid, restarts_used=self.round // 2)
        place = Place(
            term=str(self.term),
            revision=self.revision,
            job_uid="j",
            valid_round_uid=self.valid,
            known=known,
            status=status,
            lease_s=5,
        )
        self.said.append(place)
        self.hear(PlaceHeard(place=place))

    @rule(mine=st.booleans(), group_rank=st.integers(0, 1))
    def deals(self, mine: bool, group_rank: int) -> None:
        offer = self.told.offer
        if offer is None or offer.after != (f"r{self.round}" if self.round else ""):
            return  # it deals to those who have made a valid offer, and to nobody else
        assert offer.offer_id not in self.dealt, "an offer that was dealt before"
        self.dealt.add(offer.offer_id)
        self.round += 1
        self.valid = f"r{self.round}"
        self.place(
            Assignment(
                round=self.round,
                round_uid=self.valid,
                group_rank=0 if mine else group_rank,
                group_size=2,
                first_rank=0,
                slots=SLOTS,
                world_size=4,
                role_first_rank=0,
                role_world_size=4,
                restart_count=0,
                max_restarts=3,
                master_addr="h",
                master_port=1,
                master_offer_id=offer.offer_id if mine else "another's",
            )
        )

    @rule()
    def deals_to_others(self) -> None:
        if self.valid == "":
            self.round += 1
            self.valid = f"r{self.round}"
            if self.told.offer is not None:
                self.dealt.add(self.told.offer.offer_id)  # it could have been: it is used up
            self.place(Waiting(reason=WaitReason.SPARE))

    @rule()
    def breaks(self) -> None:
        self.valid = ""
        self.place(Waiting(reason=WaitReason.GATHERING))

    @rule()
    def starts_anew(self) -> None:
        self.term += 1
        self.revision = 0
        self.hear(DaemonAway(text="gone"))

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def repeats_itself(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.said[-5:]))
        if place.term == str(self.term):
            self.hear(PlaceHeard(place=place))

    @rule(outcome=st.sampled_from(Outcome), may_exit=st.booleans())
    def ends(self, outcome: Outcome, may_exit: bool) -> None:
        self.valid = ""
        self.place(Ended(outcome=outcome, exit_code=outcome is not Outcome.SUCCEEDED, may_exit=may_exit))

    @rule()
    def removes(self) -> None:
        self.valid = ""
        self.place(Removed(by="operator", reason="", exit_code=1))

    # ------------------------------------------------------------------------------------------------ the node

    @precondition(lambda self: self.opening)
    @rule(well=st.sampled_from([True, True, True, False]))
    def store_opens(self, well: bool) -> None:
        offer_id = min(self.opening)
        self.opening.discard(offer_id)
        if well:
            self.stores.add(offer_id)
            self.hear(StoreOpened(offer_id=offer_id, port=1))
        else:
            self.hear(StoreFailed(offer_id=offer_id, text="no port"))

    @rule()
    def stores_die(self) -> None:
        self.stores.clear()
        self.hear(StoreLost(offer_id="", text="killed"))

    @precondition(lambda self: self.reaching)
    @rule(well=st.booleans())
    def master_answers(self, well: bool) -> None:
        uid = self.reaching.pop()
        self.hear(MasterReached(round_uid=uid) if well else MasterUnreachable(round_uid=uid, text="timeout"))

    @precondition(lambda self: self.spawned)
    @rule(well=st.sampled_from([True, True, False]))
    def start_is_over(self, well: bool) -> None:
        uid = self.spawned[-1]
        if well:
            self.hear(WorkersStarted(round_uid=uid))
        elif uid in self.alive and uid not in self.stopping:
            self.failed.add(uid)
            self.hear(SpawnFailed(round_uid=uid, local_rank=0, text="exec"))

    @precondition(lambda self: any(self.alive.values()))
    @rule(code=st.integers(0, 1), late=st.floats(0, 1))
    def worker_ends(self, code: int, late: float) -> None:
        uid, ranks = next((uid, ranks) for uid, ranks in self.alive.items() if ranks)
        rank = ranks.pop()
        if code and uid not in self.stopping:
            self.failed.add(uid)
        self.hear(WorkerEnded(round_uid=uid, local_rank=rank, exit_code=code, signal=0, at=max(0.0, self.now - late)))

    @precondition(lambda self: self.stopping)
    @rule()
    def all_are_gone(self) -> None:
        uid = self.stopping.pop()
        del self.alive[uid]
        self.hear(WorkersGone(round_uid=uid))

    @rule(seconds=st.sampled_from([0.1, 1, 6, 100, 700]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while (wakes := wakes_at(self.agent)) is not None and wakes <= until and self.exit is None:
            self.now = max(self.now, wakes)
            self.hear(TimePassed())
            after = wakes_at(self.agent)
            assert after is None or after > self.now or self.exit is not None, "a timer that never stops ringing"
        self.now = until

    @rule()
    def daemon_is_away(self) -> None:
        self.hear(DaemonAway(text="refused"))

    @precondition(lambda self: self.now > 50)
    @rule()
    def is_told_to_leave(self) -> None:
        self.hear(LeaveAsked(signal=15, reason="SIGTERM"))

    # ------------------------------------------------------------------------------------------------ always

    @invariant()
    def what_is_told_is_how_it_stands(self) -> None:
        if self.exit is None:
            assert replace(self.told) == standing(self.agent)

    @invariant()
    def no_offer_over_living_processes_nor_without_a_store(self) -> None:
        offer = self.told.offer
        if offer is not None and not self.agent.exited:
            assert not self.alive
            assert offer.offer_id in self.stores
            assert offer.offer_id not in self.dealt

    @invariant()
    def only_valid_workers_live_on(self) -> None:
        place = self.agent.place
        for uid in self.alive:
            assert uid in self.stopping or (place is not None and place.valid_round_uid == uid)

    @invariant()
    def the_dead_are_not_counted_as_alive_nor_the_living_as_dead(self) -> None:
        held = self.told.held
        if held is not None:
            assert (held.alive > 0) == (held.round_uid in self.alive)
            assert held.alive <= SLOTS

    @invariant()
    def a_failure_is_told_until_the_next_round(self) -> None:
        held = self.told.held
        if held is not None and held.round_uid in self.failed:
            assert held.phase is Phase.FAILED
            assert held.failures

    @invariant()
    def few_stores_are_open(self) -> None:
        assert len(self.stores | self.opening) <= 2, "one that serves a round, one on offer"

    @invariant()
    def a_free_node_always_has_something_to_wait_for(self) -> None:
        """It has an offer out, a store to come, a timer, or somebody else's move is next."""
        agent = self.agent
        if agent.exited or agent.place is None or not agent.idle:
            return
        waits = agent.offer is not None or wakes_at(agent) is not None
        assert waits or agent.done or self.reaching


AnyHistory.TestCase.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
