"""The judge sees what is wrong: a sound history, and each rule broken in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.checker import RULES, check, longest_pause

Events = list[dict[str, Any]]
NODES = {"n0": 1, "n1": 1, "n2": 2}
HOME = ("n0", "n1", "n2", "n2")  # by rank


def sound() -> Events:
    """Two rounds: a worker of the first is killed after 12 steps, the second goes on after step 10, to step 30."""
    events: Events = [{"t": 0.0, "event": "game", "seed": 1, "backend": "memory", "nodes": NODES, "min_nodes": 2}]
    events += [{"t": 0.0, "event": "launch", "node": node, "launcher": 1} for node in NODES]
    events += world(1, began_at=10.0, after=0, last=12, restart=0)
    events += [
        {"t": 12.5, "event": "fault", "fault": 1, "at": 12.4, "kind": "kill-worker", "target": "worker 13 on n2",
         "hold_s": 0.0, "pause_s": 20.0, "whole_s": 60.0, "charged": True, "together": False},
        {"t": 12.6, "event": "healed", "fault": 1},
        *[line(node, 12.7, "round 1 is over: rank 3 (local rank 1) on node n2 failed with signal 9") for node in NODES],
    ]  # fmt: skip
    events += world(2, began_at=14.0, after=10, last=30, restart=1)
    events += [
        {"t": 15.5, "event": "orphans", "fault": 1, "pids": []},
        {"t": 15.6, "event": "whole", "fault": 1},
        {"t": 16.0, "event": "finish", "step": 30},
    ]
    events += [{**who(2, rank), "t": 17.0, "event": "done", "step": 30, "loss": loss(30)} for rank in range(len(HOME))]
    events += [line(node, 17.5, "job succeeded") for node in NODES]
    events += [{"t": 18.0, "event": "exit", "node": node, "launcher": 1, "code": 0} for node in NODES]
    events += [
        {"t": 19.0, "event": "left", "pids": []},
        {"t": 20.0, "event": "reference", "step": 30, "loss": loss(30) + 1e-13},
    ]
    return events


def who(number: int, rank: int) -> dict[str, Any]:
    pid = 10 * number + rank
    return {"node": HOME[rank], "launcher": 1, "pid": pid, "rank": rank, "uid": f"u{number}", "round": number}


def loss(step: int) -> float:
    return 1.0 + 1.0 / step


def line(node: str, at: float, text: str) -> dict[str, Any]:
    return {"t": at, "event": "line", "node": node, "launcher": 1, "text": text}


def world(number: int, *, began_at: float, after: int, last: int, restart: int) -> Events:
    """A round of all nodes, from its forming to its last step."""
    events: Events = []
    for node, ranks in (("n0", "rank 0"), ("n1", "rank 1"), ("n2", "ranks 2-3")):
        group = sorted(NODES).index(node)
        text = f"round {number}: {ranks} of 4, node {group} of 3, master n0:{number}, restart {restart}/9"
        events.append(line(node, began_at, text))
    told = {"world": 4, "restart": restart, "master": f"n0:{number}", "job": "j", "older": []}
    for rank in range(4):
        me = who(number, rank)
        events.append({**me, **told, "t": began_at + 0.1, "event": "start"})
        events.append({**me, "t": began_at + 0.2, "event": "resume", "step": after})
        for step in range(after + 1, last + 1):
            at = began_at + 0.2 + 0.1 * (step - after)
            events.append({**me, "t": at, "event": "step", "step": step, "loss": loss(step), "t0": at - 0.05})
            if rank == 0 and step % 10 == 0:
                events.append({**me, "t": at + 0.01, "event": "saved", "step": step})
    return events


def pick(events: Events, kind: str, **wanted: object) -> dict[str, Any]:
    """The first event that is so."""
    return next(e for e in events if e["event"] == kind and all(e[key] == value for key, value in wanted.items()))


def drop(events: Events, kind: str) -> None:
    events[:] = [event for event in events if event["event"] != kind]


def test_a_sound_history_is_sound() -> None:
    assert check(sound()) == []


# ------------------------------------------------------------------------------------------------ each rule, broken


def two_of_one_rank(events: Events) -> None:
    events.append({**pick(events, "start", rank=1, round=1), "pid": 99, "t": 10.15})


def a_rank_with_another_world(events: Events) -> None:
    pick(events, "start", rank=1, round=1)["world"] = 3


def two_rounds_of_one_number(events: Events) -> None:
    for event in events:
        if event.get("uid") == "u2":
            event["round"] = 1


def a_number_that_goes_back(events: Events) -> None:
    for event in events:
        if event.get("uid") == "u1":
            event["round"] = 3


def a_rank_that_is_missing(events: Events) -> None:
    events[:] = [event for event in events if (event.get("rank"), event.get("round")) != (2, 2)]


def ranks_that_are_not_in_a_row(events: Events) -> None:
    for event in events:
        if event.get("round") == 1 and event.get("rank") in (1, 2):
            event["node"] = {1: "n2", 2: "n1"}[event["rank"]]


def launchers_that_disagree(events: Events) -> None:
    told = pick(events, "line", node="n1")
    told["text"] = told["text"].replace("of 4", "of 3")


def launchers_with_the_same_rank(events: Events) -> None:
    told = pick(events, "line", node="n1")
    told["text"] = told["text"].replace("rank 1 of", "rank 0 of")


def a_worker_that_was_told_something_else(events: Events) -> None:
    for event in events:
        if event["event"] == "start" and event["round"] == 2:
            event["master"] = "n1:7"


def two_worlds_at_a_time(events: Events) -> None:
    late = pick(events, "step", round=1, step=12, rank=0)
    late |= {"t": 14.6, "t0": 14.5}


def a_worker_of_an_older_round(events: Events) -> None:
    pick(events, "start", round=2, rank=1)["older"] = [["n1", 11, 1]]


def a_worker_of_an_older_round_elsewhere(events: Events) -> None:
    pick(events, "start", round=2, rank=1)["older"] = [["n0", 10, 1]]


def orphans_after_a_fault(events: Events) -> None:
    pick(events, "orphans")["pids"] = [77]


def orphans_at_the_end(events: Events) -> None:
    pick(events, "left")["pids"] = [78]


def a_step_that_is_left_out(events: Events) -> None:
    events.remove(pick(events, "step", round=2, step=15, rank=2))


def ranks_that_resume_apart(events: Events) -> None:
    pick(events, "resume", round=2, rank=3)["step"] = 9


def saved_steps_that_are_repeated(events: Events) -> None:
    for event in events:
        if event.get("round") == 2 and event["event"] == "resume":
            event["step"] = 0


def another_loss(events: Events) -> None:
    pick(events, "step", round=2, step=12, rank=1)["loss"] += 1e-6


def a_loss_that_is_no_number(events: Events) -> None:
    pick(events, "step", round=2, step=12, rank=1)["loss"] = float("nan")


def another_loss_at_the_end(events: Events) -> None:
    pick(events, "reference")["loss"] += 1e-6


def a_pause_that_is_too_long(events: Events) -> None:
    pick(events, "fault")["pause_s"] = 1.0


def a_fault_that_is_never_over(events: Events) -> None:
    drop(events, "whole")


def a_fault_that_is_never_healed(events: Events) -> None:
    drop(events, "healed")


def a_restart_that_nobody_caused(events: Events) -> None:
    pick(events, "fault")["charged"] = False


def a_restart_that_is_charged_twice(events: Events) -> None:
    for event in events:
        if event["event"] == "start" and event["round"] == 2:
            event["restart"] = 2


def a_restart_that_is_forgotten(events: Events) -> None:
    for event in events:
        if event["event"] == "start" and event["round"] == 1:
            event["restart"] = 2


def causes_that_differ(events: Events) -> None:
    next(e for e in events if "is over" in e.get("text", ""))["text"] = "round 1 is over: node n2 was lost"


def a_launcher_that_fails(events: Events) -> None:
    pick(events, "exit", node="n1")["code"] = 1


def a_launcher_that_says_something_else(events: Events) -> None:
    pick(events, "line", node="n1", text="job succeeded")["text"] = "job closed"


def a_launcher_that_goes_early(events: Events) -> None:
    pick(events, "exit", node="n1")["t"] = 15.0


def a_launcher_that_is_killed_by_nobody(events: Events) -> None:
    pick(events, "exit", node="n1")["code"] = -9


def a_launcher_that_stays(events: Events) -> None:
    events.remove(pick(events, "exit", node="n2"))


def a_training_that_does_not_end(events: Events) -> None:
    drop(events, "done")


def nothing_to_compare_with(events: Events) -> None:
    drop(events, "reference")


BROKEN: dict[str, list[Callable[[Events], None]]] = {
    "one_roster": [two_of_one_rank, a_rank_with_another_world, two_rounds_of_one_number],
    "numbers_grow": [a_number_that_goes_back],
    "ranks_tile": [a_rank_that_is_missing, ranks_that_are_not_in_a_row],
    "launchers_agree": [
        launchers_that_disagree,
        launchers_with_the_same_rank,
        a_worker_that_was_told_something_else,
    ],
    "one_world_at_a_time": [two_worlds_at_a_time],
    "nobody_of_an_older_round": [a_worker_of_an_older_round, a_worker_of_an_older_round_elsewhere],
    "nobody_is_left_behind": [orphans_after_a_fault, orphans_at_the_end],
    "steps_follow": [a_step_that_is_left_out, ranks_that_resume_apart],
    "nothing_saved_is_repeated": [saved_steps_that_are_repeated],
    "the_training_is_undisturbed": [another_loss, a_loss_that_is_no_number, another_loss_at_the_end],
    "training_goes_on": [a_pause_that_is_too_long, a_fault_that_is_never_over, a_fault_that_is_never_healed],
    "restarts_are_charged_once": [
        a_restart_that_nobody_caused,
        a_restart_that_is_charged_twice,
        a_restart_that_is_forgotten,
    ],
    "causes_agree": [causes_that_differ],
    "the_end_is_the_same_for_all": [
        a_launcher_that_fails,
        a_launcher_that_says_something_else,
        a_launcher_that_goes_early,
        a_launcher_that_is_killed_by_nobody,
        a_launcher_that_stays,
        a_training_that_does_not_end,
        nothing_to_compare_with,
    ],
}


@pytest.mark.parametrize(("rule", "breaking"), [(rule, each) for rule, found in BROKEN.items() for each in found])
def test_what_is_broken_is_reported(rule: str, breaking: Callable[[Events], None]) -> None:
    events = sound()
    breaking(events)
    assert rule in {violation.rule for violation in check(events)}


def test_every_rule_is_broken_by_some_test() -> None:
    assert [rule.__name__ for rule in RULES] == list(BROKEN)


# ------------------------------------------------------------------------------------------------ and what is allowed


def test_a_node_that_cannot_be_heard_may_still_have_old_workers() -> None:
    events = sound()
    a_worker_of_an_older_round_elsewhere(events)
    pick(events, "fault")["kind"] = "drop-node"
    assert check(events) == []
    pick(events, "start", round=2, rank=1)["older"] = [["n1", 11, 1]]  # but not beside the new ones
    assert [violation.rule for violation in check(events)] == ["nobody_of_an_older_round"]


def test_a_checkpoint_counts_though_its_writer_died_before_it_could_say_so() -> None:
    events = sound()
    events.remove(pick(events, "saved", round=1))
    assert check(events) == []


def test_a_killed_launcher_ends_early_and_another_takes_its_place() -> None:
    events = sound()
    pick(events, "fault")["kind"] = "kill-launcher"
    events.append({"t": 12.5, "event": "exit", "node": "n1", "launcher": 0, "code": -9})
    assert check(events) == []


def test_the_longest_pause_is_the_one_that_overlaps_the_fault() -> None:
    ends = [0.0, 5.0, 6.0, 9.0, 10.0, 30.0]
    assert longest_pause(ends, 5.5, 9.5) == 3.0
    assert longest_pause(ends, 1.0, 5.5) == 5.0
    assert longest_pause(ends, 9.5, 29.0) == 20.0
