"""The stage of the tests that run whole jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.kit import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Whatever was started on it is gone afterwards, and what everybody said is shown if the test fails."""
    with Stage(tmp_path) as stage:
        yield stage
