"""The seeds of this run: the same for all its workers, and the same each time, so that a change is judged by what it
changes. FIRST_SEED=7 chooses others; `make sim` takes new ones."""

from __future__ import annotations

import os

import pytest

SEEDS = int(os.environ.get("SEEDS", "2000"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "598782515"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"simulation: {SEEDS} seeds, from {FIRST_SEED} on"
