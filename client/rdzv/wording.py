"""The sentences a launcher says. No decisions, no I/O."""

from __future__ import annotations

from collections.abc import Mapping

from rdzv.model import Assignment, Cause, Ended, Exit, Held, LeaveAsked, Outcome, Removed, Waiting

TEXT_MAX = 8192  # bytes of one failure's text; a deep traceback fits, a dump of a tensor does not
HEAD_KEPT = 1024  # of which from the beginning; the end of a traceback says most


def cut(text: str) -> str:
    """Return the text in at most about TEXT_MAX bytes of UTF-8, saying what was left out of its middle."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= TEXT_MAX:
        return raw.decode("utf-8")
    head, tail = raw[:HEAD_KEPT], raw[len(raw) - (TEXT_MAX - HEAD_KEPT - 64) :]
    left_out = len(raw) - len(head) - len(tail)
    return f"{head.decode('utf-8', 'ignore')}\n... {left_out} bytes cut ...\n{tail.decode('utf-8', 'ignore')}"


def waiting(status: Waiting, explain: str) -> str:
    return f"waiting: {explain}" if explain else f"waiting ({status.reason.value})"


def formed(seat: Assignment) -> str:
    last = seat.first_rank + seat.slots - 1
    ranks = f"rank {seat.first_rank}" if seat.slots == 1 else f"ranks {seat.first_rank}-{last}"
    master = f"[{seat.master_addr}]" if ":" in seat.master_addr else seat.master_addr
    return (
        f"round {seat.round}: {ranks} of {seat.world_size}, node {seat.group_rank} of {seat.group_size}, "
        f"master {master}:{seat.master_port}, restart {seat.restart_count}/{seat.max_restarts}"
    )


def broke(seat: Assignment, cause: Cause) -> str:
    return f"round {seat.round} is over: {cause.text}"


def forgotten(seat: Assignment) -> str:
    return f"round {seat.round} is over: this daemon does not know it; starting over"


def left_behind(names: tuple[str, ...], kill_s: float) -> str:
    return f"waiting for processes that workers left behind: {', '.join(names)}; they are killed in {kill_s:.0f} s"


def leaving(asked: LeaveAsked, *, busy: bool) -> str:
    return f"{asked.reason}: stopping the workers and leaving" if busy else f"{asked.reason}: leaving"


def left(asked: LeaveAsked) -> str:
    return f"left the job: {asked.reason}"


def no_daemon(error: str, left_s: float) -> str:
    return f"waiting for a daemon: {error}; {max(0.0, left_s):.0f} s left"


def away_while_training(error: str, timeout_s: float | None) -> str:
    bound = "" if timeout_s is None else f" for {timeout_s:g} s at most"
    return f"the daemon is away ({error}); training goes on{bound}"


def away_while_fenced(error: str, lease_s: float) -> str:
    return (
        f"the daemon is away ({error}); the workers are stopped unless it is back within their lease of {lease_s:g} s"
    )


def lease_ends(seat: Assignment, lease_s: float, error: str) -> str:
    why = f" ({error})" if error else ""
    return (
        f"round {seat.round} is over on this node: no daemon has renewed its lease of {lease_s:g} s{why}; stopping the "
        "workers (--on-daemon-loss=stop)"
    )


def lease_ended() -> str:
    return "the lease has ended: all processes of this node were killed (--on-daemon-loss=stop)"


def daemon_given_up(endpoints: str, timeout_s: float, error: str) -> str:
    return f"no daemon at {endpoints} for {timeout_s:g} s (daemon_loss_timeout; last error: {error})"


def away_while_done(error: str, wait_s: float) -> str:
    return f"the daemon is away ({error}); all workers here have succeeded, so this node ends in {wait_s:.0f} s at most"


def done_alone(wait_s: float) -> str:
    return f"all workers of this node succeeded; no daemon to tell it to for {wait_s:.0f} s"


def store_failed(error: str) -> str:
    return f"no bootstrap store, trying again: {error}"


def store_hopeless(error: str, tried_s: float) -> str:
    return f"no bootstrap store could be opened on this host for {tried_s:.0f} s: {error}"


def own_store_lost(seat: Assignment) -> str:
    return f"round {seat.round}: this node was to host the bootstrap store, but has lost it; saying so"


def interface(variables: Mapping[str, str]) -> str:
    names, values = " and ".join(variables), ", ".join(sorted(set(variables.values())))
    return f"{names} set to {values} for the workers, as the name of this host leads to a loopback address"


def pausing(pause_s: float, times: int) -> str:
    return f"waiting {pause_s:g} s before trying again: the workers failed within a second {times} times"


def refused(text: str) -> str:
    return f"the daemon refused this node: {text}"


def removed(status: Removed) -> str:
    by = f" by {status.by}" if status.by else ""
    return f"removed from the job{by}: {status.reason}" if status.reason else f"removed from the job{by}"


def ended(status: Ended) -> str:
    why = status.cause.text if status.cause is not None else ""
    match status.outcome:
        case Outcome.SUCCEEDED:
            return "job succeeded"
        case Outcome.FAILED:
            return f"job failed: {why}" if why else "job failed"
        case Outcome.CLOSED:
            return f"job closed: {why}" if why else "job closed"


def abandoned(endpoints: str, tried_s: float, error: str, held: Held | None) -> Exit:
    """Return the end of a node that found no daemon: its own workers' failure, if there was one, says more."""
    text = (
        f"no daemon at {endpoints} for {tried_s:.0f} s (last error: {error}). "
        "Is rendezvousd running there, is the host name right, and does a firewall let this port through?"
    )
    if held is None or not held.failures:
        return Exit(code=1, text=text)
    failure = held.failures[0]
    code = 128 + failure.signal if failure.signal else failure.exit_code or 1
    cause = Cause(kind="", failure=failure, text=f"rank {failure.rank} failed")
    return Exit(code=code, text=f"rank {failure.rank} failed, and then there was {text}", cause=cause)
