"""The seeds of this run: new ones each time, the same for all workers of it."""

from __future__ import annotations

import os
import random

import pytest

SEEDS = int(os.environ.get("SEEDS", "2000"))
# Drawn where the run begins; its workers inherit it.
FIRST_SEED = int(os.environ.setdefault("FIRST_SEED", str(random.SystemRandom().randrange(10**9))))


def pytest_report_header(config: pytest.Config) -> str:
    return f"simulation: {SEEDS} seeds, from {FIRST_SEED} on"
