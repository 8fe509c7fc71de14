"""Who waits in a namespace, step by step on one event loop: what a wire is too slow to show."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rendezvousd.core.errors import RoundOver, WaitTimedOut
from rendezvousd.core.kv import Namespace
from rendezvousd.rpc.store import Space, pop_item
from rendezvousd.rpc.waiters import Waiters

FOREVER_MS = 10**7


def on_a_loop(story: Callable[[], Awaitable[None]]) -> None:
    async def told() -> None:
        await story()

    asyncio.run(told())


async def settled() -> None:
    """Return when every task has gone as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def popper(space: Space, op_id: str = "") -> asyncio.Task[bytes]:
    return asyncio.ensure_future(pop_item(space, "q", op_id, FOREVER_MS))


def push(space: Space, value: bytes) -> None:
    space.kv.queue_push("q", value)
    space.pushed.wake_first("q")


def nobody_waits(space: Space) -> bool:
    return (space.waiters(), space.changed._lines, space.pushed._lines, space.retried._lines, space.popping) == (
        0,
        {},
        {},
        {},
        set(),
    )


def test_nobody_may_wait_where_nothing_will_come() -> None:
    async def story() -> None:
        line = Waiters()
        early = asyncio.ensure_future(line.wait("k"))
        woken = asyncio.ensure_future(line.wait("w"))
        await settled()
        line.wake("w")
        line.end(RoundOver("over"))
        await settled()
        assert woken.exception() is None
        assert isinstance(early.exception(), RoundOver)
        with pytest.raises(RoundOver, match="over"):
            await line.wait("k")
        assert len(line) == 0

    on_a_loop(story)


def test_whoever_leaves_takes_the_line_away() -> None:
    async def story() -> None:
        line = Waiters()
        one, two = (asyncio.ensure_future(line.wait("k")) for _ in range(2))
        await settled()
        one.cancel()
        await settled()
        assert (len(line), list(line._lines)) == (1, ["k"])
        line.wake("k")
        await settled()
        assert two.done()
        assert (len(line), line._lines) == (0, {})

    on_a_loop(story)


def test_a_popper_that_leaves_when_called_calls_the_next() -> None:
    async def story() -> None:
        space = Space(Namespace())
        one, two = popper(space), popper(space)
        await settled()
        push(space, b"1")
        one.cancel()
        await settled()
        assert two.result() == b"1"
        assert nobody_waits(space)

    on_a_loop(story)


def test_a_popper_whose_item_was_taken_waits_on() -> None:
    async def story() -> None:
        space = Space(Namespace())
        one = popper(space)
        await settled()
        push(space, b"1")
        assert space.kv.queue_pop("q") == b"1"
        await settled()
        assert not one.done()
        push(space, b"2")
        await settled()
        assert one.result() == b"2"

    on_a_loop(story)


def test_a_retry_gets_what_the_first_try_took() -> None:
    async def story() -> None:
        space = Space(Namespace())
        first, other, again = popper(space, "op"), popper(space), popper(space, "op")
        await settled()
        push(space, b"1")
        await settled()
        assert (first.result(), again.result(), other.done()) == (b"1", b"1", False)
        push(space, b"2")
        await settled()
        assert other.result() == b"2"
        assert nobody_waits(space)

    on_a_loop(story)


def test_a_retry_goes_on_where_the_first_try_gave_up() -> None:
    async def story() -> None:
        space = Space(Namespace())
        first, again = popper(space, "op"), popper(space, "op")
        await settled()
        first.cancel()
        await settled()
        assert not again.done()
        push(space, b"1")
        await settled()
        assert again.result() == b"1"
        assert nobody_waits(space)

    on_a_loop(story)


def test_a_popper_out_of_time_leaves_nothing() -> None:
    async def story() -> None:
        space = Space(Namespace())
        with pytest.raises(WaitTimedOut, match="stayed empty for 1 ms"):
            await pop_item(space, "q", "op", 1)
        assert nobody_waits(space)

    on_a_loop(story)
