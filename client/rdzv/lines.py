"""Bytes of several workers as lines of one console. Pure.

A line is shown when it is complete, in one piece and byte for byte, behind its prefix. The exception is a line that
rewrites itself with carriage returns, a progress bar: nobody wants to see that only when it is full.
"""

from __future__ import annotations

# A line longer than this is shown in pieces of about this size, each as a line of its own: memory is bounded.
LINE_MAX = 4 << 20


class Lines:
    """One stream, cut into lines. What is returned is to be shown as it is, in this order."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest: list[bytes] = []  # of a line that is not complete; none of them holds a newline
        self._size = 0
        self._begun = False  # the beginning of that line is shown already

    def feed(self, chunk: bytes) -> bytes:
        """Return the lines that `chunk` completes."""
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            if chunk:
                self._rest.append(chunk)
            self._size += len(chunk)
            return self.end() if self._size > LINE_MAX else b""
        whole = b"".join((*self._rest, chunk[: cut - 1]))
        rest = chunk[cut:]
        self._rest, self._size = [rest] if rest else [], len(rest)
        first = b""
        if self._begun:
            line, more, whole = whole.partition(b"\n")
            first, self._begun = self._rewritten(line) + b"\n", False
            if not more:
                return first
        return first + self._prefix + whole.replace(b"\n", b"\n" + self._prefix) + b"\n"

    @property
    def rewrites(self) -> bool:
        """Whether the incomplete line holds something that `live` would show."""
        return any(b"\r" in part for part in self._rest)

    def live(self) -> bytes:
        """Return what is there of a line that rewrites itself, to be shown without waiting for its end."""
        if not self.rewrites:
            return b""
        rest = self._rewritten(b"".join(self._rest))
        begun, self._rest, self._size, self._begun = self._begun, [], 0, True
        return rest if begun else self._prefix + rest

    def end(self) -> bytes:
        """Return the last line, if it lacks nothing but its newline."""
        if not self._rest and not self._begun:
            return b""
        rest = b"".join(self._rest)
        line = self._rewritten(rest) if self._begun else self._prefix + rest
        self._rest, self._size, self._begun = [], 0, False
        return line + b"\n"

    def _rewritten(self, line: bytes) -> bytes:
        # The cursor goes back to the first column, where the prefix stands.
        return line.replace(b"\r", b"\r" + self._prefix)
