"""The seeds of this run: new ones each time, the same for all workers of it."""

from __future__ import annotations

import hashlib
import os
import random

import pytest

SEEDS = int(os.environ.get("SEEDS", "2000"))


def first_seed() -> int:
    """Return where this run's seeds begin: FIRST_SEED, or by chance."""
    if (given := os.environ.get("FIRST_SEED")) is not None:
        return int(given)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is not None:
        return int(hashlib.sha256(run.encode()).hexdigest()[:8], 16)
    return _FIRST


_FIRST = random.SystemRandom().randrange(2**32)


def pytest_report_header(config: pytest.Config) -> str:
    if hasattr(config, "workerinput") or "PYTEST_XDIST_TESTRUNUID" in os.environ:
        return ""
    return f"simulation: {SEEDS} seeds"
