"""`rdzv.is_current()`: whether this worker's round is still the one that runs, by the daemon's word."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rdzv import worker
from rdzv.endpoints import parse_endpoints
from rdzv.store_calls import Declined, NoAnswer, caller
from rendezvousd.v1 import store_pb2 as pb

TIMEOUT_S = 30.0  # a daemon that was killed is up again, or followed by another one, well before

_OVER = ("RoundOver", "NoSuchJob")


class DaemonUnreachableError(ConnectionError):
    """No daemon could say in time what was asked. It may be away while this round goes on, or this host cut off."""


def is_current(timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the round this worker was started for is the one that runs at this moment: to be asked before
    publishing a checkpoint. False: it is over, others may be training already, and this process is about to be stopped.

    Raises DaemonUnreachableError if no daemon can say so within `timeout_s` seconds; whether to publish all the same is
    for the caller to decide. Raises NotAWorkerError outside of rdzvrun. Needs no torch.
    """
    scope = pb.Scope(
        run_id=worker.required(environ, worker.RUN_ID),
        job_uid=worker.required(environ, worker.JOB_UID),
        round_uid=worker.required(environ, worker.ROUND_UID),
    )
    endpoints = parse_endpoints(worker.required(environ, worker.ENDPOINT))
    try:
        # of no keys: all it looks at is whether the round runs
        caller(endpoints).call("Check", pb.CheckRequest(scope=scope), pb.CheckReply, timeout_s)
    except Declined as declined:
        if declined.refusal in _OVER:
            return False
        raise DaemonUnreachableError(f"the daemon at {caller(endpoints)} does not say: {declined.text}") from None
    except NoAnswer as nobody:
        raise DaemonUnreachableError(
            f"no daemon at {caller(endpoints)} within {timeout_s:g} s (last error: {nobody.text})"
        ) from None
    return True
