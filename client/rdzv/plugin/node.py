"""The thread that attends the daemon while torch's agent does its work in the main one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

from rdzv.model import Assignment, Cause
from rdzv.plugin.settings import Settings

if TYPE_CHECKING:
    from rdzv.plugin.attendance import Attendance

log = logging.getLogger("rdzv.torchrun")

T = TypeVar("T")

WAIT_SAID_S = 10.0  # a wait this long gets a line
WAIT_AGAIN_S = 60.0  # and then another one so often
LEAVE_S = 10.0  # to say goodbye: a lease, and the last word
JOIN_S = 5.0  # for the thread to end after that


class NodeFailed(Exception):
    """The thread has ended by a bug, which it has printed."""


class Node:
    """One node of a job. Methods block, and are for one thread; signal handlers of the main thread may interrupt them.

    The thread starts with the first `next_seat`, and ends with `leave`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._attendance: Attendance | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._left = False

    def next_seat(self) -> tuple[Assignment, Cause | None]:
        """Say that no worker of any round lives here, and wait for the next round: this node's seat in it, and why the
        last one that broke did so. Raises JobOver and NodeFailed."""
        self._start()
        return self._call(lambda attendance: attendance.next_seat(), say_why=True)

    def started(self) -> None:
        """The workers of the round run."""
        self._call(lambda attendance: attendance.started())

    @property
    def must_stop(self) -> bool:
        """Whether the workers of the round must be stopped, and `next_seat` be called."""
        return self._attendance is not None and self._attendance.must_stop

    @property
    def job_uid(self) -> str:
        """The job's identity; empty before the first seat."""
        return "" if self._attendance is None else self._attendance.job_uid

    def succeeded(self) -> None:
        """All workers have ended with success, and this node will start no others."""
        self._call(lambda attendance: attendance.succeeded())

    def others_are_done(self, within_s: float) -> bool:
        """After `succeeded`: return True once nothing of the job depends on this node; False if that takes longer."""
        try:
            self._call(lambda attendance: attendance.others_are_done(), within_s=within_s)
        except TimeoutError:
            return False
        return True

    def leave(self, reason: str) -> None:
        """Have no part in the job any more; no worker may live here. Idempotent, and raises nothing."""
        thread, attendance = self._thread, self._attendance
        if self._left or thread is None or attendance is None:
            return
        self._left = True
        try:
            self._call(lambda attendance: attendance.leave(reason), within_s=LEAVE_S)
        except (NodeFailed, TimeoutError):
            log.debug("rendezvousd: left without a goodbye")
        finally:
            self._post(attendance.close())
            thread.join(JOIN_S)

    # -------------------------------------------------------------------------------------------- the other thread

    def _start(self) -> None:
        if self._thread is not None:
            return
        ready: Future[Attendance] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="rendezvousd", daemon=True)
        self._thread.start()
        try:
            self._attendance = ready.result()
        except Exception as problem:
            raise NodeFailed(f"cannot attend a daemon: {problem}") from problem

    def _run(self, ready: Future[Attendance]) -> None:
        try:
            asyncio.run(self._attend(ready))
        except Exception as problem:
            if not ready.done():
                ready.set_exception(problem)
            else:
                log.exception("rendezvousd: this node cannot go on")

    async def _attend(self, ready: Future[Attendance]) -> None:
        self._loop = asyncio.get_running_loop()
        from rdzv.plugin.attendance import Attendance

        attendance = Attendance(self._settings)
        ready.set_result(attendance)
        await attendance.run()

    def _call(
        self,
        what: Callable[[Attendance], Coroutine[Any, Any, T]],
        *,
        within_s: float | None = None,
        say_why: bool = False,
    ) -> T:
        """Have it done in the other thread, and return what comes of it. Raises NodeFailed, and TimeoutError after
        `within_s`; whatever ends the wait, nothing goes on there."""
        assert self._attendance is not None
        future = self._post(what(self._attendance))
        wait_s = WAIT_SAID_S if say_why else within_s
        try:
            while True:
                try:
                    return future.result(wait_s)
                except TimeoutError:
                    if not say_why or future.done():
                        raise
                    log.warning("rendezvousd: %s", self._attendance.waits_for or "waiting: no answer yet")
                    wait_s = WAIT_AGAIN_S
        except CancelledError:
            raise NodeFailed("the thread that attends the daemon has ended") from None
        finally:
            future.cancel()

    def _post(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        assert self._loop is not None
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            ended: Future[T] = Future()
            ended.cancel()
            return ended
