"""One daemon: what it is made of, how it starts and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib.metadata
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator

import grpc

from rendezvousd.config import Address, Config, ConfigError
from rendezvousd.core.kv import KvLimits
from rendezvousd.core.settings import Limits
from rendezvousd.desk import Desk
from rendezvousd.rpc.about import About
from rendezvousd.rpc.admin import Admin
from rendezvousd.rpc.rendezvous import RendezvousStreams
from rendezvousd.rpc.server import Health, add_reflection, rendezvous_handler, server_options
from rendezvousd.rpc.store import StoreService
from rendezvousd.terms import Office, advertised, serve_terms

log = logging.getLogger(__name__)

# How long calls under way may take when the daemon ends. Streams were told to go before.
STOP_GRACE_S = 0.3
# A node needs a descriptor for its connection; below this many it is worth a warning.
DESCRIPTORS_WANTED = 4096
# Collections are rare and cheap: a stream's objects live for hours. Measured: the default makes the cost of a node grow
# with their number.
GC_THRESHOLDS = (50_000, 20, 100)
GC_FREEZE_S = 10.0  # how often what has come to stay is taken out of the collector's sight
GC_FULL_S = 600.0  # and how often all is looked at after all, so that cycles do not pile up


async def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP is noted in the log. What was ignored at the start stays so. Raises
    ConfigError if an address cannot be listened on."""
    raise_descriptor_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    handlers = {signal.SIGTERM: stop.set, signal.SIGINT: stop.set, signal.SIGHUP: _hang_up}
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            continue  # as nohup means it, and a launcher whose own daemon this is
        loop.add_signal_handler(number, handler)
    async with running(config) as addresses:
        announce(config, addresses)
        await stop.wait()
        log.info("stopping")


def _hang_up() -> None:
    log.info("got SIGHUP: there are no files to read again; the daemon goes on")


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[list[Address]]:
    """Run a daemon in this scope; yields the addresses it listens on."""
    desk, health = Desk(), Health()
    streams, store = RendezvousStreams(desk), StoreService(desk, _store_limits(config.limits))
    about = About(desk, config.backend)
    server = grpc.aio.server(options=server_options(config.limits))
    server.add_generic_rpc_handlers((rendezvous_handler(streams, Admin(desk), about), store.handler()))
    health.add_to(server)
    add_reflection(server)
    addresses = [_bind(server, address) for address in config.listen]
    office = Office(desk, streams, store, health)
    await health.begin()
    await server.start()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(serve_terms(config, office, advertised(config, addresses))),
                group.create_task(_keep_collector_away()),
            ]
            try:
                yield addresses
            finally:
                for task in tasks:
                    task.cancel()  # a closing daemon judges nobody
    finally:
        await server.stop(STOP_GRACE_S)


def _store_limits(limits: Limits) -> KvLimits:
    return KvLimits(
        key_bytes=limits.store_key_bytes,
        value_bytes=limits.store_value_bytes,
        keys=limits.store_keys,
        total_bytes=limits.store_bytes,
    )


def announce(config: Config, addresses: list[Address]) -> None:
    """Say that the daemon serves: a line for people, the bound addresses for whoever holds the ready descriptor."""
    version = importlib.metadata.version("rendezvousd")
    where = ", ".join(str(address) for address in addresses)
    print(f"rendezvousd {version} serves on {where} ({config.backend})", flush=True)  # noqa: T201
    if config.ready_fd is not None:
        with os.fdopen(config.ready_fd, "w") as ready:
            ready.writelines(f"{address}\n" for address in addresses)


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the hard limit does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_WANTED:
        log.warning("only %d file descriptors are allowed (ulimit -Hn): that many nodes at most can connect", hard)


def _bind(server: grpc.aio.Server, address: Address) -> Address:
    """Listen on the address, or on IPv4 only where `::` was asked for and IPv6 is off. Raises ConfigError."""
    if address.host == "::" and not _has_ipv6():
        address = Address("0.0.0.0", address.port)
    _try_bind(address)  # gRPC does not say why it fails
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError as exc:
        raise ConfigError(f"cannot listen on {address}: {exc}") from exc
    return Address(address.host, port)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _try_bind(address: Address) -> None:
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as exc:
        raise ConfigError(f"cannot listen on {address}: {exc.strerror}") from exc
    family, kind, protocol, _, where = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
            probe.listen()  # on Linux, two listeners are told apart only here
        except OSError as exc:
            hint = {
                errno.EADDRINUSE: "; is another rendezvousd running? Choose another port with --listen",
                errno.EADDRNOTAVAIL: "; it is no address of this host",
                errno.EACCES: "; ports below 1024 need privileges",
            }.get(exc.errno or 0, "")
            raise ConfigError(f"cannot listen on {address}: {os.strerror(exc.errno or 0)}{hint}") from exc


async def _keep_collector_away() -> None:
    """Keep garbage collection off the paths that nodes wait for."""
    gc.set_threshold(*GC_THRESHOLDS)
    gc.freeze()
    loop = asyncio.get_running_loop()
    full_at = loop.time() + GC_FULL_S
    while True:
        await asyncio.sleep(GC_FREEZE_S)
        if loop.time() >= full_at:
            gc.unfreeze()
            gc.collect()
            full_at = loop.time() + GC_FULL_S
        gc.freeze()
