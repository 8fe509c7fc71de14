"""What a soak shows, as tables."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.chaos.checker import History, longest_pause
from tests.chaos.game import Usage
from tests.chaos.history import Event

NOTICED_S = 1.5  # a step takes some 0.1 s; a busy machine now and then makes more of it


@dataclass
class Row:
    """All faults of one kind."""

    pauses_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)  # from the healing until all nodes train together
    injected: int = 0


def rows(events: Iterable[Event]) -> dict[str, Row]:
    """By kind; faults that came two at a time are under a name of their own."""
    history = History(events)
    ends = [float(event["t"]) for event in history.all("step") if event["rank"] == 0]
    found: dict[str, Row] = defaultdict(Row)
    for fault, healed_at, whole_at in history.faults():
        row = found["two at once" if fault["together"] else fault["kind"]]
        row.injected += 1
        if healed_at is not None and whole_at is not None:
            row.pauses_s.append(longest_pause(ends, fault["at"], whole_at))
            row.whole_s.append(whole_at - healed_at)
    return dict(sorted(found.items()))


def print_report(events: Sequence[Event], usage: Iterable[Usage]) -> None:
    found = rows(events)
    print("\n| fault | injected | recovered | noticed | pause, median / worst | all nodes again, median / worst |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, row in found.items():
        noticed = sum(pause > NOTICED_S for pause in row.pauses_s)
        times = " | ".join(_times(values) for values in (row.pauses_s, row.whole_s))
        print(f"| {kind} | {row.injected} | {len(row.pauses_s)} | {noticed} | {times} |")
    injected = sum(row.injected for row in found.values())
    recovered = sum(len(row.pauses_s) for row in found.values())
    rounds = len({event["uid"] for event in events if event["event"] == "start"})
    steps = max((event["step"] for event in events if event["event"] == "step"), default=0)
    print(f"\n{injected} faults, {recovered} recoveries, {rounds} rounds, {steps} steps")
    print("\n| process | its start | watched for | RSS, MiB | PSS, MiB | open files |")
    print("| --- | --- | --- | --- | --- | --- |")
    for each in usage:
        memory = f"{each.rss_mib[0]:.0f} → {each.rss_mib[1]:.0f} | {each.pss_mib[0]:.0f} → {each.pss_mib[1]:.0f}"
        start = each.incarnation if each.incarnation != each.pid else ""
        print(f"| {each.name} | {start} | {each.age_s:.0f} s | {memory} | {each.files[0]} → {each.files[1]} |")
    print(flush=True)


def _times(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} / {max(values):.1f} s" if values else "-"
