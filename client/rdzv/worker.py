"""What a worker process can know of the round it belongs to, from the environment its launcher gave it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

ENDPOINT = "RENDEZVOUSD_ENDPOINT"
RUN_ID = "RENDEZVOUSD_RUN_ID"
JOB_UID = "RENDEZVOUSD_JOB_UID"
ROUND = "RENDEZVOUSD_ROUND"
ROUND_UID = "RENDEZVOUSD_ROUND_UID"
STORE_GENERATION = "RENDEZVOUSD_STORE_GENERATION"


class NotAWorkerError(RuntimeError):
    """This process was not started by rdzvrun, so that its environment does not say what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a job: a set of workers with ranks."""

    number: int  # grows from round to round, also when the daemon was restarted
    uid: str  # names this round and no other
    restart_count: int  # of the job's restarts so many were used, as TORCHELASTIC_RESTART_COUNT
    max_restarts: int
    run_id: str
    job_uid: str  # differs when the run id was submitted anew


def current_round(environ: Mapping[str, str] = os.environ) -> Round:
    """Return the round this worker was started for. Raises NotAWorkerError."""
    return Round(
        number=_number(environ, ROUND),
        uid=required(environ, ROUND_UID),
        restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT"),
        max_restarts=_number(environ, "TORCHELASTIC_MAX_RESTARTS"),
        run_id=required(environ, RUN_ID),
        job_uid=required(environ, JOB_UID),
    )


def required(environ: Mapping[str, str], name: str, option: str = "") -> str:
    """Return the variable's value. Raises NotAWorkerError, with the option that could be given instead, if it is
    missing or empty."""
    value = environ.get(name)
    if not value:
        instead = f", or pass {option}=..." if option else ""
        raise NotAWorkerError(f"{name} is not set: start this with rdzvrun{instead}")
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    text = required(environ, name)
    try:
        return int(text)
    except ValueError:
        raise NotAWorkerError(f"{name}={text!r} is no number: start this with rdzvrun") from None
