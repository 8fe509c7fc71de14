"""A short game with each backend: some faults of every sort, one after the other, on a job that really trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import cage
from tests.chaos.faults import FAULTS
from tests.chaos.schedule import BY_NAME, KINDS, SHORT, Backend, short, soak
from tests.daemon import ROOT
from tests.e2e.kit import until
from tests.e2e.processes_kit import marked

WHY_NOT = cage.missing()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("backend", list(SHORT))
def test_a_job_survives_what_is_done_to_it(backend: Backend, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", "short", f"--backend={backend}", "--seed=7", "--die-with-parent"]
    played = subprocess.run(
        [*command, f"--out={tmp_path}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(played.stdout)
    if played.returncode:
        for log in sorted(tmp_path.glob("*.log")):
            print(f"---- {log.name}\n{log.read_text(errors='replace')[-20000:]}")
    assert played.returncode == 0


@pytest.mark.parametrize("backend", list(SHORT))
def test_a_seed_is_all_the_chance_there_is(backend: Backend) -> None:
    assert list(short(backend, 5)) == list(short(backend, 5))
    one, same, other = (soak(backend, seed) for seed in (5, 5, 6))
    first = [next(one) for _ in range(60)]
    assert first == [next(same) for _ in range(60)]
    assert first != [next(other) for _ in range(60)]


@pytest.mark.parametrize("backend", list(SHORT))
def test_every_kind_comes_once_before_any_comes_again(backend: Backend) -> None:
    kinds = {kind.name for kind in KINDS if kind.backend in (None, backend)}
    turns = soak(backend, 3)
    seen: list[str] = []
    while len(seen) < 2 * len(kinds):
        seen += [shot.kind.name for shot in next(turns).shots]
    assert set(seen[: len(kinds)]) == kinds == set(seen[len(kinds) :])
    assert {name for name, _ in SHORT[backend]} <= set(BY_NAME) <= set(FAULTS)


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_game_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    mark = os.urandom(8).hex()
    names = os.listdir("/sys/class/net")
    command = [sys.executable, "-m", "tests.chaos", "short", "--backend=memory", "--die-with-parent"]
    with subprocess.Popen(
        [*command, f"--out={tmp_path}"],
        cwd=ROOT, env={**os.environ, "RDZV_TEST_MARK": mark}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as game:  # fmt: skip
        until(lambda: (tmp_path / "n2.log").exists(), "the last launcher was started", lambda: game.poll() is not None)
        assert len(marked(mark)) >= 5
        game.kill()
    until(lambda: not marked(mark), "nothing of it lives")
    assert os.listdir("/sys/class/net") == names
    assert not list((tmp_path / "logs-n0").iterdir())  # what was mounted there is gone
