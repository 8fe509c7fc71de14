"""Terms of service: with its state in memory a daemon has one, with etcd one for each time that it leads.

What belongs to a term lives in it and ends with it: the engine, the streams of nodes, the contents of the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rendezvousd.backends.base import Stores
from rendezvousd.backends.etcd import EtcdBackend
from rendezvousd.backends.etcd_client import Access, EtcdClient, Secrets
from rendezvousd.backends.etcd_store import EtcdStores
from rendezvousd.backends.memory import MemoryBackend
from rendezvousd.config import Address, Config, ConfigError, EtcdOptions
from rendezvousd.core.errors import NotLeader
from rendezvousd.core.rules.fence import overlap_s
from rendezvousd.desk import Desk
from rendezvousd.election import Election, takeover_s
from rendezvousd.engine import Engine, Shared
from rendezvousd.rpc.rendezvous import RendezvousStreams
from rendezvousd.rpc.server import Health
from rendezvousd.rpc.store import StoreService

log = logging.getLogger(__name__)

WILDCARDS = ("::", "0.0.0.0")
CLOSING = "the daemon is shutting down"


@dataclass(frozen=True, slots=True)
class Office:
    """What outlasts a term."""

    desk: Desk
    streams: RendezvousStreams
    store: StoreService
    health: Health


async def serve_terms(config: Config, office: Office, address: str) -> None:
    """Serve term after term until cancelled. `address` is where the others send their callers while this one leads."""
    if config.backend == "memory":
        async with _attending(office, Engine(MemoryBackend(), config.timing, config.limits), None) as engine:
            await engine.run()
    else:
        await _serve_elected(config, office, address)


async def _serve_elected(config: Config, office: Office, address: str) -> None:
    etcd = config.etcd
    client = EtcdClient(access(etcd))
    try:
        election = Election(client, address=address, prefix=etcd.prefix, ttl_s=etcd.leader_ttl_s)
        office.desk.share(shared_id(config), lambda: election.leader, client.health.describe)
        while True:
            try:
                office.desk.close("no daemon leads yet")
                async with election.term() as term:
                    backend = EtcdBackend(client, term, etcd.prefix)
                    shared = Shared(
                        daemon_id=shared_id(config),
                        takeover_s=takeover_s(etcd.leader_ttl_s),
                        check_lead=term.check,
                        trouble=client.health.describe,
                    )
                    engine = Engine(backend, config.timing, config.limits, shared)
                    stores = EtcdStores(client, term, etcd.prefix)
                    now = engine.clock.now()
                    found = await backend.load(now, overlap_s(etcd.leader_ttl_s))
                    if not backend.unreadable:  # a record that nobody reads does not tell whose stores are its job's
                        await stores.sweep(stored.job.uid for stored in found)
                    for run_id, problem in backend.unreadable.items():
                        engine.set_aside(run_id, problem)
                    for stored in found:
                        engine.take_over(stored.job, stored.revision, now)
                    term.check()
                    async with _attending(office, engine, stores):
                        await engine.run()
            except NotLeader as reason:
                log.warning("leads no longer: %s", reason)
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # the term ended at that moment, and has forgotten it
                    raise asyncio.CancelledError from reason
    finally:
        await client.close()


@asynccontextmanager
async def _attending(office: Office, engine: Engine, stores: Stores | None) -> AsyncIterator[Engine]:
    """Attend nodes in this scope."""
    why = CLOSING
    office.store.open(stores)
    engine.add_namespaces(office.store)
    office.desk.open(engine)
    await office.health.set(serving=True)
    try:
        yield engine
    except BaseException:  # mostly a cancellation, also where the term is what ends
        try:
            engine.check_lead()
        except NotLeader as reason:
            why = f"this daemon no longer leads: {reason}"
        raise
    finally:
        office.desk.close(why)
        office.store.close(NotLeader(why))
        await office.health.set(serving=False)
        await office.streams.end_all(why)


def access(etcd: EtcdOptions) -> Access:
    """Return how to get at etcd. Raises ConfigError if a file cannot be read."""

    def read(path: str) -> bytes | None:
        return Path(path).read_bytes() if path else None

    def secrets() -> Secrets:
        password = read(etcd.password_file)
        return Secrets(
            ca=read(etcd.ca),
            cert=read(etcd.cert),
            key=read(etcd.key),
            password="" if password is None else password.decode().strip(),
        )

    try:
        secrets()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read what etcd wants to know: {error}") from error
    return Access(endpoints=etcd.endpoints, tls=bool(etcd.ca or etcd.cert), user=etcd.user, secrets=secrets)


def shared_id(config: Config) -> str:
    """Return what all daemons on the same etcd prefix call themselves, so that nodes take them for one."""
    return "etcd-" + hashlib.blake2b(config.etcd.prefix.encode(), digest_size=6).hexdigest()


def advertised(config: Config, bound: list[Address]) -> str:
    """Return the address by which nodes reach this daemon, as well as it can tell."""
    first = bound[0]
    if config.advertise:
        return config.advertise
    host = socket.gethostname() if first.host in WILDCARDS else first.host
    return str(Address(host, first.port))
