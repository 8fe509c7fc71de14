"""A node without processes: the real session and the real agent, and workers that start and stop at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence

from rdzv import agent as agents
from rdzv import model
from rdzv.convert import Identity
from rdzv.endpoints import parse_endpoint
from rdzv.session import Session
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.bench.harness import BenchFailed

BOUND_S = 60.0


class Attendee:
    """One node of a job of `nodes`. Instants are `time.time()`."""

    def __init__(self, endpoints: Sequence[str], index: int, nodes: int) -> None:
        loop = asyncio.get_running_loop()
        uid = uuid.uuid4().hex
        config = agents.Config(node_uid=uid, endpoints=",".join(endpoints), stop_grace_s=1.0, join_timeout_s=600.0)
        self._agent, orders = agents.begin(config, loop.time())
        spec = pb.Spec(min_nodes=nodes, max_nodes=nodes, max_restarts=9, slots=1, stop_grace_ms=1000)
        self._session = Session(
            [parse_endpoint(each) for each in endpoints],
            Identity(run_id="bench", node_uid=uid, node_name=f"n{index}", spec=spec),
            agents.standing(self._agent),
            began_at=time.monotonic(),
            on_place=self._heard,
            on_away=lambda text: self._tell(model.DaemonAway(text=text)),
            on_refused=lambda text: self._tell(model.DaemonRefused(text=text)),
        )
        self.started: list[str] = []  # round uids
        self.place: model.Place | None = None
        self.places: list[tuple[float, model.Place]] = []  # of each term, the first
        self._obey(orders)

    async def run(self) -> None:
        await self._session.run()

    def runs(self) -> bool:
        """Whether its workers run, by the daemon's word."""
        held, place = self._agent.held, self.place
        return held is not None and place is not None and place.valid_round_uid == held.round_uid

    def attended_since(self, instant: float) -> float | None:
        """When a daemon of another term first said, after that instant, that its workers may run."""
        return next((at for at, place in self.places if at > instant and place.valid_round_uid), None)

    def _heard(self, place: model.Place) -> None:
        known = self.places[-1][1] if self.places else None
        if known is None or (known.term, known.valid_round_uid) != (place.term, place.valid_round_uid):
            self.places.append((time.time(), place))
        self.place = place
        self._tell(model.PlaceHeard(place=place))

    def _tell(self, fact: model.Fact) -> None:
        self._agent, orders = agents.step(self._agent, fact, asyncio.get_running_loop().time())
        self._obey(orders)

    def _obey(self, orders: Sequence[model.Order]) -> None:
        soon = asyncio.get_running_loop().call_soon
        for order in orders:
            match order:
                case model.Tell():
                    self._session.tell(order.standing, at_once=order.at_once)
                case model.OpenStore():
                    soon(self._tell, model.StoreOpened(offer_id=order.offer_id, port=1))
                case model.ReachMaster():
                    soon(self._tell, model.MasterReached(round_uid=order.round_uid))
                case model.Spawn():
                    self.started.append(order.assignment.round_uid)
                    soon(self._tell, model.WorkersStarted(round_uid=order.assignment.round_uid))
                case model.Stop():
                    soon(self._tell, model.WorkersGone(round_uid=order.round_uid))
                case model.Exit():
                    raise BenchFailed(f"a node ended: {order.text}")
                case _:
                    pass


@contextlib.asynccontextmanager
async def attending(endpoints: Sequence[str], nodes: int) -> AsyncIterator[list[Attendee]]:
    """A job whose first round runs."""
    attendees = [Attendee(endpoints, index, nodes) for index in range(nodes)]
    tasks = [asyncio.create_task(attendee.run()) for attendee in attendees]
    try:
        await until(lambda: all(attendee.runs() for attendee in attendees), "the round runs")
        yield attendees
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def until(condition: Callable[[], object], what: str) -> None:
    """Return once the condition holds. Raises BenchFailed after BOUND_S."""
    give_up_at = time.monotonic() + BOUND_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise BenchFailed(f"not within {BOUND_S:.0f} s: {what}")
        await asyncio.sleep(0.002)
