"""Who leads: one at a time, and never longer than anybody can be sure of."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rendezvousd.backends.etcd import EtcdBackend
from rendezvousd.backends.etcd_client import Access, EtcdClient
from rendezvousd.core.errors import NotLeader
from rendezvousd.election import TTL_S, Election, Term, boottime
from rendezvousd.etcd.v1 import etcd_pb2 as pb
from tests.etcd import Cable, Cluster, binaries, connected, etcd, until

PROGRAMS = pytest.mark.parametrize("program", binaries() or [None], ids=str)
ROOT = Path(__file__).resolve().parents[2]
LEADER = b"/rendezvousd/leader"


@dataclass(eq=False)
class Candidate:
    """A candidate in this process, which acts whenever it may."""

    name: str
    terms: list[Term] = field(default_factory=list)
    leads: bool = False
    acted: list[tuple[float, int]] = field(default_factory=list)  # when, and in which term
    began: list[tuple[float, int]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    election: Election | None = None

    async def run(self, access: Access) -> None:
        async with connected(access) as client:
            self.election = Election(client, address=self.name)
            while True:
                try:
                    async with self.election.term() as term:
                        self.terms.append(term)
                        self.began.append((boottime(), term.revision))
                        self.leads = True
                        await self._act(term)
                except NotLeader as error:
                    self.ended.append(str(error))

    async def _act(self, term: Term) -> None:
        try:
            while True:
                now = boottime()
                with contextlib.suppress(NotLeader):  # it does not look at it: the scope has to end it
                    term.check()
                    self.acted.append((now, term.revision))
                await asyncio.sleep(0.005)
        finally:
            self.leads = False


@contextlib.asynccontextmanager
async def running(candidate: Candidate, access: Access) -> AsyncIterator[Callable[[], bool]]:
    """Yields what ends it early."""
    task = asyncio.create_task(candidate.run(access))
    try:
        yield task.cancel
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def one_at_a_time(*candidates: Candidate, overlap_s: float = 0.0) -> None:
    """Nobody acted in a term of theirs after a later term had begun, and been going on for `overlap_s`."""
    began = [start for candidate in candidates for start in candidate.began]
    for candidate in candidates:
        for at, revision in candidate.acted:
            later = [start for start, other in began if other > revision]
            assert not later or at <= min(later) + overlap_s


# -------------------------------------------------------------------------------------------------------- in order


@PROGRAMS
def test_one_leads_the_others_know_it_and_follow_when_it_goes(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        a, b, c = (Candidate(name) for name in ("a:1", "b:1", "c:1"))
        async with contextlib.AsyncExitStack() as scene:
            end = await scene.enter_async_context(running(a, cluster.access()))
            await until(lambda: a.leads)
            for other in (b, c):
                await scene.enter_async_context(running(other, cluster.access()))
            await until(lambda: all(o.election is not None and o.election.leader == "a:1" for o in (a, b, c)))
            assert not b.leads
            assert not c.leads
            assert end()
            await until(lambda: b.leads or c.leads)
            leader = "b:1" if b.leads else "c:1"
            await until(lambda: all(o.election is not None and o.election.leader == leader for o in (b, c)))
        one_at_a_time(a, b, c)
        assert len(a.began) + len(b.began) + len(c.began) == 2

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_a_term_goes_on_while_etcd_confirms_it_and_counts_from_the_asking(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with connected(cluster.access()) as client:
            election = Election(client, address="a:1", ttl_s=3)
            before = boottime()
            async with election.term() as term:
                first = term.valid_until
                assert before + 3 <= first <= boottime() + 3
                await until(lambda: term.valid_until > first)
                assert term.valid_until <= boottime() + 3
                term.check()
            assert not (await client.range(LEADER)).kvs

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_two_prefixes_know_nothing_of_each_other(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with (
            connected(cluster.access()) as client,
            Election(client, address="a:1", prefix="/one/").term() as one,
            Election(client, address="b:1", prefix="/two").term() as two,
        ):
            assert (one.key, two.key) == (b"/one/leader", b"/two/leader")

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_what_goes_wrong_inside_comes_out_as_it_is(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with connected(cluster.access()) as client:
            election = Election(client, address="a:1")

            async def lead(error: Exception) -> None:
                async with election.term():
                    raise error

            for error in (NotLeader("the write was refused"), ValueError("a bug")):
                with pytest.raises(type(error), match=str(error)):
                    await lead(error)
            async with election.term() as term:
                term.check()
            with pytest.raises(NotLeader):  # though its time would not be up: the others were let in
                term.check()

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


# --------------------------------------------------------------------------------------------------- taken from it


@pytest.mark.parametrize("how", ["lease revoked", "key deleted", "key overwritten"])
def test_a_leader_whose_key_is_taken_ends_and_campaigns_again(tmp_path: Path, how: str) -> None:
    async def story(cluster: Cluster) -> None:
        a = Candidate("a:1")
        async with connected(cluster.access()) as client, running(a, cluster.access()):
            await until(lambda: a.leads)
            if how == "lease revoked":
                await client.revoke(a.terms[0].lease)
            else:
                delete = pb.RequestOp(delete_range=pb.DeleteRangeRequest(key=LEADER))
                await client.txn(pb.TxnRequest(success=[delete]))
            if how == "key overwritten":
                lease, _ = await client.grant(2)
                put = pb.RequestOp(put=pb.PutRequest(key=LEADER, value=b"b:1", lease=lease))
                await client.txn(pb.TxnRequest(success=[put]))
            await until(lambda: len(a.began) == 2)
            assert len(a.ended) == 1
            assert "no longer" in a.ended[0] or "has ended" in a.ended[0]
            with pytest.raises(NotLeader):
                a.terms[0].check()

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


@PROGRAMS
def test_a_leader_cut_off_stops_before_the_next_one_begins(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        a, b = Candidate("a:1"), Candidate("b:1")
        async with Cable(cluster.members[0].client_port) as cable:
            async with running(a, Access(endpoints=(cable.endpoint,))):
                await until(lambda: a.leads)
                async with running(b, cluster.access()):
                    cable.mute = True
                    await until(lambda: b.leads)
                    assert not a.leads, "the scope ended by itself"
                    cable.mute = False
                    cable.cut()
                    await until(lambda: a.election is not None and a.election.leader == "b:1")
            one_at_a_time(a, b)
            assert a.ended == ["etcd has not confirmed this daemon's leadership in time"]

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_while_etcd_is_away_nobody_leads_and_then_somebody_does(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        (member,) = cluster.members
        a, b = Candidate("a:1"), Candidate("b:1")
        async with running(a, cluster.access()), running(b, cluster.access()):
            for away, back in ((member.freeze, member.thaw), (member.kill, member.start)):
                await until(lambda: a.leads or b.leads)
                away()
                await until(lambda: not a.leads and not b.leads)
                back()
            await until(lambda: a.leads or b.leads)
        one_at_a_time(a, b)

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


@PROGRAMS
def test_any_member_of_etcd_may_stop_or_die(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        a, b = Candidate("a:1"), Candidate("b:1")
        async with running(a, cluster.access()), running(b, cluster.access()):
            for away, back in (("freeze", "thaw"), ("kill", "start")):
                for find in (cluster.leader, lambda: cluster.members[0]):
                    await until(lambda: a.leads or b.leads)
                    member, count = find(), len(a.acted) + len(b.acted)
                    getattr(member, away)()
                    await until(lambda count=count: len(a.acted) + len(b.acted) > count + 600)  # type: ignore[misc]
                    getattr(member, back)()
                    await until(member.answers)
        # A member that was stuck ends leases that were renewed with another one meanwhile (in etcd before 3.4.31 and
        # 3.5.13), and so lets the next leader in early. Its predecessor's writes are refused all the same.
        one_at_a_time(a, b, overlap_s=TTL_S)

    with etcd(tmp_path, members=3, program=program) as cluster:
        asyncio.run(story(cluster))


def test_an_election_whose_answer_was_lost_is_recognized(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        a, losses = Candidate("a:1"), 0

        def lose(answer: bytes) -> bool:
            nonlocal losses
            elected = b"\x10\x01\x1a" in answer and losses == 0  # a TxnResponse that succeeded, with its responses
            losses += elected
            return elected

        async with Cable(cluster.members[0].client_port) as cable, connected(cluster.access()) as client:
            cable.loses = lose
            async with running(a, Access(endpoints=(cable.endpoint,))):
                await until(lambda: a.leads)
                assert losses == 1
                (key,) = (await client.range(LEADER)).kvs
                assert (key.create_revision, key.version, key.lease) == (a.terms[0].revision, 1, a.terms[0].lease)
                backend = EtcdBackend(client, a.terms[0])
                assert await backend.load(0.0) == []

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


# ------------------------------------------------------------------------------------------------------ real deaths


class Probe:
    """A candidate in a process of its own (election_probe.py)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[list[str]] = []

    async def listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.said.append(line.decode().split())

    def times(self, what: str) -> list[float]:
        return [float(words[1]) for words in self.said if words[0] == what]


@contextlib.asynccontextmanager
async def probe(cluster: Cluster, name: str) -> AsyncIterator[Probe]:
    program = [sys.executable, "-m", "tests.wire.election_probe", cluster.endpoints[0], name]
    process = await asyncio.create_subprocess_exec(*program, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    made = Probe(process)
    listening = asyncio.create_task(made.listen())
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()
        await listening


@PROGRAMS
def test_a_killed_leader_is_followed(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        async with probe(cluster, "a:1") as a:
            await until(lambda: bool(a.times("acts")))
            async with probe(cluster, "b:1") as b:
                a.process.kill()
                await until(lambda: bool(b.times("acts")))
                assert a.times("acts")[-1] < b.times("leads")[0]

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_a_leader_stopped_past_its_term_says_nothing_when_it_goes_on(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with probe(cluster, "a:1") as a:
            await until(lambda: bool(a.times("acts")))
            async with probe(cluster, "b:1") as b:
                a.process.send_signal(signal.SIGSTOP)
                await until(lambda: bool(b.times("acts")))
                a.process.send_signal(signal.SIGCONT)
                await until(lambda: bool(a.times("ended")))
                assert a.times("acts")[-1] < b.times("leads")[0]
                b.process.kill()
                await until(lambda: len(a.times("leads")) == 2)

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


def test_a_candidate_whose_lease_ran_out_before_it_could_use_it_stands_again(tmp_path: Path) -> None:
    class Sleepy(EtcdClient):
        """Sleeps once, between its look at the leader's key and its hand on it, until its lease is over."""

        slept = False

        async def txn(self, request: pb.TxnRequest) -> pb.TxnResponse:
            if not self.slept:
                self.slept = True
                await self.revoke(request.success[0].put.lease)
            return await super().txn(request)

    async def story(cluster: Cluster) -> None:
        client = Sleepy(cluster.access())
        try:
            async with Election(client, address="a:1").term() as term:
                assert client.slept
                term.check()
        finally:
            await client.close()

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))
