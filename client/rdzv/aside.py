"""Blocking calls that nobody waits for for ever: name look-ups, files on a network file system."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(call: Callable[[], T], *, within_s: float) -> T:
    """Return what `call` returns, or raise what it raises, while the loop goes on. TimeoutError after `within_s`.

    The call runs in a daemon thread of its own, not in the loop's executor: a call that hangs in the kernel must not
    keep the process from ending, and an executor's threads are joined at exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may itself be optional

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001  # it belongs to whoever awaits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="aside", daemon=True).start()
    async with asyncio.timeout(within_s):
        return await future
