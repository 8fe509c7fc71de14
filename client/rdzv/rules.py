"""What now has to be done, whatever led here: the rules that `agent.step` applies after every fact, in this order.

Each is (agent, now) → (agent, orders).
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TypeAlias

from rdzv import wording
from rdzv.fence import Fence
from rdzv.model import (
    Assignment,
    DropStore,
    Ended,
    Exit,
    Held,
    LeaveAsked,
    Offer,
    OpenStore,
    Order,
    Outcome,
    Phase,
    ReachMaster,
    Removed,
    Say,
    Spawn,
    Stop,
    Topic,
)
from rdzv.node import Agent

STORE_GIVE_UP_S = 30.0  # of failing to open a bootstrap store; something is wrong with this host then
# A node whose workers have all succeeded waits so long for a daemon that is away. It covers a failover, or a restart
# with its recovery window; the success itself does not depend on anybody hearing of it.
DONE_ALONE_S = 60.0
LAST_WORD_S = 1.0  # for the daemon to hear that this node leaves; it would notice the broken stream in about that time

Step: TypeAlias = tuple[Agent, list[Order]]


def settle(agent: Agent, now: float) -> Step:
    orders: list[Order] = []
    for rule in (_give_up_daemon, _stop_what_may_not_live, _drop_hosted, _take_seat, _keep_offer, _end):
        agent, more = rule(agent, now)
        orders.extend(more)
    return agent, orders


def _give_up_daemon(agent: Agent, now: float) -> Step:
    """Leave a job whose daemon has been away for longer than its user wants to train without one."""
    at = _daemon_given_up_at(agent)
    if at is None or now < at:
        return agent, []
    assert agent.away is not None
    assert agent.config.daemon_loss_timeout_s is not None
    reason = wording.daemon_given_up(agent.config.endpoints, agent.config.daemon_loss_timeout_s, agent.away.text)
    asked = LeaveAsked(signal=0, reason=reason)
    return replace(agent, leaving=asked), [Say(Topic.WARN, wording.leaving(asked, busy=not agent.idle))]


def _daemon_given_up_at(agent: Agent) -> float | None:
    """Return when a node that has attended a daemon, and is not done, gives up waiting for it; None: not at all."""
    timeout_s = agent.config.daemon_loss_timeout_s
    if timeout_s is None or agent.away is None or agent.place is None or agent.doomed or agent.done:
        return None
    return agent.away.since + timeout_s


def _stop_what_may_not_live(agent: Agent, now: float) -> Step:
    held = agent.held
    if held is None or held.gone or held.stop_at is not None:
        return agent, []
    # After a success too: what the workers left behind must be gone before the node may promise that nothing lives.
    if agent.valid and not held.over and held.phase is not Phase.SUCCEEDED and not agent.doomed:
        return agent, []
    told = {Phase.STARTING: Phase.STOPPING, Phase.RUNNING: Phase.STOPPING}
    if not held.spawned:
        held = replace(held.moved(dict.fromkeys(told, Phase.STOPPED)), gone=True)
        return replace(agent, held=held, fence=None, idle_at=now), []
    next_round = held.phase is not Phase.SUCCEEDED and not agent.doomed
    agent = replace(agent, held=replace(held.moved(told), stop_at=now))
    number = (agent.leaving.signal if agent.leaving is not None else 0) or signal.SIGTERM
    grace_s = agent.config.stop_grace_s
    stop = Stop(round_uid=held.round_uid, signal=int(number), grace_s=grace_s, next_round=next_round)
    return agent, [stop]


def _drop_hosted(agent: Agent, now: float) -> Step:
    """The store of a round serves its peers until the round is over for all, not only for this node."""
    held = agent.held
    if not agent.hosted or held is None or not held.gone or agent.valid:
        return agent, []
    return replace(agent, hosted=""), [DropStore(agent.hosted)]


def _take_seat(agent: Agent, now: float) -> Step:
    place = agent.place
    if place is None or agent.doomed or not isinstance(place.status, Assignment) or not agent.idle:
        return agent, []
    seat, last = place.status, agent.held
    # Numbers only grow, so a seat whose number is not greater than the last one's was taken before.
    if seat.round_uid != place.valid_round_uid or (last is not None and seat.round <= last.assignment.round):
        return agent, []
    held, offer = Held(assignment=seat), agent.offer
    if agent.config.fenced:
        fence = Fence(round_uid=seat.round_uid)
        sent_at = place.sent_at if place.sent_at is not None else 0.0
        agent = replace(agent, fence=fence.renewed(place.valid_round_uid, sent_at, place.lease_s))
    said = Say(Topic.NEWS, wording.formed(seat))
    noticed: list[Order] = [Say(Topic.WARN, seat.notice)] if seat.notice else []
    if offer is not None and offer.port is not None and offer.offer_id == seat.master_offer_id:
        agent = replace(agent, held=replace(held, spawned=True), offer=None, hosted=offer.offer_id)
        return agent, [*noticed, said, Spawn(seat)]
    # Dealt is dealt: an offer that is not the round's store will not be asked for again.
    drops: list[Order] = [] if offer is None else [DropStore(offer.offer_id)]
    agent = replace(agent, offer=None)
    if seat.group_rank == 0:
        held = replace(held, phase=Phase.STOPPED, gone=True, store_lost=True)
        said = Say(Topic.WARN, wording.own_store_lost(seat))
        return replace(agent, held=held, fence=None, idle_at=now), [*drops, said]
    reach = ReachMaster(round_uid=seat.round_uid, addr=seat.master_addr, port=seat.master_port)
    return replace(agent, held=held), [*drops, *noticed, said, reach]


def _keep_offer(agent: Agent, now: float) -> Step:
    """Have exactly one offer, naming the latest round known to be over, whenever the node is free; otherwise none."""
    if agent.pause_until and now >= agent.pause_until:
        agent = replace(agent, pause_until=0.0)
    after, offer = _offerable(agent), agent.offer
    if offer is not None and offer.after == after:
        return agent, []
    if after is None:
        agent = replace(agent, trouble=None)
    orders: list[Order] = [] if offer is None else [DropStore(offer.offer_id)]
    agent = replace(agent, offer=None)
    if after is None or (agent.trouble is not None and now < agent.trouble.retry_at):
        return agent, orders
    offer = Offer(offer_id=f"{agent.config.node_uid}-{agent.offers + 1}", after=after)
    return replace(agent, offer=offer, offers=agent.offers + 1), [*orders, OpenStore(offer.offer_id)]


def _offerable(agent: Agent) -> str | None:
    """Return the round to name in an offer, or None if this node may not offer now."""
    held, place = agent.held, agent.place
    if agent.doomed or not agent.idle or agent.pause_until:
        return None
    if place is None:
        return ""
    if held is not None and agent.valid and not held.over:
        return None  # done, and its success stands
    # A round that this node has no part in is as good as over to it: that is what makes it a ready spare.
    return place.known.round_uid


def _end(agent: Agent, now: float) -> Step:
    exit_ = _exit(agent, now) if agent.idle else None
    return (agent, []) if exit_ is None else (replace(agent, exited=True), [exit_])


def _exit(agent: Agent, now: float) -> Exit | None:
    over, trouble = agent.over, agent.trouble
    if isinstance(over, Removed):
        return Exit(code=over.exit_code, text=wording.removed(over))
    if isinstance(over, Ended):
        if over.may_exit or agent.leaving is not None or now >= agent.over_at + agent.lease_s:
            code = 0 if over.outcome is Outcome.SUCCEEDED else over.exit_code or 1
            return Exit(code=code, text=wording.ended(over), cause=over.cause)
        return None
    if agent.refused:
        return Exit(code=1, text=wording.refused(agent.refused))
    if agent.leaving is not None:
        code = 128 + agent.leaving.signal if agent.leaving.signal else 1
        return Exit(code=code, text=wording.left(agent.leaving), flush_s=LAST_WORD_S)
    if trouble is not None and agent.offer is None and now >= trouble.since + STORE_GIVE_UP_S:
        return Exit(code=1, text=wording.store_hopeless(trouble.text, STORE_GIVE_UP_S), flush_s=LAST_WORD_S)
    until = alone_until(agent)
    if agent.away is None or until is None or now < until:
        return None
    if agent.done:
        return Exit(code=0, text=wording.done_alone(DONE_ALONE_S))
    return wording.abandoned(agent.config.endpoints, agent.config.join_timeout_s, agent.away.text, agent.held)


def alone_until(agent: Agent) -> float | None:
    """Return when a node without a daemon gives up waiting for one; None if it has one, or has workers to care for."""
    if agent.away is None or not agent.idle:
        return None
    return max(agent.away.since, agent.idle_at) + (DONE_ALONE_S if agent.done else agent.config.join_timeout_s)


def wakes_at(agent: Agent) -> float | None:
    """Return when the agent next needs a TimePassed, or None if only other facts move it."""
    given_up_at = _daemon_given_up_at(agent)
    instants = [] if given_up_at is None else [given_up_at]
    if not agent.idle:
        return given_up_at
    if agent.trouble is not None and agent.offer is None:
        instants.append(agent.trouble.retry_at)
    if agent.pause_until and not agent.doomed:
        instants.append(agent.pause_until)
    if isinstance(agent.over, Ended):
        instants.append(agent.over_at + agent.lease_s)
    elif (alone := alone_until(agent)) is not None:
        instants.append(alone)
    return min(instants, default=None)


def lease_ends_at(agent: Agent) -> float | None:
    """Return when the agent needs to hear that the lease ends, by CLOCK_BOOTTIME: first for the workers to be told to
    stop, then for them to be killed. None: nothing lives that has one, or all was said."""
    fence, held = agent.fence, agent.held
    if fence is None or held is None or fence.cut:
        return None
    return fence.term_at(agent.config.stop_grace_s) if held.stop_at is None else fence.kill_at()
