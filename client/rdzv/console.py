"""What the launcher itself says to a person, on stderr."""

from __future__ import annotations

import re
from typing import assert_never

from rdzv.errors import describe_exit
from rdzv.model import WORKER_FAILED, Cause, Exit, Failure, Say, Topic
from rdzv.outlet import Outlet

WAIT_UNSAID_S = 1.0  # a wait that is over sooner needs no line
WAIT_AGAIN_S = 30.0  # how often an unchanged reason to wait is repeated

_COUNTDOWN = re.compile(r"\d+(?:\.\d+)? s\b")


class Console:
    """Lines with a prefix, in the order said. Must be closed for the last ones to appear."""

    def __init__(self, name: str, outlet: Outlet) -> None:
        self.outlet = outlet
        self._prefix = f"[{name}] "
        self._wait = ""  # the reason to wait that holds now; empty: none
        self._wait_at: float | None = None  # when it is to be said
        self._wait_said = ""  # the substance of the one said last

    def say(self, said: Say, now: float) -> None:
        """Write a line, or note why the node waits; `now` is of any monotonic clock."""
        match said.topic:
            case Topic.WAIT:
                if not self._wait:
                    self._wait_at = now + WAIT_UNSAID_S
                elif self._wait_said and _substance(said.text) != self._wait_said:
                    self._wait_at = now
                self._wait = said.text
                self.tick(now)
            case Topic.NEWS | Topic.CAUSE:
                self._wait, self._wait_at, self._wait_said = "", None, ""
                self._put(said.text)
            case Topic.WARN:
                self._put(f"warning: {said.text}")
            case _:
                assert_never(said.topic)

    def wakes_at(self) -> float | None:
        """Return when `tick` has something to say."""
        return self._wait_at

    def tick(self, now: float) -> None:
        """Say why the node waits, if that is due."""
        if self._wait and self._wait_at is not None and now >= self._wait_at:
            self._wait_said, self._wait_at = _substance(self._wait), now + WAIT_AGAIN_S
            self._put(self._wait)

    def finish(self, end: Exit) -> None:
        """Write how it ended: one line, and what is known of the root cause."""
        self._put(end.text)
        if end.cause is not None and end.cause.failure is not None:
            for line in _failure_lines(end.cause, end.cause.failure):
                self._put(f"  {line}")

    def close(self) -> None:
        """Return when all lines are written, or nobody reads them."""
        self.outlet.close()

    def _put(self, text: str) -> None:
        lines = "".join(f"{self._prefix}{line}\n" for line in text.splitlines() or [""])
        self.outlet.put(lines.encode("utf-8", "backslashreplace"), own=True)


def _failure_lines(cause: Cause, failure: Failure) -> list[str]:
    """Return what the line before does not say: a worker's failure is told there with host, rank and exit."""
    lines = []
    if cause.kind != WORKER_FAILED:
        ended = describe_exit(failure.exit_code, failure.signal)
        where = cause.node_name or "this node"
        lines.append(f"rank {failure.rank} (local rank {failure.local_rank}) on {where}: {ended}")
    if failure.text:
        lines += ["it said:", *(f"  {line}" for line in failure.text.splitlines())]
    return lines


def _substance(text: str) -> str:
    """Return the text without what counts down."""
    return _COUNTDOWN.sub("", text)
