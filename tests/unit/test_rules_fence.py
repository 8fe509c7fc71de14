"""Nobody takes the place of workers that may still live: the stories of --on-daemon-loss=stop."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rendezvousd.core.codec import dump, load
from rendezvousd.core.errors import BadRequest
from rendezvousd.core.machine import wakes_at
from rendezvousd.core.model import CauseKind, OnDaemonLoss, Phase
from rendezvousd.core.rules.admit import found
from rendezvousd.core.rules.fence import CLOCK_RATE, bound_s, lease_min_s
from rendezvousd.core.settings import Limits, Timing
from rendezvousd.election import takeover_s
from rendezvousd.rpc.convert import read_spec
from rendezvousd.v1 import rendezvous_pb2 as pb
from tests.stage import Player, Stage, job_spec

LEASE_S = Timing().lease_s
BOUND_S = bound_s(LEASE_S, Timing().kill_s)
SOON_S = 0.01


def stopping(nnodes: str = "1:2") -> Stage:
    return Stage(nnodes, on_daemon_loss=OnDaemonLoss.STOP)


def cut_off(stage: Stage, player: Player, silent_s: float) -> None:
    """The player neither hears nor is heard for so long, and is lost by that."""
    player.cut = True
    stage.wait(silent_s)
    stage.lose(player, silent_s=silent_s, why=f"silent for {silent_s:g} s")


def test_a_lost_node_s_place_is_taken_when_its_workers_must_be_gone_and_not_before() -> None:
    stage = stopping()
    _, b = stage.run("a", "b")
    cut_off(stage, b, LEASE_S)
    assert stage.job.running is None, "the round is over at once"
    stage.play()
    stage.wait(BOUND_S - LEASE_S - SOON_S)
    stage.play()
    assert stage.job.running is None
    stage.wait(2 * SOON_S)
    stage.play()
    assert stage.roster() == ["a"]


def test_with_continue_nothing_is_waited_for() -> None:
    stage = Stage("1:2")
    _, b = stage.run("a", "b")
    cut_off(stage, b, LEASE_S)
    stage.play()
    assert stage.roster() == ["a"]


def test_a_broken_stream_proves_nothing() -> None:
    stage = stopping()
    _, b = stage.run("a", "b")
    cut_off(stage, b, 1.0)
    stage.play()
    stage.wait(BOUND_S - 1.0 - SOON_S)
    assert stage.job.running is None
    stage.wait(2 * SOON_S)
    stage.play()
    assert stage.roster() == ["a"]


def test_the_line_says_for_whom_and_how_long() -> None:
    stage = stopping()
    _, b = stage.run("a", "b")
    cut_off(stage, b, LEASE_S)
    stage.play()
    assert stage.said == (
        "workers may live on b for 2 s more: nobody has said that they have stopped (on-daemon-loss is stop); round 1 "
        "broke because node b was lost: silent for 5 s"
    )
    assert wakes_at(stage.job) is not None


def test_the_node_s_own_word_that_its_workers_have_stopped_ends_the_wait() -> None:
    stage = stopping("2")
    a, b = stage.run("a", "b")
    cut_off(stage, b, LEASE_S)
    stage.play()
    assert b.held is not None
    b.held = replace(b.held, phase=Phase.FENCED, alive=0)
    b.cut = False
    stage.play()
    assert stage.roster() == ["a", "b"]
    assert stage.job.known.restarts_used == 0
    del a


def test_a_node_that_stops_for_want_of_a_daemon_breaks_the_round_and_costs_no_restart() -> None:
    stage = stopping("2")
    _, b = stage.run("a", "b")
    assert b.held is not None
    b.held = replace(b.held, phase=Phase.FENCED, alive=0)
    stage.hear(b)
    cause = stage.round.cause
    assert cause is not None
    assert (cause.kind, cause.text) == (CauseKind.NETWORK, "node b stopped its workers because it heard no daemon")
    stage.play()
    assert stage.roster() == ["a", "b"]
    assert stage.job.known.restarts_used == 0


def test_workers_that_are_still_alive_prove_nothing() -> None:
    stage = stopping("2")
    _, b = stage.run("a", "b")
    cut_off(stage, b, LEASE_S)
    stage.hear(b)  # it has heard nothing yet, and says that its workers run
    assert stage.job.fences
    assert stage.job.running is None


def test_that_an_older_round_is_over_proves_nothing_of_the_last_one() -> None:
    stage = stopping("2")
    _, b = stage.run("a", "b")
    before = b.held
    stage.restart()
    stage.play()
    assert stage.job.running is not None
    assert before is not None
    cut_off(stage, b, LEASE_S)
    assert stage.job.fences
    b.held = replace(before, phase=Phase.STOPPED, alive=0)  # it says so before it has heard of the last one
    b.offer = None
    stage.hear(b)
    assert stage.job.fences


def test_a_member_that_was_done_leaves_nothing_behind() -> None:
    stage = stopping("2:3")
    _, b, c = stage.run("a", "b", "c")
    c.finish()
    stage.hear(c)
    cut_off(stage, c, LEASE_S)
    assert not stage.job.fences
    del b


def test_a_node_that_is_removed_while_it_is_cut_off_is_waited_for_too() -> None:
    stage = stopping()
    _, b = stage.run("a", "b")
    b.cut = True
    stage.remove(b)
    stage.wait(LEASE_S)
    stage.lose(b, silent_s=LEASE_S)
    stage.play()
    assert stage.job.running is None
    stage.wait(BOUND_S - LEASE_S + SOON_S)
    stage.play()
    assert stage.roster() == ["a"]


@pytest.mark.parametrize("overlap_s", [0.0, 2.0])
def test_a_new_leader_counts_from_when_it_alone_leads(overlap_s: float) -> None:
    stage = stopping()
    _, b = stage.run("a", "b")
    cut_off(stage, b, LEASE_S)
    stage.play()
    stage.wait(BOUND_S - LEASE_S - SOON_S)
    record = dump(stage.job)
    stage.job_or_none = load(record.head, record.parts, seed="new", now=stage.now, overlap_s=overlap_s)
    stage.wait(overlap_s + BOUND_S - SOON_S)
    stage.play()
    assert stage.job.running is None
    stage.wait(2 * SOON_S)
    stage.play()
    assert stage.roster() == ["a"]


def test_a_new_submission_waits_for_what_the_last_one_may_have_left() -> None:
    stage = Stage("1", on_daemon_loss=OnDaemonLoss.STOP, lease_intervals=20.0)
    (a,) = stage.run("a")
    cut_off(stage, a, 1.0)
    stage.spec = job_spec("1")
    (b,) = stage.enter("b")
    stage.hear(b)
    stage.wait(stage.spec.timing.recovery_s)
    stage.play()
    assert stage.job.spec.on_daemon_loss is OnDaemonLoss.CONTINUE, "it is the new job"
    assert stage.job.running is None
    stage.wait(bound_s(20.0, Timing().kill_s) - 1.0 - stage.spec.timing.recovery_s + SOON_S)
    stage.play()
    assert stage.roster() == ["b"]


def test_a_daemon_without_memory_waits_for_what_may_have_run_before_it() -> None:
    stage = stopping("1")
    stage.now = 0.5
    (a,) = stage.enter("a")
    said = a.state(stage.now)
    young = found("run", said, uid=stage.player(a.uid).uid, seed="s", now=0.5, remembers=False)  # type: ignore[arg-type]
    assert max(f.until_at for f in young.fences.values()) == pytest.approx(BOUND_S)
    assert not found("run", said, uid=a.uid, seed="s", now=BOUND_S, remembers=False).fences  # type: ignore[arg-type]
    assert not found("run", said, uid=a.uid, seed="s", now=0.5).fences  # type: ignore[arg-type]
    longer = found("run", replace(said, lease_s=50.0), uid=a.uid, seed="s", now=0.5, remembers=False)  # type: ignore[arg-type]
    assert max(f.until_at for f in longer.fences.values()) == pytest.approx(bound_s(50.0, Timing().kill_s))


def test_the_longest_lease_ever_told_counts_and_moves_the_fences_that_stand() -> None:
    stage = stopping("1:3")
    _, b, c = stage.run("a", "b", "c")
    cut_off(stage, b, LEASE_S)
    before = stage.job.fences[b.uid].until_at
    stage.deliver(replace(c.state(stage.now), lease_s=20.0))
    assert stage.job.lease_s == 20.0
    assert stage.job.fences[b.uid].until_at == pytest.approx(before + 15 * (1 + CLOCK_RATE) / (1 - CLOCK_RATE))
    stage.deliver(c.state(stage.now))
    assert stage.job.lease_s == 20.0, "it is never forgotten"


# ------------------------------------------------------------------------------------------- which leases will do


def heard_timing(lease_s: float | None, takeover: float) -> Timing:
    """The timing of a job whose nodes ask for this lease."""
    spec = pb.Spec(min_nodes=1, max_nodes=1, slots=1, on_daemon_loss=pb.ON_DAEMON_LOSS_STOP)
    if lease_s is not None:
        spec.timeouts.lease_ms = round(lease_s * 1000)
    specs = read_spec(spec, Timing(), Limits(), takeover)
    if specs.unfit:
        raise BadRequest(specs.unfit)
    return specs.job.timing


def test_without_a_lease_of_its_own_a_job_gets_one_that_outlasts_a_failover() -> None:
    assert heard_timing(None, takeover_s(2)).lease_s == pytest.approx(10.0)
    assert heard_timing(None, takeover_s(10)).lease_s == pytest.approx(31.0)
    assert heard_timing(None, 0.0).lease_s == LEASE_S


@pytest.mark.parametrize(("takeover", "edge_s"), [(takeover_s(2), 9.6), (takeover_s(5), 17.6), (0.0, 2.933)])
def test_a_lease_that_a_slow_failover_would_outlast_is_refused(takeover: float, edge_s: float) -> None:
    assert lease_min_s(Timing(), takeover) == pytest.approx(edge_s, abs=0.001)
    assert heard_timing(edge_s + 0.01, takeover).lease_s == pytest.approx(edge_s + 0.01)
    with pytest.raises(BadRequest, match=r"--on-daemon-loss=stop with a lease of .* more than .* --rdzv-conf lease="):
        heard_timing(edge_s - 0.01, takeover)


def test_the_refusal_names_the_numbers() -> None:
    with pytest.raises(BadRequest) as refused:
        heard_timing(5.0, takeover_s(2))
    assert str(refused.value) == (
        "--on-daemon-loss=stop with a lease of 5 s: it must be more than 9.6 s, or workers are stopped though a daemon "
        "comes back in time. It is 1.33 times the sum of a heartbeat of 1 s, 5 s of failover (twice --leader-ttl, and "
        "1 s to campaign), a pause of 1 s before the next call and a round trip of 0.2 s. Set --rdzv-conf lease=10 "
        "(keep_alive_interval times keep_alive_max_attempt), or leave it out, or lower the daemons' --leader-ttl"
    )
