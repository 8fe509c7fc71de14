"""What was measured, for people and for machines."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

PEER = "torchrun"

Value = float | None  # None: did not happen within the bound


@dataclass(slots=True)
class Case:
    """One quantity, measured on each side."""

    title: str
    unit: str
    bound: float  # in the same unit: what took longer was not waited for
    values: dict[str, list[Value]] = field(default_factory=dict)  # by side

    def add(self, side: str, value: Value) -> None:
        """Note one value and say it at once, so that a long run shows where it is."""
        self.values.setdefault(side, []).append(value)
        print(f"    {side:<16} {self._say(value)}", flush=True)

    def median(self, side: str) -> float:
        """The median, in which "never" counts as infinitely long."""
        return median(self.values[side])

    def lines(self) -> list[str]:
        """The medians, all values, and each side's ratio to the peer."""
        lines = [self.title]
        for side, values in self.values.items():
            middle = self.median(side)
            said = self._say(middle if math.isfinite(middle) else None)
            ratio = "" if side == PEER or PEER not in self.values else f"  {self._ratio(side)}"
            lines.append(f"  {side:<16} median {said:<20}{ratio}  [{', '.join(map(self._say, values))}]")
        return lines

    def _ratio(self, side: str) -> str:
        ours, peers = self.median(side), self.median(PEER)
        if math.isinf(ours):
            return "no ratio"
        if math.isinf(peers):
            return f"< {ours / self.bound:.3f} x {PEER}"
        return f"{ours / peers:.3f} x {PEER}"

    def _say(self, value: Value) -> str:
        if value is None:
            return f"never (bound {self.bound:g} {self.unit})"
        return f"{value:.3f} {self.unit}"


def median(values: Sequence[Value]) -> float:
    """The median, None counting as infinite."""
    return statistics.median(math.inf if value is None else value for value in values)


def machine() -> dict[str, str | int | float]:
    """Where the numbers come from."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpus": os.cpu_count() or 0,
        "load_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "grpcio": metadata.version("grpcio"),
    }


def write_json(path: Path, cases: Sequence[Case], tables: Mapping[str, object]) -> None:
    """Everything that was measured, and on what."""
    result = {"machine": machine(), "cases": [asdict(case) for case in cases], **tables}
    path.write_text(json.dumps(result, indent=2) + "\n")
