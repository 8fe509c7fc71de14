"""The plugin's side of the conversation, without torch's agent: what would be a race between two of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousParameters

from rdzv.plugin.attendance import Attendance
from rdzv.plugin.settings import settings
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.daemon import daemon
from tests.wire.node import cast


def test_a_finished_node_is_in_no_further_round(tmp_path: Path) -> None:
    """It leaves by itself as soon as the others start anew: torch's agent, which might be slow, is not asked."""

    async def story(endpoint: str) -> None:
        params = RendezvousParameters("rendezvousd", endpoint, "job", 1, 2, last_call_timeout=0.3)
        attendance = Attendance(settings(params, None))
        running = asyncio.create_task(attendance.run())
        async with cast(endpoint) as make:
            other = make("job", "other", "1:2")
            await other.open()
            await other.offer()
            seat, _ = await attendance.next_seat()
            await other.assigned(1)
            assert seat.group_size == 2
            await attendance.started()
            await attendance.succeeded()
            await other.hold(pb.STOPPED, 0)
            await other.offer()
            assert (await other.assigned(2)).group_size == 1
            await attendance.others_are_done()
        await attendance.close()
        await running

    with daemon(tmp_path) as served:
        asyncio.run(story(served.endpoint))
