"""Who etcd lets in: tokens, passwords, and certificates, which change while the daemon runs."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rendezvousd.backends.etcd_client import Access, EtcdClient, Secrets, prefix_end
from rendezvousd.backends.etcd_errors import EtcdError, EtcdRefused, Trouble
from rendezvousd.options import EtcdOptions
from rendezvousd.terms import access
from tests.etcd import PATIENCE_S, Cable, Cluster, Member, binaries, connected, etcd, failing, put, trouble, until

PROGRAMS = pytest.mark.parametrize("program", binaries() or [None], ids=str)
PREFIX = b"/k/"


# ------------------------------------------------------------------------------------------- users and their tokens


def lock_up(member: Member) -> None:
    """Ask for passwords from now on: root may do everything, guest only read /open."""
    for name in ("root", "guest"):
        member.ask("auth/user/add", name=name, password=f"{name}'s")
        member.ask("auth/role/add", name=name)
        member.ask("auth/user/grant", user=name, role=name)
    member.ask("auth/enable")


def as_user(name: str, password: str, *endpoints: str) -> Access:
    return Access(endpoints=endpoints, user=name, secrets=lambda: Secrets(password=password))


@PROGRAMS
def test_a_token_that_has_expired_is_renewed_for_calls_leases_and_watches(tmp_path: Path, program: Path | None) -> None:
    """etcd forgets a token that nobody has used for two seconds, and its log says so."""

    def expired() -> int:
        return (tmp_path / "m0.log").read_text().count("deleted a simple token")

    async def story(cluster: Cluster) -> None:
        (member,) = cluster.members
        async with (
            Cable(member.client_port) as cable,
            connected(as_user("root", "root's", cable.endpoint)) as client,
        ):
            await client.txn(put(b"a"))  # nobody asks yet
            lock_up(member)
            lease, _ = await client.grant(300)
            await until(lambda: expired() == 1)
            assert (await client.txn(put(PREFIX + b"1"))).succeeded
            await until(lambda: expired() == 2)
            assert await client.keep_alive(lease) > 0
            await asyncio.gather(*(client.range(b"a") for _ in range(20)))
            await until(lambda: expired() == 3)  # one token was made for all twenty
            async with contextlib.aclosing(client.watch(PREFIX, prefix_end(PREFIX), after=1)) as changes:
                assert [event.kv.key for event in await anext(changes)] == [PREFIX + b"1"]
                await until(lambda: expired() == 4)
                cable.cut()
                following = asyncio.ensure_future(anext(changes))
                async with connected(as_user("root", "root's", member.endpoint)) as other:
                    await other.txn(put(PREFIX + b"2"))
                assert [event.kv.key for event in await following] == [PREFIX + b"2"]

    with etcd(tmp_path, "--auth-token-ttl=2", "--logger=zap", program=program) as cluster:
        asyncio.run(story(cluster))


@PROGRAMS
def test_a_wrong_password_none_and_a_forbidden_key_are_told_apart(tmp_path: Path, program: Path | None) -> None:
    async def story(cluster: Cluster) -> None:
        lock_up(cluster.members[0])
        for user, password, wanted in (
            ("root", "wrong", Trouble.PASSWORD),
            ("", "", Trouble.PASSWORD),
            ("guest", "guest's", Trouble.DENIED),
        ):
            async with connected(as_user(user, password, *cluster.endpoints)) as client:
                failure = await failing(client, put(b"a"))
                assert isinstance(failure, EtcdRefused)
                assert (failure.trouble, failure.passing) == (wanted, True)
                assert wanted.value in client.health.describe()
        async with connected(as_user("guest", "guest's", *cluster.endpoints)) as client:
            with pytest.raises(EtcdRefused) as caught:
                await anext(client.watch(PREFIX, after=1))
            assert caught.value.trouble is Trouble.DENIED

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster))


def test_a_password_that_is_changed_is_read_again(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        (member,) = cluster.members
        file = tmp_path / "password"
        file.write_text("wrong\n")
        options = EtcdOptions(endpoints=cluster.endpoints, user="root", password_file=str(file))
        lock_up(member)
        async with connected(access(options)) as client:
            assert (await failing(client, put(b"a"))).trouble is Trouble.PASSWORD
            file.write_text("root's\n")
            assert (await client.txn(put(b"a"))).succeeded

    with etcd(tmp_path) as cluster:
        asyncio.run(story(cluster))


# -------------------------------------------------------------------------------------------------------------- TLS


@dataclass(frozen=True)
class Authority:
    """A CA in a directory, and what it signs: NAME.pem with NAME.key."""

    directory: Path
    name: str = "ca"

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        self._openssl(f"req -x509 {_NEW} -keyout {self.name}.key -out {self.name}.pem -days 2 -subj /CN={self.name}")

    def sign(self, name: str, san: str = "IP:127.0.0.1", days: int = 2) -> Path:
        """Make a certificate that is good for both sides, and return its path without the ending."""
        (self.directory / "names").write_text(f"subjectAltName={san}\nextendedKeyUsage=serverAuth,clientAuth\n")
        ca = f"-CA {self.name}.pem -CAkey {self.name}.key -CAcreateserial"
        self._openssl(f"req {_NEW} -keyout {name}.key -out request -subj /CN={name}")
        self._openssl(f"x509 -req -in request {ca} -out {name}.pem -days {days} -extfile names")
        return self.directory / name

    @property
    def pem(self) -> Path:
        return self.directory / f"{self.name}.pem"

    def _openssl(self, command: str) -> None:
        subprocess.run(["openssl", *command.split()], cwd=self.directory, check=True, capture_output=True)


_NEW = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


def speak_tls(member: Member, certificate: Path, clients: Authority | None = None) -> None:
    """Start the member again with this certificate. `clients`: who must have signed those of its clients."""
    mine = ("--cert-file", "--key-file", "--trusted-ca-file", "--client-cert-auth", "--listen-client", "--advertise-cl")
    member.kill()
    member.options = [option for option in member.options if not option.startswith(mine)]
    member.options += [
        f"--cert-file={certificate}.pem",
        f"--key-file={certificate}.key",
        f"--listen-client-urls=https://{member.endpoint}",
        f"--advertise-client-urls=https://{member.endpoint}",
    ]
    if clients is not None:
        member.options += [f"--trusted-ca-file={clients.pem}", "--client-cert-auth"]
    member.start()


def tls_access(member: Member, ca: Path, certificate: Path | None = None) -> Access:
    cert, key = ("", "") if certificate is None else (f"{certificate}.pem", f"{certificate}.key")
    return access(EtcdOptions(endpoints=(member.endpoint,), ca=str(ca), cert=cert, key=key))


@PROGRAMS
def test_each_mistake_with_tls_is_said_in_words(tmp_path: Path, program: Path | None) -> None:
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    good, elsewhere, late = ca.sign("good"), ca.sign("elsewhere", san="DNS:elsewhere"), ca.sign("late", days=-1)
    strange = other.sign("strange")
    (tmp_path / "torn.pem").write_bytes(good.with_suffix(".pem").read_bytes())
    (tmp_path / "torn.key").write_bytes(late.with_suffix(".key").read_bytes())

    async def says(member: Member, tls: Access, words: str) -> None:
        async with connected(tls) as client:
            await trouble(client, Trouble.UNREACHABLE, words)

    async def works(member: Member, tls: Access) -> None:
        async with connected(tls) as client:
            assert (await client.persist(lambda: client.txn(put(b"a")))).succeeded

    async def story(member: Member) -> None:
        plain = Access(endpoints=(member.endpoint,))
        await says(member, tls_access(member, ca.pem), "if it speaks no TLS there, leave out --etcd-ca")
        speak_tls(member, good)
        await works(member, tls_access(member, ca.pem))
        await says(member, plain, "if it speaks TLS there, give --etcd-ca")
        await says(member, tls_access(member, other.pem), "not signed by the CA in --etcd-ca")
        await says(member, tls_access(member, ca.pem.with_suffix(".key")), "not all PEM")
        await says(member, tls_access(member, ca.pem, tmp_path / "torn"), "the key is not the certificate's")
        speak_tls(member, elsewhere)
        await says(member, tls_access(member, ca.pem), "not for the name or address that --etcd-endpoints gives")
        speak_tls(member, late)
        await says(member, tls_access(member, ca.pem), "has expired")
        speak_tls(member, good, clients=ca)
        await works(member, tls_access(member, ca.pem, good))
        await says(member, tls_access(member, ca.pem), "or asks for one: --etcd-cert and --etcd-key")
        await says(member, tls_access(member, ca.pem, strange), "refuses this daemon's certificate")
        await says(member, tls_access(member, ca.pem, late), "refuses")

    with etcd(tmp_path, program=program) as cluster:
        asyncio.run(story(cluster.members[0]))


@PROGRAMS
def test_certificates_may_be_replaced_while_the_daemon_runs(tmp_path: Path, program: Path | None) -> None:
    """Everything is new, the CA too. Half of the files are there for a time, as when they are copied one by one."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    files = tmp_path / "files"
    files.mkdir()

    def install(authority: Authority, *names: str) -> None:
        for name in names:
            (files / name).write_bytes((authority.directory / name).read_bytes())

    async def story(member: Member) -> None:
        install(old, "ca.pem", "daemon.pem", "daemon.key")
        async with connected(tls_access(member, files / "ca.pem", files / "daemon")) as client, watched(client) as seen:
            await client.persist(lambda: client.txn(put(PREFIX + b"1")))
            await until(lambda: PREFIX + b"1" in seen)
            speak_tls(member, new.directory / "etcd", clients=new)
            await trouble(client, Trouble.UNREACHABLE, "not signed by the CA in --etcd-ca")
            (files / "daemon.key").unlink()
            install(new, "ca.pem", "daemon.pem")
            for _ in range(3):
                assert isinstance(await failing(client, put(PREFIX + b"2")), EtcdError)
            install(new, "daemon.key")
            async with asyncio.timeout(PATIENCE_S):
                await client.persist(lambda: client.txn(put(PREFIX + b"2")))
            await until(lambda: PREFIX + b"2" in seen)

    for authority in (old, new):
        authority.sign("etcd")
        authority.sign("daemon")
    with etcd(tmp_path, program=program) as cluster:
        (member,) = cluster.members
        speak_tls(member, old.directory / "etcd", clients=old)
        asyncio.run(story(member))


@contextlib.asynccontextmanager
async def watched(client: EtcdClient) -> AsyncIterator[set[bytes]]:
    """The keys that a watch has seen put, growing meanwhile."""
    seen: set[bytes] = set()

    async def follow() -> None:
        async for events in client.watch(PREFIX, prefix_end(PREFIX), after=1):
            seen.update(event.kv.key for event in events)

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])
