"""The judge: what must hold in every history, whatever was done to the game. It reads nothing else.

Each rule is a function from a history to what is wrong with it, in words; RULES has them all.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.chaos.history import Event

LOSS_TOLERANCE = 1e-9  # of sums in another order; the losses are around 1
EXCUSED_S = 15.0  # after a fault a node may still not have heard that its round is over: a lease, a stop, and a margin
# Faults under which a node may not be heard, so that its workers of an older round may live on for a while.
UNHEARD = re.compile(
    r"(stop|kill|flap)-launcher|(pull|drop|slow)-(node|daemon|etcd).*|flap-cable|(kill|stop)-(daemon|etcd)"
)
KILLING = ("kill-launcher", "flap-launcher", "few-files-daemon")  # which launcher, too, by SIGKILL
_FORMED = re.compile(
    r"round (\d+): ranks? (\d+)(?:-(\d+))? of (\d+), node (\d+) of (\d+), master (\S+), restart (\d+)/(\d+)"
)
_ENDED = re.compile(r"job (succeeded|failed|closed)|left the job|removed from the job|no daemon at|the daemon refused")


@dataclass(frozen=True)
class Violation:
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass
class Round:
    """What is known of one sealed round."""

    uid: str
    number: int
    starts: list[Event]
    resumes: list[Event]
    steps: list[Event]


class History:
    """Events in the order of their time, and by what they are of."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: float(event["t"]))
        self._by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            self._by_kind[event["event"]].append(event)
        self.rounds = self._rounds()

    def all(self, kind: str) -> list[Event]:
        return self._by_kind.get(kind, [])

    def faults(self) -> list[tuple[Event, float | None, float | None]]:
        """(fault, when it was healed, when all trained again)."""
        healed = {event["fault"]: float(event["t"]) for event in self.all("healed")}
        whole = {event["fault"]: float(event["t"]) for event in self.all("whole")}
        return [(fault, healed.get(fault["fault"]), whole.get(fault["fault"])) for fault in self.all("fault")]

    def _rounds(self) -> list[Round]:
        """In the order in which their first workers started."""
        found: dict[str, Round] = {}
        for event in self.all("start"):
            found.setdefault(event["uid"], Round(event["uid"], event["round"], [], [], [])).starts.append(event)
        for kind in ("resume", "step"):
            for event in self.all(kind):
                if event["uid"] in found:
                    (found[event["uid"]].resumes if kind == "resume" else found[event["uid"]].steps).append(event)
        return list(found.values())


Rule: TypeAlias = Callable[[History], Iterator[str]]


def check(events: Iterable[Event]) -> list[Violation]:
    """Everything that is wrong with a history."""
    history = History(events)
    return [Violation(rule.__name__, text) for rule in RULES for text in rule(history)]


# ------------------------------------------------------------------------------------------------ rounds


def one_roster(history: History) -> Iterator[str]:
    """A round is one list of nodes, for ever: its workers agree on what is the world's, and no rank is there twice."""
    for each in history.rounds:
        for key in ("round", "world", "restart", "master", "job"):
            told = {event[key] for event in each.starts}
            if len(told) > 1:
                yield f"round {each.number}: workers were told different values of {key}: {sorted(map(str, told))}"
        for rank, events in _grouped(each.starts, "rank").items():
            if len(events) > 1:
                where = ", ".join(f"{event['node']} pid {event['pid']}" for event in events)
                yield f"round {each.number}: rank {rank} was started {len(events)} times: {where}"
    for number, rounds in _by_number(history).items():
        if len({each.uid for each in rounds}) > 1:
            yield f"round {number}: two rounds have this number: {', '.join(each.uid for each in rounds)}"


def numbers_grow(history: History) -> Iterator[str]:
    """A round that begins later has a greater number."""
    greatest = 0
    for each in history.rounds:
        if each.number < greatest:
            yield f"round {each.number} began after round {greatest}"
        greatest = max(greatest, each.number)


def ranks_tile(history: History) -> Iterator[str]:
    """The ranks of a round are 0 to world size - 1, at each node in a row, as its launcher says."""
    for each in history.rounds:
        world = each.starts[0]["world"]
        ranks = {event["rank"] for event in each.starts}
        if not ranks <= set(range(world)):
            yield f"round {each.number}: ranks {sorted(ranks)} in a world of {world}"
        if each.steps and ranks != set(range(world)):
            yield f"round {each.number}: it trained with ranks {sorted(ranks)} of a world of {world}"
        for node, events in _grouped(each.starts, "node").items():
            mine = sorted(event["rank"] for event in events)
            if mine[-1] - mine[0] != len(mine) - 1:
                yield f"round {each.number}: node {node} has ranks {mine}"


def launchers_agree(history: History) -> Iterator[str]:
    """What launchers say of a round is what its workers were told, and what the other launchers say."""
    started = {
        (event["round"], event["node"], event["launcher"], event["rank"]): event for event in history.all("start")
    }
    told: dict[int, tuple[str, ...]] = {}
    dealt: dict[int, dict[int, str]] = defaultdict(dict)
    for line in history.all("line"):
        if not (found := _FORMED.match(line["text"])):
            continue
        number, first, last = int(found[1]), int(found[2]), int(found[3] or found[2])
        world, group_size, master, restart = found[4], found[6], found[7], found[8]
        said = (world, group_size, master, restart)
        if told.setdefault(number, said) != said:
            yield f"round {number}: {line['node']} says {said}, another launcher {told[number]}"
        for rank in range(first, last + 1):
            if dealt[number].setdefault(rank, line["node"]) != line["node"]:
                yield f"round {number}: rank {rank} is dealt to {dealt[number][rank]} and to {line['node']}"
            worker = started.get((number, line["node"], line["launcher"], rank))
            if worker is not None and (str(worker["world"]), worker["master"], str(worker["restart"])) != (
                world, master, restart,
            ):  # fmt: skip
                yield f"round {number}: rank {rank} was told something else than {line['node']} says"
    for number, ranks in dealt.items():
        if not set(ranks) <= set(range(int(told[number][0]))):
            yield f"round {number}: ranks {sorted(ranks)} were dealt in a world of {told[number][0]}"


# ------------------------------------------------------------------------------------------------ who ran when


def one_world_at_a_time(history: History) -> Iterator[str]:
    """When a later round has made a step, no earlier one begins another that succeeds."""
    later_at, later = float("inf"), 0
    for each in sorted(history.rounds, key=lambda each: each.number, reverse=True):
        for step in each.steps:
            if step["t0"] > later_at:
                yield (
                    f"round {each.number}: rank {step['rank']} began step {step['step']} "
                    f"{step['t0'] - later_at:.2f} s after round {later} had made one"
                )
                break
        if each.steps and min(step["t"] for step in each.steps) < later_at:
            later_at, later = min(step["t"] for step in each.steps), each.number


def nobody_of_an_older_round(history: History) -> Iterator[str]:
    """Where a worker starts, none of an older round lives on its node, nor on any node that can be heard."""
    for start in history.all("start"):
        for node, pid, number in start["older"]:
            if node == start["node"] or not _excused(history, start["t"]):
                yield (
                    f"round {start['round']}: when rank {start['rank']} started on {start['node']}, "
                    f"pid {pid} of round {number} lived on {node}"
                )


def nobody_is_left_behind(history: History) -> Iterator[str]:
    """What a dead launcher has started is gone, soon after its death and at the end."""
    for event in history.all("orphans"):
        if event["pids"]:
            yield f"after fault {event['fault']} processes of a dead launcher live: {event['pids']}"
    for event in history.all("left"):
        if event["pids"]:
            yield f"processes live though their launchers have ended: {event['pids']}"


# ------------------------------------------------------------------------------------------------ the training


def steps_follow(history: History) -> Iterator[str]:
    """In a round all ranks go on after the same step, and make one after another."""
    for each in history.rounds:
        resumed = {event["step"] for event in each.resumes}
        if len(resumed) > 1:
            yield f"round {each.number}: ranks go on after different steps: {sorted(resumed)}"
        for rank, events in _grouped([*each.resumes, *each.steps], "rank").items():
            steps = [event["step"] for event in events]
            if steps != list(range(steps[0], steps[0] + len(steps))):
                yield f"round {each.number}: rank {rank} made steps {_gaps(steps)}"


def nothing_saved_is_repeated(history: History) -> Iterator[str]:
    """Training goes on from a checkpoint that was saved before, and no older one than the last."""
    saved = {0}
    for event in history.events:
        if event["event"] == "saved":
            saved.add(event["step"])
        elif event["event"] == "resume" and event["rank"] == 0:
            if event["step"] < max(saved):
                yield f"round {event['round']}: goes on after step {event['step']}; step {max(saved)} had been saved"
            elif event["step"] not in saved:
                saved.add(event["step"])  # on the disk, and its writer died before it could say so


def the_training_is_undisturbed(history: History) -> Iterator[str]:
    """Each step has one loss, whoever makes it and however often; the last one is that of a run without any fault."""
    losses: dict[int, float] = {}
    for event in (*history.all("step"), *history.all("done"), *history.all("reference")):
        known = losses.setdefault(event["step"], event["loss"])
        if not abs(known - event["loss"]) <= LOSS_TOLERANCE:
            who = f"round {event['round']}, rank {event['rank']}" if "round" in event else "an undisturbed run"
            yield f"step {event['step']}: loss {event['loss']} ({who}), and {known} elsewhere"


def training_goes_on(history: History) -> Iterator[str]:
    """After each fault there is training within its bound, and with all nodes soon after it is healed."""
    ends = [float(event["t"]) for event in history.all("step") if event["rank"] == 0]
    for fault, healed_at, whole_at in history.faults():
        name = f"fault {fault['fault']} ({fault['kind']}: {fault['target']})"
        if healed_at is None:
            yield f"{name} was never healed"
            continue
        if whole_at is None or whole_at - healed_at > fault["whole_s"]:
            yield f"{name}: not all nodes train together {fault['whole_s']:.0f} s after it was healed"
            continue
        pause_s = longest_pause(ends, fault["at"], whole_at)
        if pause_s > fault["pause_s"] and not fault["together"]:
            yield f"{name}: training paused for {pause_s:.1f} s, more than {fault['pause_s']:.0f} s"


def longest_pause(ends: Sequence[float], since: float, until: float) -> float:
    """The longest time without a finished step that overlaps this span. `ends`: when steps were finished."""
    marks = [max((end for end in ends if end <= since), default=since)]
    marks += [end for end in ends if since < end < until]
    marks.append(min((end for end in ends if end >= until), default=until))
    return max(later - earlier for earlier, later in itertools.pairwise(marks))


# ------------------------------------------------------------------------------------------------ restarts, ends


def restarts_are_charged_once(history: History) -> Iterator[str]:
    """The restart count grows by one at most from round to round, and only where a worker can have failed."""
    rounds = sorted(history.rounds, key=lambda each: each.number)
    faults = history.faults()
    for before, after in itertools.pairwise(rounds):
        rise = after.starts[0]["restart"] - before.starts[0]["restart"]
        if rise < 0:
            yield f"round {after.number}: restart {after.starts[0]['restart']} after {before.starts[0]['restart']}"
        if rise > after.number - before.number:
            yield f"round {after.number}: {rise} restarts more than in round {before.number}"
        began, ended = before.starts[0]["t"], after.starts[0]["t"]
        if rise > 0 and not any(
            fault["charged"] and fault["at"] < ended and (whole_at is None or whole_at > began)
            for fault, _, whole_at in faults
        ):
            yield f"round {after.number}: a restart was used, and no worker had been struck"


def causes_agree(history: History) -> Iterator[str]:
    """The last cause that launchers name for the end of a round is the same for all that were there to hear it."""
    named: dict[str, dict[tuple[str, int], str]] = defaultdict(dict)
    for line in history.all("line"):
        if (found := re.match(r"round (\d+) is over: (.*)", line["text"])) and "does not know it" not in found[2]:
            named[found[1]][line["node"], line["launcher"]] = found[2]
    ends = {int(number): said for number, said in named.items()}
    for number, said in ends.items():
        at = max((event["t"] for each in history.rounds if each.number == number for event in each.starts), default=0.0)
        if len(set(said.values())) > 1 and not _cut_off_after(history, at):
            yield f"round {number}: launchers name different causes: {sorted(set(said.values()))}"


def the_end_is_the_same_for_all(history: History) -> Iterator[str]:
    """No launcher ends before the training does, but those that were killed; then all succeed and say so."""
    finish = history.all("finish")
    finished_at = finish[0]["t"] if finish else float("inf")
    last: dict[tuple[str, int], list[str]] = defaultdict(list)
    for line in history.all("line"):
        if _ENDED.match(line["text"]):
            last[line["node"], line["launcher"]].append(line["text"])
    codes: dict[str, int] = {}
    for event in history.all("exit"):
        who = (event["node"], event["launcher"])
        if event["code"] == -9 and _killed(history, event["t"]):
            continue
        if event["t"] < finished_at:
            yield f"launcher {who} ended with {event['code']} in the midst of the training: {last[who]}"
            continue
        codes[event["node"]] = event["code"]
        if (event["code"], last[who]) != (0, ["job succeeded"]):
            yield f"launcher {who} ended with {event['code']} and said {last[who]}"
    nodes = history.all("game")[0]["nodes"]
    if missing := sorted(set(nodes) - set(codes)):
        yield f"launchers have not ended: {', '.join(missing)}"
    if not finish or {event["step"] for event in history.all("done")} != {finish[0]["step"]}:
        yield "the training has not come to its last step"
    if not history.all("reference"):
        yield "there is nothing to compare the last loss with"


# ------------------------------------------------------------------------------------------------ helpers


RULES: tuple[Rule, ...] = (
    one_roster,
    numbers_grow,
    ranks_tile,
    launchers_agree,
    one_world_at_a_time,
    nobody_of_an_older_round,
    nobody_is_left_behind,
    steps_follow,
    nothing_saved_is_repeated,
    the_training_is_undisturbed,
    training_goes_on,
    restarts_are_charged_once,
    causes_agree,
    the_end_is_the_same_for_all,
)


def _grouped(events: Iterable[Event], key: str) -> dict[Any, list[Event]]:
    found: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        found[event[key]].append(event)
    return found


def _by_number(history: History) -> dict[int, list[Round]]:
    found: dict[int, list[Round]] = defaultdict(list)
    for each in history.rounds:
        found[each.number].append(each)
    return found


def _killed(history: History, at: float) -> bool:
    """Whether launchers were being killed just then."""
    return any(
        fault["kind"] in KILLING and fault["at"] <= at <= (healed_at or at) + 1.0
        for fault, healed_at, _ in history.faults()
    )


def _excused(history: History, at: float) -> bool:
    """Whether some node may not have been heard just then."""
    return any(
        UNHEARD.fullmatch(fault["kind"]) and fault["at"] <= at <= (healed_at or at) + EXCUSED_S
        for fault, healed_at, _ in history.faults()
    )


def _cut_off_after(history: History, at: float) -> bool:
    """Whether the round that began then was the last one before a fault in which somebody may not have heard why."""
    following = [fault for fault, _, whole_at in history.faults() if whole_at is None or whole_at > at]
    return bool(following) and any(UNHEARD.fullmatch(fault["kind"]) for fault in following[:2])


def _gaps(steps: Sequence[int]) -> str:
    pairs = itertools.pairwise(steps)
    return ", ".join(f"{before} and then {after}" for before, after in pairs if after != before + 1)
