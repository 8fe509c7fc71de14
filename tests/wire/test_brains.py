"""Two daemons that share nothing must not attend one node, each without knowing of the other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.wire.test_session import Daemon, attending, run, until, waiting

HOUR_MS = 3_600_000


@dataclass
class Brain:
    """Answers as this daemon, which has been up for so long, but for `words` words only."""

    daemon_id: str
    up_ms: int
    words: int = 1_000_000

    def __call__(self, state: pb.NodeState) -> pb.Place | None:
        self.words -= 1
        place = waiting(state)
        place.daemon_id, place.term, place.up_ms = self.daemon_id, self.daemon_id, self.up_ms
        return place if self.words >= 0 else None


def test_a_daemon_that_was_up_all_the_time_is_not_taken_for_the_one_that_fell_silent() -> None:
    async def story() -> None:
        first, other = Daemon(), Daemon()
        first.answer, other.answer = Brain("one", HOUR_MS, words=3), Brain("two", HOUR_MS)
        async with first.serving(), other.serving(), attending(first.port, other.port) as (_, heard):
            await until(lambda: any("though it was up then" in text for text in heard.away))
            first.answer = Brain("one", HOUR_MS)
            before = len(heard.places)
            await until(lambda: len(heard.places) > before)
            assert {place.daemon_id for place in heard.places} == {"one"}

    run(story)


@pytest.mark.parametrize(("daemon_id", "up_ms"), [("two", 0), ("one", HOUR_MS)], ids=["young", "of the same backend"])
def test_a_daemon_started_since_or_of_the_same_backend_is_attended(daemon_id: str, up_ms: int) -> None:
    async def story() -> None:
        first, other = Daemon(), Daemon()
        first.answer, other.answer = Brain("one", HOUR_MS, words=3), Brain(daemon_id, up_ms)
        async with first.serving(), other.serving(), attending(first.port, other.port) as (_, heard):
            await until(lambda: len(other.messages) >= 3)
            assert heard.places[-1].daemon_id == daemon_id

    run(story)
