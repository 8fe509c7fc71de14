"""What a node does next. Pure: (agent, fact, now) → (agent, orders).

As in the daemon, there are two kinds of change. A *fact* changes only what it names: a place was heard, a worker ended,
a store was opened. Then the *rules* settle what now has to be done, whatever led there:

    stop what may not live  →  let go of stores nobody needs  →  take the seat that was dealt  →  offer, if ready
    →  end, if it is over

So it makes no difference in which order things come, or how often they are said. A round lives through

    (dealt) → STARTING → RUNNING → SUCCEEDED
                  │          ├───→ FAILED              a worker failed; the rest of the node is being stopped
                  └──────────┴───→ STOPPING → STOPPED  told to stop, leaving, or its store is lost
                                   └──→ FENCED         ... or no daemon renews its lease

and is `gone` when no process of it is left; only then may the node offer itself for the next one.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import assert_never

from rdzv import wording
from rdzv.model import (
    NO_RETRY,
    SPAWN,
    Assignment,
    Cause,
    CutShort,
    DaemonAway,
    DaemonRefused,
    DropStore,
    Ended,
    Fact,
    Failure,
    Held,
    Hurry,
    Known,
    LeaseEnds,
    LeaveAsked,
    MasterReached,
    MasterUnreachable,
    Order,
    Phase,
    Place,
    PlaceHeard,
    Removed,
    Say,
    Spawn,
    SpawnFailed,
    Stop,
    StoreFailed,
    StoreLost,
    StoreOpened,
    Tell,
    TimePassed,
    Topic,
    Waiting,
    WorkerEnded,
    WorkersGone,
    WorkersStarted,
)
from rdzv.node import Agent, Away, Config, StoreTrouble, material, standing
from rdzv.rules import DONE_ALONE_S, Step, lease_ends_at, settle, wakes_at

__all__ = ["Agent", "Config", "begin", "lease_ends_at", "standing", "step", "wakes_at"]

FAILURES_MAX = 8  # the first few tell what happened; a node of 64 workers need not tell it 64 times
STORE_RETRY_S = 1.0  # between two attempts to open a bootstrap store
TROUBLE_LASTS_S = 10.0  # a store that held for so long had nothing to do with the trouble before
INSTANT_S = 1.0  # workers that failed sooner have not got beyond their imports
PAUSE_MIN_S = 1.0  # after the second such failure in a row; each further one doubles it
PAUSE_MAX_S = 16.0  # a daemon gives the seat of a node away that makes no offer for 30 s
PAUSE_GROWTHS_MAX = 10  # by then the bound is reached; a power without a bound overflows one day
AWAY_UNSAID_S = 2.0  # a daemon that is back sooner was never worth a line


def begin(config: Config, now: float) -> Step:
    """Return a node that has heard of nobody, and its first orders: an offer is made before anybody asks for one."""
    agent = Agent(config=config, away=Away(since=now, text="not reached yet"), idle_at=now)
    return settle(agent, now)


def step(agent: Agent, fact: Fact, now: float) -> Step:
    """Return the node as it stands after `fact`, and what to do, in this order. After an Exit there are no orders."""
    if agent.exited:
        return agent, []
    before = standing(agent)
    agent, said = _apply(agent, fact, now)
    agent, orders = settle(agent, now)
    after = standing(agent)
    if after == before:
        return agent, [*said, *orders]
    # Telling comes first: nothing that is done about a failure may delay the others' hearing of it.
    return agent, [Tell(standing=after, at_once=material(after) != material(before)), *said, *orders]


# ------------------------------------------------------------------------------------------------ facts


def _apply(agent: Agent, fact: Fact, now: float) -> Step:
    match fact:
        case PlaceHeard():
            return _place_heard(agent, fact.place, now)
        case DaemonAway():
            return _daemon_away(agent, fact, now)
        case DaemonRefused():
            return replace(agent, refused=fact.text), []
        case StoreOpened() | StoreFailed() | StoreLost():
            return _store_news(agent, fact, now)
        case MasterReached() | MasterUnreachable() | WorkersStarted() | SpawnFailed() | WorkerEnded() | WorkersGone():
            if agent.held is None or agent.held.round_uid != fact.round_uid:
                return agent, []  # news of a round that is no longer this node's
            return _round_news(agent, agent.held, fact, now)
        case LeaveAsked():
            return _leave_asked(agent, fact)
        case LeaseEnds():
            return _lease_ends(agent, fact, now)
        case TimePassed():
            return agent, []
        case _:
            assert_never(fact)


def _place_heard(agent: Agent, place: Place, now: float) -> Step:
    said: list[Order] = []
    if agent.away is not None and agent.away.said:
        said.append(Say(Topic.NEWS, "the daemon is back"))
    old, offer, agent = agent.place, agent.offer, replace(agent, away=None)
    if offer is not None and offer.doubtful:
        if old is not None and old.daemon_id == place.daemon_id:
            agent = replace(agent, offer=replace(offer, doubtful=False))
        else:  # others may have been at that store: the next one is fresh
            said.append(DropStore(offer.offer_id))
            agent = replace(agent, offer=None)
    if old is not None and old.term == place.term and place.revision < old.revision:
        return agent, said
    earlier_term = agent.earlier_term or (old is not None and old.term != place.term)
    agent = replace(agent, place=place, known=_greatest(agent.known, place.known), earlier_term=earlier_term)
    if agent.fence is not None and place.sent_at is not None:
        fence = agent.fence.renewed(place.valid_round_uid, place.sent_at, place.lease_s)
        agent = replace(agent, fence=fence)
    if isinstance(place.status, Ended | Removed):
        if agent.leaving is not None:
            return agent, said  # it goes for its own reason already; this is only the daemon's goodbye
        if isinstance(agent.over, Ended) and isinstance(place.status, Removed):
            return agent, said  # the job is over, and its outcome is known; a new one of this name began meanwhile
        agent = replace(agent, over=place.status, over_at=agent.over_at if agent.over is not None else now)
    elif isinstance(place.status, Waiting):
        agent, causes = _cause_said(agent, place, old)
        said += [*causes, Say(Topic.WAIT, wording.waiting(place.status, place.explain))]
    else:
        agent, causes = _cause_missed(agent, place, place.status)
        said += causes
    return agent, said


def _cause_said(agent: Agent, place: Place, old: Place | None) -> Step:
    """Why a round broke concerns those that were in it; the cause may change while more is being learnt."""
    cause, held = place.cause, agent.held
    if held is None:
        return agent, []
    if cause is None or not cause.text:
        forgotten = old is not None and old.valid_round_uid == held.round_uid and old.term != place.term
        said = forgotten and not agent.valid
        return agent, [Say(Topic.CAUSE, wording.forgotten(held.assignment))] if said else []
    return _say_cause(agent, held, cause) if held.round_uid == place.known.round_uid else (agent, [])


def _cause_missed(agent: Agent, place: Place, seat: Assignment) -> Step:
    """A round that breaks and is followed by the next one at once: nobody had to wait, and was told why."""
    held, cause = agent.held, place.cause
    if held is None or cause is None or not cause.text or seat.round != held.assignment.round + 1:
        return agent, []
    return _say_cause(agent, held, cause)


def _say_cause(agent: Agent, held: Held, cause: Cause) -> Step:
    """Once for each round, and again when it has changed: the next round may well break of the same."""
    if agent.cause_said == (held.round_uid, cause.text):
        return agent, []
    round_uid, before = agent.cause_said
    if round_uid == held.round_uid and cause.text.startswith(f"{before}; "):  # only what came of it is new
        said = Say(Topic.CAUSE, cause.text.removeprefix(f"{before}; "))
    else:
        said = Say(Topic.CAUSE, wording.broke(held.assignment, cause))
    return replace(agent, cause_said=(held.round_uid, cause.text)), [said]


def _daemon_away(agent: Agent, fact: DaemonAway, now: float) -> Step:
    if agent.offer is not None and agent.offer.port is not None:
        agent = replace(agent, offer=replace(agent.offer, doubtful=True))
    away = agent.away or Away(since=now, text=fact.text)
    away = replace(away, text=fact.text)
    if away.said or now < away.since + AWAY_UNSAID_S or agent.doomed:
        return replace(agent, away=away), []
    if agent.idle and not agent.done:
        left_s = agent.config.join_timeout_s - (now - max(away.since, agent.idle_at))
        said = Say(Topic.WAIT, wording.no_daemon(fact.text, left_s))
        return replace(agent, away=away), [said]
    if agent.done:
        text = wording.away_while_done(fact.text, DONE_ALONE_S)
    elif agent.fence is not None:
        text = wording.away_while_fenced(fact.text, agent.fence.lease_s)
    else:
        text = wording.away_while_training(fact.text, agent.config.daemon_loss_timeout_s)
    return replace(agent, away=replace(away, said=True)), [Say(Topic.WARN, text)]


def _leave_asked(agent: Agent, fact: LeaveAsked) -> Step:
    if agent.leaving is not None:
        return agent, [Hurry()]
    return replace(agent, leaving=fact), [Say(Topic.NEWS, wording.leaving(fact, busy=not agent.idle))]


def _lease_ends(agent: Agent, fact: LeaseEnds, now: float) -> Step:
    """The round is over here, whatever is heard after this."""
    held, fence = agent.held, agent.fence
    if held is None or fence is None or held.round_uid != fact.round_uid:
        return agent, []
    if held.stop_at is not None:
        return (replace(agent, fence=replace(fence, cut=True)), [CutShort()]) if fact.left_s <= 0 else (agent, [])
    said = Say(Topic.WARN, wording.lease_ends(held.assignment, fence.lease_s, agent.away.text if agent.away else ""))
    if not held.spawned:
        held = replace(held.moved({Phase.STARTING: Phase.FENCED}), gone=True, fenced=True)
        return replace(agent, held=held, fence=None, idle_at=now), [said]
    phases = dict.fromkeys((Phase.STARTING, Phase.RUNNING), Phase.STOPPING)
    held = replace(held.moved(phases), stop_at=now - fact.late_s, fenced=True)
    stop = Stop(round_uid=held.round_uid, signal=int(signal.SIGTERM), grace_s=max(0.0, fact.left_s))
    return replace(agent, held=held), [said, stop]


def _store_news(agent: Agent, fact: StoreOpened | StoreFailed | StoreLost, now: float) -> Step:
    offer = agent.offer
    mine = offer is not None and fact.offer_id in (offer.offer_id, "")
    match fact:
        case StoreOpened():
            if offer is None or not mine:
                return agent, []  # given up while it was being opened; its DropStore is already ordered
            return replace(agent, offer=replace(offer, port=fact.port)), []
        case StoreFailed():
            return _without_store(agent, fact.text, now) if mine else (agent, [])
        case StoreLost():
            if agent.hosted and fact.offer_id in (agent.hosted, "") and agent.held is not None:
                agent = replace(agent, hosted="", held=replace(agent.held, store_lost=True))
            if offer is None or not mine:
                return agent, []
            agent, orders = _without_store(agent, fact.text, now)
            return agent, [DropStore(offer.offer_id), *orders]  # it may just be being opened once more
        case _:
            assert_never(fact)


def _without_store(agent: Agent, text: str, now: float) -> Step:
    """A first time is tried again at once; a host on which it goes on like that is not one to hurry on."""
    before = agent.trouble if agent.trouble is not None and now < agent.trouble.retry_at + TROUBLE_LASTS_S else None
    if before is None:
        trouble = StoreTrouble(since=now, retry_at=now, text=text)
        return replace(agent, offer=None, trouble=trouble), [Say(Topic.WARN, wording.store_failed(text))]
    return replace(agent, offer=None, trouble=replace(before, retry_at=now + STORE_RETRY_S, text=text)), []


def _round_news(
    agent: Agent,
    held: Held,
    fact: MasterReached | MasterUnreachable | WorkersStarted | SpawnFailed | WorkerEnded | WorkersGone,
    now: float,
) -> Step:
    match fact:
        case MasterReached():
            if held.phase is not Phase.STARTING or held.spawned or held.gone or not agent.valid or agent.doomed:
                return agent, []
            return replace(agent, held=replace(held, spawned=True)), [Spawn(held.assignment)]
        case MasterUnreachable():
            if held.phase is not Phase.STARTING or held.spawned:
                return agent, []
            held = replace(held, phase=Phase.STOPPED, gone=True, master_unreachable=True)
            return replace(agent, held=held, fence=None, idle_at=now), [Say(Topic.WARN, fact.text)]
        case WorkersStarted():
            held = replace(held.moved({Phase.STARTING: Phase.RUNNING}), started_at=now)
            return replace(agent, held=held), []
        case SpawnFailed():
            return replace(agent, held=_spawn_failed(held, fact, now)), []
        case WorkerEnded():
            return replace(agent, held=_worker_ended(held, fact)), []
        case WorkersGone():
            if held.stop_at is None:
                return agent, []  # only what was stopped can be said to be gone
            stopped = Phase.FENCED if held.fenced else Phase.STOPPED
            held = replace(held.moved({Phase.STOPPING: stopped}), gone=True)
            return _after_instant_failure(replace(agent, held=held, fence=None, idle_at=now), held, now)
        case _:
            assert_never(fact)


def _after_instant_failure(agent: Agent, held: Held, now: float) -> Step:
    """A script that fails as soon as it starts will do so again: from the second time on it is not tried at once."""
    if not any(_instant(held, failure) for failure in held.failures):
        return replace(agent, instant=0), []
    agent = replace(agent, instant=agent.instant + 1)
    seat = held.assignment
    last = seat.restart_count >= seat.max_restarts or any(f.kind == NO_RETRY for f in held.failures)
    if agent.instant < 2 or last or agent.doomed:
        return agent, []
    pause_s = min(PAUSE_MIN_S * 2 ** min(agent.instant - 2, PAUSE_GROWTHS_MAX), PAUSE_MAX_S)
    agent = replace(agent, pause_until=now + pause_s)
    return agent, [Say(Topic.NEWS, wording.pausing(pause_s, agent.instant))]


def _instant(held: Held, failure: Failure) -> bool:
    """Whether it was over before it had begun. A signal comes from without, and says nothing of the script."""
    if failure.kind == SPAWN:
        return True
    return held.started_at is not None and not failure.signal and failure.ended_at < held.started_at + INSTANT_S


def _spawn_failed(held: Held, fact: SpawnFailed, now: float) -> Held:
    if held.stop_at is not None:
        return held  # it was being stopped anyway
    failure = Failure(
        rank=held.assignment.first_rank + fact.local_rank,
        local_rank=fact.local_rank,
        exit_code=1,
        signal=0,
        text=wording.cut(fact.text),
        ended_at=now,
        kind=SPAWN,
    )
    return _failed(held, failure)


def _worker_ended(held: Held, fact: WorkerEnded) -> Held:
    if fact.local_rank in held.ended:
        return held
    held = replace(held, ended=held.ended | {fact.local_rank})
    if fact.exit_code == 0 and fact.signal == 0:
        all_ended = len(held.ended) == held.assignment.slots
        return held.moved({Phase.STARTING: Phase.SUCCEEDED, Phase.RUNNING: Phase.SUCCEEDED}) if all_ended else held
    if held.stop_at is not None and fact.at >= held.stop_at:
        return held  # it ended as it was told to, whatever code it chose
    failure = Failure(
        rank=held.assignment.first_rank + fact.local_rank,
        local_rank=fact.local_rank,
        exit_code=fact.exit_code,
        signal=fact.signal,
        text=wording.cut(fact.text),
        ended_at=fact.at,
        victim=fact.victim,
        kind=fact.kind,
    )
    return _failed(held, failure)


def _failed(held: Held, failure: Failure) -> Held:
    failures = sorted((*held.failures, failure), key=lambda f: f.ended_at)
    return replace(held, phase=Phase.FAILED, failures=tuple(failures[:FAILURES_MAX]))


def _greatest(known: Known, told: Known) -> Known:
    if told.job_uid and told.job_uid != known.job_uid:
        return told  # the job it was in gave way to an older one: what was known of it is worth nothing
    newer = told if told.round > known.round or not known.round else known
    charged = told if told.charged_round > known.charged_round else known
    return replace(
        newer,
        restarts_used=max(known.restarts_used, told.restarts_used),
        charged_round=charged.charged_round,
        charged_round_uid=charged.charged_round_uid,
    )
