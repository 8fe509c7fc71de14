"""An agent with its clock, for stories of what a node does next. No loop, no processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Self, TypeVar

from rdzv.agent import Config, begin, step
from rdzv.model import (
    Assignment,
    Fact,
    Known,
    Order,
    Place,
    PlaceHeard,
    Status,
    StoreOpened,
    Waiting,
    WaitReason,
    WorkerEnded,
    WorkersGone,
    WorkersStarted,
)

T = TypeVar("T")
GATHERING = Waiting(reason=WaitReason.GATHERING)
LEASE_S = 5.0


class Node:
    """One agent with its clock, and every order it ever gave."""

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots
        self.max_restarts = 3
        self.now = 100.0
        self.revision = 0
        config = Config(node_uid="n", endpoints="head:29400", stop_grace_s=30, join_timeout_s=600)
        self.agent, self.orders = begin(config, self.now)
        self.last = list(self.orders)

    def hear(self, fact: Fact) -> list[Order]:
        self.agent, self.last = step(self.agent, fact, self.now)
        self.orders += self.last
        return self.last

    def place(self, status: Status, *, valid: str = "", known: int = 0, term: str = "t", **more: object) -> list[Order]:
        self.revision += 1
        known_ = Known(job_uid="j", round=known, round_uid=f"r{known}" if known else "")
        place = Place(
            term=term, revision=self.revision, job_uid="j", valid_round_uid=valid, known=known_, status=status,
            lease_s=LEASE_S,
        )  # fmt: skip
        return self.hear(PlaceHeard(place=replace(place, **more)))  # type: ignore[arg-type]

    def seat(
        self,
        number: int,
        *,
        master: bool = True,
        term: str = "t",
        rank: int | None = None,
        notice: str = "",
        **more: object,
    ) -> list[Order]:
        """Deal round `number` to this node, as its first node or as its second."""
        offer = self.agent.offer
        group_rank = (0 if master else 1) if rank is None else rank
        seat = Assignment(
            round=number, round_uid=f"r{number}", group_rank=group_rank, group_size=2,
            first_rank=group_rank * self.slots, slots=self.slots, world_size=2 * self.slots, role_first_rank=0,
            role_world_size=4, restart_count=1, max_restarts=self.max_restarts,
            master_addr="10.0.0.1", master_port=4000,
            master_offer_id=offer.offer_id if master and offer is not None else "of somebody else", notice=notice,
        )  # fmt: skip
        return self.place(seat, valid=f"r{number}", known=number, term=term, **more)

    def opened(self) -> list[Order]:
        assert self.agent.offer is not None
        return self.hear(StoreOpened(offer_id=self.agent.offer.offer_id, port=4000))

    def running(self, number: int = 1) -> Self:
        """This node, as the first of round `number` with all its workers started."""
        if self.agent.offer is not None and self.agent.offer.port is None:
            self.opened()
        self.seat(number)
        self.hear(WorkersStarted(round_uid=f"r{number}"))
        return self

    def ended(self, rank: int, code: int = 0, *, signal: int = 0, at: float | None = None) -> list[Order]:
        return self.hear(
            WorkerEnded(
                round_uid=self.held.round_uid,
                local_rank=rank,
                exit_code=code,
                signal=signal,
                at=self.now if at is None else at,
            )
        )

    def gone(self) -> list[Order]:
        return self.hear(WorkersGone(round_uid=self.held.round_uid))

    @property
    def held(self):  # type: ignore[no-untyped-def]
        assert self.agent.held is not None
        return self.agent.held


def only(orders: list[Order], kind: type[T]) -> T:
    found = [order for order in orders if isinstance(order, kind)]
    assert len(found) == 1, orders
    return found[0]


def none(orders: list[Order], *kinds: type) -> bool:
    return not any(isinstance(order, kinds) for order in orders)
