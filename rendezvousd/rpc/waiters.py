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
        self._lines: dict[str, dict[asyncio.Future[None], None]] = {}
        self._over: Refusal | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def wait(self, key: str) -> None:
        """Return when the key is woken. Raises LimitExceeded, and what `end` was given."""
        if self._over is not None:
            raise _anew(self._over)
        if self._count >= WAITERS_MAX:
            raise LimitExceeded(f"{self._count} calls wait in this store, and no more may")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(key, {})
        line[future] = None
        self._count += 1
        try:
            await future
        finally:
            self._count -= 1
            del line[future]
            if not line:
                del self._lines[key]

    def wake(self, key: str) -> None:
        """Wake all who wait for the key."""
        for future in self._lines.get(key, ()):
            _wake(future)

    def wake_first(self, key: str) -> None:
        """Wake the one who has waited longest and was not woken yet."""
        for future in self._lines.get(key, ()):
            if _wake(future):
                return

    def end(self, why: Refusal) -> None:
        """Refuse all who wait, and whoever should try to from now on."""
        self._over = why
        for line in self._lines.values():
            for future in line:
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
