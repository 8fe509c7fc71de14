"""What torch's agent calls."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from rdzv import worker
from rdzv.errors import describe_exit
from rdzv.model import Assignment, Ended, Outcome
from rdzv.plugin.agent_store import AgentStore
from rdzv.plugin.node import Node, NodeFailed
from rdzv.plugin.settings import Settings
from rdzv.plugin.stock import Budget, run_failures
from rdzv.torchrun import BACKEND

if TYPE_CHECKING:
    from rdzv.plugin.attendance import JobOver

log = logging.getLogger("rdzv.torchrun")

# The cause's kind of a job that ended because there were too few nodes for too long.
TOO_FEW = "JOIN_TIMEOUT"


class Handler(RendezvousHandler):  # type: ignore[misc]  # torch is not typed here
    """One node's rendezvous, for as long as torch's agent runs."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._node = Node(settings)
        self._budget = Budget()
        self._closed = False
        self._unheard = False  # of workers that have been started
        # An agent that ends by a signal does not shut its rendezvous down.
        self._at_end = weakref.finalize(self, self._node.leave, "its launcher ends")

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        run_id: str = self._settings.identity.run_id
        return run_id

    @property
    def use_agent_store(self) -> bool:
        """Always: each round has a store of its own, so that there is no reason to switch this off."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. Raises torch's errors, for people.

        The agent has stopped its workers. It was asked to, or, if not, one of them has failed.
        """
        from rdzv.plugin.attendance import JobOver

        if self._closed:
            raise RendezvousClosedError("this node has closed its rendezvous")
        charged = self._budget.look()
        try:
            seat, cause = self._node.next_seat()
        except JobOver as over:
            raise _error(over) from None
        except NodeFailed as problem:
            raise RendezvousStateError(str(problem)) from problem
        except BaseException:
            self._node.leave("its launcher was interrupted")
            raise
        self._budget.settle(seat, cause, charged=charged)
        self._unheard = True
        self._tell_workers(seat)
        store = AgentStore(self._node, seat, self._settings)
        where = RendezvousStoreInfo(seat.master_addr, seat.master_port)
        return RendezvousInfo(store, seat.group_rank, seat.group_size, where)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers must be stopped, for whatever reason, and the next rendezvous be joined; else 0."""
        if self._unheard:  # the agent asks only when its workers run
            self._unheard = False
            self._node.started()
        return int(self._node.must_stop)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        """This node will join no further round. The job goes on without it: no node ends it for the others."""
        self._closed = True

    def shutdown(self) -> bool:
        """Leave the job. The agent has stopped its workers, or they have ended."""
        self._closed = True
        self._node.leave(_why_it_ends())
        self._at_end.detach()
        return True

    def _tell_workers(self, seat: Assignment) -> None:
        """Let the workers, which inherit this process's environment, know what those of rdzvrun know."""
        os.environ.update(
            {
                worker.ENDPOINT: ",".join(map(str, self._settings.endpoints)),
                worker.RUN_ID: self.get_run_id(),
                worker.JOB_UID: self._node.job_uid,
                worker.ROUND: str(seat.round),
                worker.ROUND_UID: seat.round_uid,
                worker.STORE_GENERATION: seat.store_generation,
            }
        )


def _error(over: JobOver) -> BaseException:
    """Return what torch's agent is told of the end of this node's part."""
    text, how = str(over), over.over
    error: BaseException
    if isinstance(how, Ended) and how.outcome is Outcome.SUCCEEDED:
        error = _goodbye(f"{text}: this node was not needed")
    elif isinstance(how, Ended) and how.cause is not None and how.cause.kind == TOO_FEW:
        error = RendezvousTimeoutError(text)
    elif how is not None:
        error = RendezvousClosedError(text)
    else:
        error = RendezvousConnectionError(text)
    return error


def _goodbye(text: str) -> BaseException:
    """Return what ends a node with success though it ran nothing.

    torch has RendezvousGracefulExitError for it, and its launcher trips over the missing result. So where the process
    is a launcher and nothing else, it ends here; a program that launches from Python gets torch's error.
    """
    if _is_torchrun():
        log.info("rendezvousd: %s", text)
        return SystemExit(0)
    error: BaseException = RendezvousGracefulExitError(text)
    return error


def _is_torchrun() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = spec.name if spec is not None else ""
    return module in ("torch.distributed.run", "rdzv.torchrun") or Path(sys.argv[0]).name == "torchrun"


def _why_it_ends() -> str:
    """Return why the agent ends, for people: shutdown is called on the way out of whatever ended it."""
    problem = sys.exception()
    failures = getattr(problem, "failures", None) or run_failures()
    if isinstance(failures, dict) and failures:
        rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
        code = failure.exitcode
        return f"rank {rank} failed ({describe_exit(max(code, 0), max(-code, 0))}), and torchrun has given up"
    return "its workers have all ended" if problem is None else f"its launcher ends with {type(problem).__name__}"
