"""The seeds of this run: new ones each day, and on one day the same for everybody and for all workers of a run, so that
a change is judged by what it changes. FIRST_SEED=7 chooses others; `make sim` takes new ones each time."""

from __future__ import annotations

import datetime
import os

import pytest

SEEDS = int(os.environ.get("SEEDS", "1600"))
TODAY = datetime.datetime.now(datetime.UTC).date().toordinal() * 2000
# Into the environment, because a run's workers are other processes, and midnight may come between.
FIRST_SEED = int(os.environ.setdefault("FIRST_SEED", str(TODAY)))


def pytest_report_header(config: pytest.Config) -> str:
    return f"simulation: {SEEDS} seeds, from {FIRST_SEED} on (again: FIRST_SEED={FIRST_SEED})"
