"""What must hold of any job, whatever befell it: judged by nothing but what its workers said of themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tests.e2e.kit import Event


def rounds(progress: Sequence[Event]) -> list[list[Event]]:
    """Return the workers' starts, by round, in the order of the rounds' numbers."""
    by_uid: dict[str, list[Event]] = defaultdict(list)
    for event in progress:
        if event["event"] == "start":
            by_uid[event["env"]["RENDEZVOUSD_ROUND_UID"]].append(event)
    return sorted(by_uid.values(), key=lambda starts: starts[0]["round"])


def check(progress: Sequence[Event]) -> None:
    """AssertionError: what the workers of one job saw cannot be."""
    numbers = []
    for starts in rounds(progress):
        first = starts[0]
        numbers.append(first["round"])
        for name in ("round", "world", "restart"):
            assert len({e[name] for e in starts}) == 1, f"the workers of one round differ in {name}: {starts}"
        for name in ("MASTER_ADDR", "MASTER_PORT", "RENDEZVOUSD_JOB_UID"):
            assert len({e["env"][name] for e in starts}) == 1, f"the workers of one round differ in {name}: {starts}"
        ranks = sorted(e["rank"] for e in starts)
        assert len(set(ranks)) == len(ranks), f"a rank was given twice in one round: {ranks}"
        assert set(ranks) <= set(range(first["world"])), f"ranks {ranks} in a world of {first['world']}"
    assert len(set(numbers)) == len(numbers), f"two rounds of one number: {numbers}"
    restarts = [starts[0]["restart"] for starts in rounds(progress)]
    assert restarts == sorted(restarts), f"a restart was taken back: {restarts}"
    _check_order(progress)


def _check_order(progress: Sequence[Event]) -> None:
    """Who speaks for a rank is of the newest round that has spoken for it: one worker is gone before the next runs."""
    newest: dict[int, int] = {}
    for event in progress:
        if event["event"] in ("start", "step"):
            rank, number = event["rank"], event["round"]
            assert number >= newest.get(rank, 0), f"rank {rank} of round {newest[rank]} ran already: {event}"
            newest[rank] = number
