"""Who waits for which key: callers sleep until the key changes, and are woken by nothing else."""

from __future__ import annotations

import asyncio

from rendezvousd.core.errors import LimitExceeded, Refusal

# Of one namespace: each worker of the largest job, 10,000 nodes of 8, may wait at one barrier. A waiting call is some
# 20 KiB, nearly all of it gRPC's.
WAITERS_MAX = 100_000


class Waiters:
    """Waiting callers of one namespace, in order of arrival, by key. A caller's place is given up when its wait ends,
    however it ends. All calls belong to one event loop."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[object, asyncio.Future[None]]] = {}
        self._over: Refusal | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def wait(self, key: str, tag: object = None) -> None:
        """Return when the key is woken. Raises LimitExceeded, and what `end` was given.

        Of two callers with the same tag the later takes over the earlier one's place in the line; the earlier is
        refused (whoever made it gave up on it before calling anew).
        """
        if self._over is not None:
            raise _anew(self._over)
        if self._count >= WAITERS_MAX:
            raise LimitExceeded(f"{self._count} calls wait in this store, and no more may")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tag = tag or future
        line = self._lines.setdefault(key, {})
        if (earlier := line.get(tag)) is not None and not earlier.done():
            earlier.set_exception(LimitExceeded("the same call was made again and waits in this one's place"))
        line[tag] = future
        self._count += 1
        try:
            await future
        finally:
            self._count -= 1
            if line.get(tag) is future:
                del line[tag]
            if not line and self._lines.get(key) is line:
                del self._lines[key]

    def wake(self, key: str) -> None:
        """Wake all who wait for the key."""
        for future in self._lines.get(key, {}).values():
            _wake(future)

    def wake_first(self, key: str) -> None:
        """Wake the one who has waited longest and was not woken yet."""
        for future in self._lines.get(key, {}).values():
            if _wake(future):
                return

    def wake_tagged(self, key: str, tag: object) -> None:
        """Wake the one with this tag, if any."""
        future = self._lines.get(key, {}).get(tag)
        if future is not None:
            _wake(future)

    def end(self, why: Refusal) -> None:
        """Refuse all who wait, and whoever should try to from now on."""
        self._over = why
        for line in self._lines.values():
            for future in line.values():
                if not future.done():
                    future.set_exception(_anew(why))


def _wake(future: asyncio.Future[None]) -> bool:
    if future.done():
        return False
    future.set_result(None)
    return True


def _anew(why: Refusal) -> Refusal:
    """An exception of its own for each caller: a raised one collects the frames of whoever raises it."""
    return type(why)(*why.args)
