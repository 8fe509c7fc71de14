"""How long workers may live without another word from a daemon (`--on-daemon-loss=stop`). Arithmetic only.

A heartbeat that was answered lets the workers of the round which the answer names live for a lease after it was *sent*:
the daemon read it after that, and counts from there. Before the lease ends they are told to stop, at its end they are
killed; nothing else ends, or prolongs, that.

Instants are seconds of CLOCK_BOOTTIME, which goes on while the machine sleeps, and durations end in `_s`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

# The regular stop has killed by then, so that what clears up all is left in peace, and the next round starts sooner.
EARLY_S = 0.2
# TERM comes so much of a lease before its end, if the stop grace is not shorter.
NOTICE = 1 / 4
# Heartbeats on their way at a time. A daemon that owes so many answers is left long before.
UNANSWERED_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """The lease of the workers of one round."""

    round_uid: str
    until: float = 0.0  # its end
    lease_s: float = 0.0  # as it was told with the answer that reaches so far
    cut: bool = False  # its end has come: the stop under way was told to kill

    def renewed(self, round_uid: str, sent_at: float, lease_s: float) -> Fence:
        """Return it after an answer that names `round_uid` as the round whose workers may live; the heartbeat that it
        answers was sent at `sent_at`. An answer renews only the round it names."""
        until = sent_at + lease_s
        if round_uid != self.round_uid or until <= self.until:
            return self
        return replace(self, until=until, lease_s=lease_s)

    def term_at(self, grace_s: float) -> float:
        """Return when the workers are told to stop. From then on the round is over here."""
        return self.until - min(grace_s, self.lease_s * NOTICE)

    def kill_at(self) -> float:
        """Return when the regular stop kills. The watchdog does at `until`."""
        return self.until - min(EARLY_S, self.lease_s * NOTICE / 2)


class Sendings:
    """When the messages of one stream were sent."""

    def __init__(self) -> None:
        self._unanswered: deque[tuple[int, float]] = deque(maxlen=UNANSWERED_MAX)
        self._answered_at: float | None = None

    def sent(self, seq: int, at: float) -> None:
        """Take in that message `seq` is about to be sent; `at` is before that."""
        self._unanswered.append((seq, at))

    def answered(self, seq: int) -> float | None:
        """Return when message `seq`, which an answer acknowledges, was sent, or one before it; None: not known."""
        while self._unanswered and self._unanswered[0][0] <= seq:
            self._answered_at = self._unanswered.popleft()[1]
        return self._answered_at
