"""Messages in short, for a run's history."""

from __future__ import annotations

from typing import Any

from rendezvousd.v1 import rendezvous_pb2 as pb


def state_text(state: Any) -> str:
    parts = [f"(stream {state.stream_no})"]
    if state.HasField("held"):
        held = state.held
        failures = f" failed {[f.rank for f in held.failures]}" if held.failures else ""
        trouble = " store lost" * held.store_lost + " unreachable" * held.master_unreachable
        phase = pb.HeldPhase.Name(held.phase).lower()
        parts.append(f"{phase} {held.assignment.round_uid[:6]}, {held.alive} alive{failures}{trouble}")
    if state.HasField("offer"):
        parts.append(f"offers after {state.offer.after_round_uid[:6] or 'none'}")
    if state.HasField("leaving"):
        parts.append("leaves")
    if state.outcome_seen:
        parts.append("has seen the outcome")
    return " ".join(parts)


def place_text(place: Any) -> str:
    kind = place.WhichOneof("status")
    what = str(kind)
    if kind == "assigned":
        seat = place.assigned
        what = f"node {seat.group_rank}/{seat.group_size} of {seat.round_uid[:6]} (round {seat.round})"
    elif kind == "ended":
        what = f"ended: {pb.Outcome.Name(place.ended.outcome)} may_exit={place.ended.may_exit}"
    elif kind == "removed":
        what = f"removed: {place.removed.reason}"
    valid = place.valid_round_uid[:6] or "none"
    known = place.known
    return (
        f"{what}, valid {valid}, known {known.round} {known.round_uid[:6]}, restarts {known.restarts_used}"
        f" ({place.term[:4]}.{place.revision}; {place.explain})"
    )
