"""How long a node is believed."""

from __future__ import annotations

from rendezvousd.attendance import Attendance
from rendezvousd.core.model import NodeUid
from rendezvousd.core.settings import Timing
from rendezvousd.delivery import ABSENT

TIMING = Timing()


def test_a_shorter_lease_that_a_node_is_told_holds_when_it_has_spoken_again() -> None:
    row = Attendance("job", NodeUid("a"), ABSENT, 0.0, lease_s=50.0)
    row.tell(1, 5.0, now=0.0)
    assert row.deadline(TIMING) == 50.0, "it may not have heard of the shorter one"
    row.echo(1, now=1.0)
    row.heard_at = row.spoke_at = 1.0
    row.tell(2, 60.0, now=1.0)
    assert row.deadline(TIMING) == 61.0
