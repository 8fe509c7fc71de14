"""The node: a launcher, its watchdog and a worker. How long that may live is the real arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.fence import Fence, Sendings
from rendezvousd.core.model import (
    RoundUid,
)
from tests.sim.fencing.plan import (
    HEARTBEAT_S,
    LEASE_S,
    NEVER,
    ROUND,
    STOP_GRACE_S,
    Message,
    over,
)

if TYPE_CHECKING:
    from tests.sim.fencing.world import World


class Node:
    """A launcher, its watchdog, and the worker of ROUND."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plan = world.plan
        self.clock = world.clock(world.rng.uniform(0.0, 1e4))
        self.fence = Fence(round_uid=ROUND)
        self.sendings = Sendings()
        self.stream, self.seq, self.target = 1, 0, 0
        self.was_born = False
        self.gone_at = NEVER
        self.word = "running"
        self.stopping = False
        self.fenced = False
        self.watched = NEVER  # the end of the lease, as the watchdog was told
        self.fired = False  # the watchdog: nothing is there any more that could start anything
        self.heard_at = self.now()
        self.told_s = LEASE_S
        world.at(0.0, self._dealt)

    def now(self) -> float:
        return self.clock.read(self.world.t)

    def _dealt(self) -> None:
        """The place that dealt the round came as the answer to a heartbeat that was just sent."""
        self._renew(ROUND, self.now(), LEASE_S)
        self.world.at(self.plan.born_at, self._born)
        self.world.at(0.0, self._tick)
        if self.plan.fails_at < NEVER:
            self.world.at(self.plan.fails_at, self._fails)
        if self.plan.moves_at < NEVER:
            self.world.at(self.plan.moves_at, self._move)

    def _born(self) -> None:
        if self.stopping or self.fired or self.now() >= self.fence.term_at(STOP_GRACE_S):
            if self.gone_at == NEVER:
                self.gone_at = self.world.t
            return
        self.was_born, self.gone_at = True, NEVER

    def _fails(self) -> None:
        if self.was_born and not self.stopping and self.gone_at == NEVER:
            self.word = "failed"
            self._stop(STOP_GRACE_S)

    # ------------------------------------------------------------------------------------------------ speaking

    def _tick(self) -> None:
        world = self.world
        if (t := over(world.t, self.plan.launcher_pause)) > world.t:
            world.at(t, self._tick)
            return
        if self.now() - self.heard_at > 2.2 * HEARTBEAT_S:
            self._move()
        self._say()
        world.at(self.clock.when(self.now() + HEARTBEAT_S), self._tick)

    def _say(self) -> None:
        self.seq += 1
        self.sendings.sent(self.seq, self.now())
        message = Message(self.stream, self.seq, self._word(), self.told_s)
        daemon = self.world.daemons[self.target % len(self.world.daemons)]
        self.world.carry(up=True, deliver=lambda: daemon.arrives(message))

    def _word(self) -> str:
        if self.gone_at <= self.world.t:
            return "over" if self.word == "failed" else "fenced" if self.fenced else "stopped"
        return self.word

    def _move(self) -> None:
        """Leave the stream, and open another one."""
        self.target += 1
        self.stream, self.seq, self.sendings, self.heard_at = self.stream + 1, 0, Sendings(), self.now()

    # ------------------------------------------------------------------------------------------------ hearing

    def answered(self, stream: int, seq: int, valid: RoundUid, lease_s: float) -> None:
        if (t := over(self.world.t, self.plan.launcher_pause)) > self.world.t:
            self.world.at(t, lambda: self.answered(stream, seq, valid, lease_s))
            return
        if stream != self.stream:
            return  # that stream was left
        self.heard_at, self.told_s = self.now(), lease_s
        self._check()
        sent_at = self.sendings.answered(seq)
        if sent_at is not None and not self.fenced:
            self._renew(valid, sent_at, lease_s)
        if valid != ROUND:
            self._stop(STOP_GRACE_S)

    def _renew(self, valid: RoundUid, sent_at: float, lease_s: float) -> None:
        renewed = self.fence.renewed(valid, sent_at, lease_s)
        if renewed is self.fence:
            return
        self.fence = renewed
        self.watched = renewed.until
        self.world.at(self.clock.when(self.watched), self._watchdog)
        self.world.at(self.clock.when(renewed.term_at(STOP_GRACE_S)), self._check)

    # ------------------------------------------------------------------------------------------------ stopping

    def _check(self) -> None:
        """The launcher looks whether the lease ends."""
        if (t := over(self.world.t, self.plan.launcher_pause)) > self.world.t:
            self.world.at(t, self._check)
        elif not self.stopping and self.now() >= self.fence.term_at(STOP_GRACE_S) - 1e-9:
            self.fenced = True
            self._stop(max(0.0, self.fence.kill_at() - self.now()))

    def _stop(self, grace_s: float) -> None:
        """TERM, and after the grace KILL."""
        if self.stopping:
            return
        self.stopping = True
        self.word = self.word if self.word == "failed" else "stopping"
        if self.plan.obeys:
            self.world.at(self.world.t + self.world.rng.uniform(0.0, 1.0), self._gone)
        if not self.plan.stuck:
            self.world.at(self.clock.when(self.now() + grace_s), self._kill)

    def _watchdog(self) -> None:
        if self.now() >= self.watched - 1e-9:
            self.fired = True
            self._kill()

    def _kill(self) -> None:
        self.world.at(self.world.t + self.plan.dies_after_s, self._gone)

    def _gone(self) -> None:
        if self.gone_at == NEVER:
            self.gone_at = self.world.t
            self.world.changed = True
