"""The seeds of this run: new ones with each commit, so that a commit is judged once and for all, and the same for all
workers of a run. FIRST_SEED=7 chooses others."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest


def _of_this_commit() -> int:
    """Return a number drawn from the commit's name, or any number where there is none."""
    try:
        named = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return random.SystemRandom().randrange(10**9)
    return random.Random(named.stdout).randrange(10**9)


SEEDS = int(os.environ.get("SEEDS", "2000"))
# Drawn where the run begins; its workers inherit it.
FIRST_SEED = int(os.environ.setdefault("FIRST_SEED", str(_of_this_commit())))


def pytest_report_header(config: pytest.Config) -> str:
    return f"simulation: {SEEDS} seeds, from {FIRST_SEED} on"
