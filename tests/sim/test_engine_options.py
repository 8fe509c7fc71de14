"""Each of the daemon's options at both ends of what it takes: a job runs, or the combination is refused at start."""

from __future__ import annotations

import asyncio

import pytest

from rendezvousd.backends.memory import MemoryBackend
from rendezvousd.config import OPTIONS, ConfigError, load
from rendezvousd.core.events import CloseAsked, RestartAsked
from rendezvousd.core.model import Held, JobSpec, JobUid, Known, NodeUid, OnDaemonLoss, Phase, RoundUid
from rendezvousd.core.settings import Limits, Timing
from rendezvousd.engine import Engine
from rendezvousd.rpc.convert import read_spec
from rendezvousd.rpc.rendezvous import Renderer
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.sim.test_engine import SimNode, beating
from tests.simloop import simulate

NUMBERS = [option for option in OPTIONS if option.number and option.part in ("timing", "limits")]
ENDS = ("0", "0.05", "1", "2", "16", "256", "65536", "524288", "4294967", "2147483647", "1048576")


def ends(name: str) -> list[str]:
    """Return the least and the greatest of these numbers that the option takes."""
    taken = []
    for text in sorted(ENDS, key=float):
        try:
            load([f"--{name}={text}"], {})
        except ConfigError as error:
            if str(error).startswith(f"--{name}={text}: expected"):
                continue
        taken.append(text)
    assert taken
    return [taken[0], taken[-1]]


CASES = [(option.name, text) for option in NUMBERS for text in ends(option.name)]


@pytest.mark.parametrize("stops", [False, True], ids=["continue", "stop"])
@pytest.mark.parametrize(("name", "text"), CASES, ids=[f"{name}={text}" for name, text in CASES])
def test_a_job_runs_or_the_option_is_refused_by_name(name: str, text: str, stops: bool) -> None:
    try:
        config = load([f"--{name}={text}"], {})
    except ConfigError as error:
        if name not in str(error):
            raise
        return

    async def story() -> None:
        engine = Engine(MemoryBackend(), config.timing, config.limits)
        life = asyncio.create_task(engine.run())
        renderer = Renderer(engine)
        loss = pb.ON_DAEMON_LOSS_STOP if stops else pb.ON_DAEMON_LOSS_CONTINUE
        wish = pb.Spec(min_nodes=1, max_nodes=1, slots=1, max_restarts=1, on_daemon_loss=loss)
        spec: JobSpec = read_spec(wish, engine.timing, engine.limits).job
        assert (spec.on_daemon_loss is OnDaemonLoss.STOP) == stops
        node = SimNode(engine, "a", spec=spec)

        async def play(seconds: float) -> None:
            for _ in range(int(seconds)):
                if "job" in engine.rooms:
                    node.known = node.job().known
                    pb.Place.FromString(renderer.place("job", NodeUid("a"), bytes(8)))
                round_ = node.job().running if "job" in engine.rooms else None
                if round_ is None:
                    node.held = None
                    node.offers(after=node.known.round_uid)
                else:
                    node.offer = None
                    node.held = Held(round_uid=round_.uid, round=round_.number, phase=Phase.RUNNING, alive=1)
                    node.say()
                await beating([node], 1)
            assert not life.done()
            assert not engine.unserved
            assert not any(room.trouble for room in engine.rooms.values())

        await play(60)
        if "job" in engine.rooms:  # a lease of the least length is over at once
            await engine.tell("job", RestartAsked(by="op", reason=""))
            await play(60)
            await engine.tell("job", CloseAsked(by="op", reason=""))
            node.outcome_seen = node.job().uid
            await play(3)
        await asyncio.sleep(1)
        assert not life.done()
        assert not engine.unserved
        life.cancel()

    simulate(story())


def test_what_only_this_daemons_options_stand_against_is_refused_to_new_jobs_alone() -> None:
    async def story() -> None:
        engine = Engine(MemoryBackend(), Timing(), Limits())
        life = asyncio.create_task(engine.run())
        a, b, new, old = (
            SimNode(engine, name, run_id) for name, run_id in zip("abcd", ("x", "x", "y", "z"), strict=True)
        )
        b.unfit = new.unfit = old.unfit = "its lease is too short for this daemon"
        old.known = Known(job_uid=JobUid("elder"), round=7, round_uid=RoundUid("r"), group_size=2)
        for node in (a, b, new, old):
            node.offers(after=node.known.round_uid)
            await asyncio.sleep(1)
        assert new.refused == "its lease is too short for this daemon"
        assert set(engine.rooms["x"].job.nodes) == {"a", "b"}, "it joins a job that goes on here"
        assert set(engine.rooms["z"].job.nodes) == {"d"}, "and goes on with its own on a daemon that forgot it"
        life.cancel()

    simulate(story())
