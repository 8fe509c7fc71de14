"""What torch's launcher knows and does not pass to a rendezvous handler.

A handler is created without a word of how many workers the node has or how many restarts it may make, and it is not
told whether the agent that calls it has charged a restart to its own budget. All of this is public in torch, only not
handed over; it is found on the call stack, by type. Whoever drives a handler in another way is served without it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent
from torch.distributed.launcher.api import LaunchConfig

from rdzv.model import Assignment, Cause

log = logging.getLogger("rdzv.torchrun")

# What breaks a round without any worker's fault. Workers that die of it, in a collective, cost nobody a restart.
NOBODYS_FAULT = frozenset({"NODE_LOST", "NODE_LEFT", "NODE_REMOVED", "GROWTH", "OPERATOR"})


def torch_version() -> tuple[int, int]:
    """Return torch's major and minor version."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


def launch_config() -> Any | None:
    """Return the LaunchConfig that this call is made on behalf of, or None."""
    for frame in _callers():
        if frame.f_code.co_name == "launch_agent":
            config = frame.f_locals.get("config")
            if isinstance(config, LaunchConfig):
                return config
    return None


def run_failures() -> dict[int, Any]:
    """Return the failures, by rank, of the run that this call ends; empty if it failed of nothing, or nobody knows.

    Agents of torch 2.4 shut their rendezvous down before they raise what ended them.
    """
    for frame in _callers():
        for name in ("result", "run_result"):
            result = frame.f_locals.get(name)
            if isinstance(result, RunResult):
                return dict(result.failures)
    return {}


class Budget:
    """The restarts that torch's agent has left, as far as this node's rendezvous has a say in it."""

    def __init__(self) -> None:
        self._agent: Any | None = None
        self._left: int | None = None  # when its workers last began

    def look(self) -> bool:
        """Return whether the agent, which asks for a rendezvous now, has charged a restart since the last one."""
        self._agent = _calling_agent()
        left = getattr(self._agent, "_remaining_restarts", None)
        return left is not None and self._left is not None and left < self._left

    def settle(self, seat: Assignment, cause: Cause | None, *, charged: bool) -> None:
        """Take in why the last round broke, and which restart count the next one has."""
        agent = self._agent
        if agent is None:
            return
        if charged and cause is not None and cause.kind in NOBODYS_FAULT:
            agent._remaining_restarts += 1
            log.info("rendezvousd: the restart was not this node's fault (%s): it is not counted", cause.text)
        self._left = agent._remaining_restarts
        if _peers_meet_by_restart_count():  # which is, for torch's agent, the difference of these two
            agent.get_worker_group().spec.max_restarts = self._left + seat.restart_count


def _peers_meet_by_restart_count() -> bool:
    """Return whether workers of this torch look for each other under their agent's restart count.

    Those of 2.4 and 2.5 do. Each agent counts for itself, so that two nodes with different pasts would never meet.
    """
    module = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function of this name
    maker = getattr(module, "_create_c10d_store", None)
    code = getattr(maker, "__code__", None)
    return code is not None and "TORCHELASTIC_RESTART_COUNT" in code.co_consts


def _calling_agent() -> Any | None:
    for frame in _callers():
        found = frame.f_locals.get("self")
        if isinstance(found, SimpleElasticAgent):
            return found
    return None


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
