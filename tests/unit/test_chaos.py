"""Faults on purpose: what --chaos takes, when it strikes, and that it says so before."""

from __future__ import annotations

import asyncio
import itertools
import signal

import pytest

from rdzv.chaos import Chaos, Strike, parse_chaos, schedule, strike
from rdzv.options import UsageError, parse

HOUR_S = 3600.0


def strikes(text: str, seed: int, within_s: float) -> list[Strike]:
    return list(itertools.takewhile(lambda blow: blow.at_s < within_s, schedule(parse_chaos(text), seed)))


def test_it_is_off_unless_asked_for() -> None:
    assert parse([__file__], {}).chaos is None
    asked = parse(["--chaos=kill-worker=30s,kill-node=5m,seed=7", __file__], {}).chaos
    assert asked == Chaos((("kill-worker", 30.0), ("kill-node", 300.0)), seed=7)
    assert parse([__file__], {"PET_CHAOS": "stop-worker=1h"}).chaos == Chaos((("stop-worker", 3600.0),))


@pytest.mark.parametrize(
    ("text", "mean_s"), [("30", 30.0), ("1.5m", 90.0), ("500ms", 0.5), ("2h", 7200.0), (" 3s ", 3.0)]
)
def test_times_have_units(text: str, mean_s: float) -> None:
    assert parse_chaos(f"kill-node={text}").means == (("kill-node", mean_s),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is unknown"),
        ("kill-everything=3s", "'kill-everything=3s' is unknown"),
        ("kill-worker", "kill-worker=: expected a time"),
        ("kill-worker=0s", "expected a time from 0.1s"),
        ("kill-worker=-1s", "expected a time"),
        ("kill-worker=nan", "expected a time"),
        ("kill-worker=1d", "expected a time"),
        ("kill-worker=721h", "expected a time"),
        ("kill-worker=1s,kill-worker=2s", "kill-worker is given twice"),
        ("seed=3", "nothing to strike"),
        ("kill-worker=1s,seed=x", "seed=x: expected a whole number"),
        ("kill-worker=1s,", "'' is unknown"),
    ],
)
def test_a_bad_value_is_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([f"--chaos={text}", __file__], {})
    assert str(caught.value).startswith("--chaos: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_strikes_come_in_order_as_often_as_asked_and_a_seed_repeats_them() -> None:
    found = strikes("kill-worker=30s,kill-node=5m", 1, 100 * HOUR_S)
    assert found == strikes("kill-worker=30s,kill-node=5m", 1, 100 * HOUR_S)
    assert found != strikes("kill-worker=30s,kill-node=5m", 2, 100 * HOUR_S)
    instants = [blow.at_s for blow in found]
    assert instants == sorted(instants)
    workers = sum(blow.kind == "kill-worker" for blow in found)
    assert 11400 < workers < 12600  # of 12,000 expected; six standard deviations
    assert 990 < len(found) - workers < 1410  # of 1,200


class Three:
    """Three workers, of which nothing is left to hit after `lives` strikes."""

    def __init__(self, lives: int) -> None:
        self.lives = lives
        self.hit: list[tuple[int, int | None]] = []

    def pids(self) -> dict[int, int]:
        return dict.fromkeys(range(3), 1) if len(self.hit) < self.lives else {}

    def signal(self, number: int, local_rank: int | None = None) -> None:
        self.hit.append((number, local_rank))


def test_each_strike_hits_one_worker_and_is_said() -> None:
    said: list[str] = []

    async def play() -> Three:
        victims, nobody_left = Three(lives=20), asyncio.Event()

        def say(text: str) -> None:
            said.append(text)
            if "no worker runs" in text:
                nobody_left.set()

        chaos = parse_chaos("kill-worker=100ms,stop-worker=100ms,seed=5")
        striking = asyncio.create_task(strike(chaos, victims, say))
        await asyncio.wait_for(nobody_left.wait(), 120)
        striking.cancel()
        await asyncio.wait([striking])
        return victims

    victims = asyncio.run(play())
    assert said[0] == "chaos is on: kill-worker every 0.1 s, stop-worker every 0.1 s on average, on this node (seed=5)"
    assert [f"chaos: {signal.Signals(number).name} to local rank {rank}" for number, rank in victims.hit] == said[1:21]
    assert {number for number, _ in victims.hit} == {signal.SIGKILL, signal.SIGSTOP}
    assert {rank for _, rank in victims.hit} == {0, 1, 2}
