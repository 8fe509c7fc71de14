"""Jobs kept in etcd, written by one leader at a time.

    <prefix>/leader                                  who leads (election.py)
    <prefix>/jobs/<run id>/head                      one line of JSON on the record, then the job's head (core/codec.py)
    <prefix>/jobs/<run id>/parts/<name>@<generation> the rest
    <prefix>/stores/                                 what jobs keep in the store (etcd_store.py)

A write is one transaction if it fits into one. If not, it first puts the parts that are new, as another generation
beside the old one, and then the head that names them; what no head names does not exist. Every transaction compares the
leader's key, so that a deposed leader's late one is refused, and the head's revision. So it may be tried again when
nobody knows what became of it: the head carries a random word of its writer, by which a success that was not heard of
is recognized.

A record that cannot be read stays as it is, and its run id gets no job: `unreadable`.
"""

from __future__ import annotations

import logging
import secrets
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rendezvousd.backends.etcd_client import EtcdClient, prefix_end
from rendezvousd.backends.etcd_errors import EtcdCompacted
from rendezvousd.core import codec, records
from rendezvousd.core.errors import NotLeader
from rendezvousd.core.model import Job
from rendezvousd.etcd.v1 import etcd_pb2 as pb

log = logging.getLogger(__name__)

DEFAULT_PREFIX = "/rendezvousd"
FORMAT = (1, 0)  # of the head's first line and the keys: major and minor, as of a record (core/records.py)
# etcd takes 128 operations a transaction by default; the head, and what an operator may have lowered, have room.
OPERATIONS_MAX = 100
# etcd takes requests of 1.5 MB by default. Two parts of the greatest length fit, and a head of at most some 20 KB.
BYTES_MAX = 1 << 20
# Keys read at a time: usual parts are 10 KB, so some megabytes an answer.
PAGE = 256


class Fence(Protocol):
    """A term of leadership, as far as a write must know it (election.Term)."""

    @property
    def key(self) -> bytes: ...

    @property
    def revision(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A job as it was found, and the revision of its record."""

    job: Job
    revision: int


@dataclass(slots=True)
class _Kept:
    """What is known of a record in etcd: which generation of each part it consists of, and what it says."""

    revision: int = 0
    generation: int = 0
    generations: Mapping[str, int] = field(default_factory=dict)  # by name of the part
    parts: Mapping[str, bytes] = field(default_factory=dict)
    record: codec.Record | None = None  # None: not written by this daemon yet
    unknown: records.Unknown | None = None  # of a record that a newer daemon wrote
    line: Mapping[str, Any] = field(default_factory=dict)  # the head's first line, with what is not known of it


class EtcdBackend:
    """The records as one leader sees them; to be made anew for each term. `load` comes first.

    While etcd is away a call waits, trying again with bounded pauses; `client.health` says why.
    """

    def __init__(self, client: EtcdClient, fence: Fence, prefix: str = DEFAULT_PREFIX) -> None:
        self._client = client
        self._fence = fence
        self._jobs = f"{prefix.rstrip('/')}/jobs/".encode()
        self._kept: dict[str, _Kept] = {}
        self.unreadable: dict[str, str] = {}  # by run id: why `load` left its record alone, and what to do

    # ---------------------------------------------------------------------------------------------------- reading

    async def load(self, now: float, overlap_s: float = 0.0) -> list[Stored]:
        """Return all jobs, their timers armed afresh at `now`, and remove what failed writes have left. `overlap_s`:
        for so long the leader before may take itself for one.

        To be called once this daemon leads: then no other can write any more. A record that cannot be read is left as
        it is; see `unreadable`. Raises NotLeader.
        """
        found: list[Stored] = []
        for base, values in (await self._client.persist(self._read_all)).items():
            revision, named = 0, {b"head"}
            if (head := values.get(b"head")) is not None:
                try:
                    stored, parts = self._read(base, head, values, now, overlap_s)
                except records.RecordError as error:
                    self._set_aside(base, error)
                    continue
                found.append(stored)
                revision, named = stored.revision, named | parts
            await self._remove(base, [base + name for name in values if name not in named], revision)
        return found

    def _set_aside(self, base: bytes, error: records.RecordError) -> None:
        run_id = urllib.parse.unquote_to_bytes(base.removeprefix(self._jobs)[:-1]).decode(errors="replace")
        key = (base + b"head").decode(errors="replace")
        text = (
            f"the record of job {run_id!r} at {key} cannot be read: {error}. The job is not served. Run a daemon that "
            f"reads this record, or remove the keys below {base.decode(errors='replace')} and restart the daemon"
        )
        self.unreadable[run_id] = text
        log.error("%s", text, extra={"run_id": run_id})

    async def _read_all(self) -> dict[bytes, dict[bytes, pb.KeyValue]]:
        """Return all keys, by job and name within it, as of one revision. Raises EtcdError."""
        found: dict[bytes, dict[bytes, pb.KeyValue]] = {}
        start, end, revision = self._jobs, prefix_end(self._jobs), 0
        while True:
            try:
                page = await self._client.range(start, end, limit=PAGE, revision=revision)
            except EtcdCompacted:  # between two pages; so much was written meanwhile
                found, start, revision = {}, self._jobs, 0
                continue
            revision = revision or page.header.revision
            for kv in page.kvs:
                run_id, _, name = kv.key.removeprefix(self._jobs).partition(b"/")
                found.setdefault(self._jobs + run_id + b"/", {})[name] = kv
            if not page.more:
                return found
            start = page.kvs[-1].key + b"\0"

    def _read(
        self, base: bytes, head: pb.KeyValue, values: Mapping[bytes, pb.KeyValue], now: float, overlap_s: float
    ) -> tuple[Stored, set[bytes]]:
        """Return a job, and the names within its keys of the parts that it consists of."""
        try:
            line, job_head = _parse(head.value)
            generations: dict[str, int] = line["parts"]
            names = {name: _part_name(name, generation) for name, generation in generations.items()}
            parts = {name: values[within].value for name, within in names.items()}
            job = codec.load(job_head, parts, seed=secrets.token_hex(16), now=now, overlap_s=overlap_s)
            if self._base(job.run_id) != base:
                raise records.RecordError(f"it is of job {job.run_id!r}")
            kept = _Kept(
                revision=head.mod_revision,
                generation=line["generation"],
                generations=generations,
                parts=parts,
                unknown=records.find_unknown(job_head, parts),
                line=line,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise records.RecordError(f"it is damaged: {type(error).__name__}: {error}") from error
        self._kept[job.run_id] = kept
        return Stored(job, head.mod_revision), set(names.values())

    # ---------------------------------------------------------------------------------------------------- writing

    async def write(self, job: Job, *, expected: int) -> int:
        """As Backend.write. A job that differs only in what is not stored costs nothing."""
        kept = self._kept.get(job.run_id, _Kept())
        if kept.revision != expected:
            raise NotLeader(f"the record of job {job.run_id!r} is at revision {kept.revision}, not {expected}")
        record = codec.dump(job, kept.record, kept.unknown)
        changed = [name for name, data in record.parts.items() if kept.parts.get(name) != data]
        if not changed and kept.record is not None and _names_and_head(record) == _names_and_head(kept.record):
            kept.record = record
            return expected
        generation = kept.generation + 1
        generations = {name: kept.generations.get(name, generation) for name in record.parts}
        at_once = _fits([record.parts[name] for name in changed])
        if not at_once:  # beside what is there, which still is the record
            generations.update(dict.fromkeys(changed, generation))
        base = self._base(job.run_id)
        puts = [to_put(base + _part_name(name, generations[name]), record.parts[name]) for name in changed]
        old = [base + _part_name(name, at) for name, at in kept.generations.items() if generations.get(name) != at]
        if not at_once:
            for batch in _batches(puts):
                await self._guarded(base, batch, expected)
            puts = []
        writer = secrets.token_hex(8)
        version = (FORMAT[0], max(FORMAT[1], kept.line.get("format", FORMAT)[1]))
        line = {**kept.line, "format": version, "writer": writer, "generation": generation, "parts": generations}
        head = msgspec.json.encode(line) + b"\n" + record.head
        room = OPERATIONS_MAX - len(puts) - 1
        operations = [to_put(base + b"head", head), *puts, *map(to_delete, old[:room])]
        revision = await self._replace(base, writer, operations, expected)
        self._kept[job.run_id] = _Kept(revision, generation, generations, record.parts, record, kept.unknown, kept.line)
        await self._remove(base, old[room:], revision)
        return revision

    async def delete(self, run_id: str, *, expected: int) -> None:
        """As Backend.delete. Everything below the job's key goes."""
        base = self._base(run_id)
        request = self._request(base, [to_delete(base, prefix_end(base))], expected)

        async def attempt() -> None:
            answer = await self._client.txn(request)
            if not answer.succeeded and (head := self._head_if_leading(answer)) is not None:
                raise _moved(base, head, expected)

        await self._client.persist(attempt)
        self._kept.pop(run_id, None)

    async def _replace(self, base: bytes, writer: str, operations: list[Any], expected: int) -> int:
        """Write a head, and what belongs to it, at once, and return the head's new revision. Raises NotLeader."""
        request = self._request(base, operations, expected)

        async def attempt() -> int:
            answer = await self._client.txn(request)
            if answer.succeeded:
                return answer.header.revision
            head = self._head_if_leading(answer)
            if head is not None and _writer(head.value) == writer:
                return head.mod_revision  # an earlier attempt was carried out, and its answer was lost
            raise _moved(base, head, expected)

        return await self._client.persist(attempt)

    async def _remove(self, base: bytes, keys: list[bytes], revision: int) -> None:
        for at in range(0, len(keys), OPERATIONS_MAX):
            await self._guarded(base, [to_delete(key) for key in keys[at : at + OPERATIONS_MAX]], revision)

    async def _guarded(self, base: bytes, operations: list[Any], revision: int) -> None:
        """Carry out what may be carried out twice, while the head is at this revision. Raises NotLeader."""
        request = self._request(base, operations, revision)

        async def attempt() -> None:
            answer = await self._client.txn(request)
            if not answer.succeeded:
                raise _moved(base, self._head_if_leading(answer), revision)

        await self._client.persist(attempt)

    def _request(self, base: bytes, operations: list[Any], revision: int) -> pb.TxnRequest:
        """Return the transaction that does this if this daemon leads and the head is at this revision (0: absent), and
        otherwise tells who leads and what the head is."""
        look = [pb.RequestOp(range=pb.RangeRequest(key=key)) for key in (self._fence.key, base + b"head")]
        return pb.TxnRequest(
            compare=[leads(self._fence), _at(base + b"head", revision)], success=operations, failure=look
        )

    def _head_if_leading(self, answer: pb.TxnResponse) -> pb.KeyValue | None:
        """Return the head that was found instead, None if there is none. Raises NotLeader."""
        leader, head = (response.range.kvs for response in answer.responses)
        if not leader or leader[0].create_revision != self._fence.revision:
            raise deposed()
        return head[0] if head else None

    def _base(self, run_id: str) -> bytes:
        """Return what the job's keys begin with. Escaped, so that `a` and `a/1` are strangers."""
        return self._jobs + urllib.parse.quote(run_id, safe="").encode() + b"/"


def leads(fence: Fence) -> Any:
    """Return the comparison that this daemon leads."""
    return pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.CREATE, key=fence.key, create_revision=fence.revision)


def deposed() -> NotLeader:
    return NotLeader("another daemon leads, or none; this one's late write was refused")


def _moved(base: bytes, head: pb.KeyValue | None, expected: int) -> NotLeader:
    at = 0 if head is None else head.mod_revision
    return NotLeader(f"the record at {base.decode()} is at revision {at}, not {expected}")


def _names_and_head(record: codec.Record) -> tuple[bytes, Any]:
    return record.head, record.parts.keys()


def _parse(value: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the line on the record, and the job's head. Raises ValueError, records.RecordError."""
    line, _, head = value.partition(b"\n")
    parsed: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    records.check_version("format", parsed.get("format"), FORMAT[0])
    return parsed, head


def _writer(value: bytes) -> Any:
    """Return who wrote a head; None where it is not one that this daemon reads."""
    try:
        return _parse(value)[0].get("writer")
    except (ValueError, records.RecordError):
        return None


def _fits(parts: list[bytes]) -> bool:
    """Return whether one transaction may write so much, a head, and remove as many others."""
    return len(parts) < OPERATIONS_MAX // 2 and sum(map(len, parts)) <= BYTES_MAX


def _part_name(name: str, generation: int) -> bytes:
    return f"parts/{name}@{generation}".encode()


def _batches(puts: Iterable[Any]) -> list[list[Any]]:
    """Return the puts in batches that fit into a transaction each."""
    batches: list[list[Any]] = [[]]
    size = 0
    for put in puts:
        length = len(put.put.key) + len(put.put.value)
        if size + length > BYTES_MAX or len(batches[-1]) >= OPERATIONS_MAX:
            batches.append([])
            size = 0
        batches[-1].append(put)
        size += length
    return batches


def to_put(key: bytes, value: bytes) -> Any:
    return pb.RequestOp(put=pb.PutRequest(key=key, value=value))


def to_delete(key: bytes, end: bytes = b"") -> Any:
    return pb.RequestOp(delete_range=pb.DeleteRangeRequest(key=key, range_end=end))


def _at(key: bytes, revision: int) -> Any:
    """Return the comparison that the key was last changed at this revision; 0: it is absent."""
    return pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=key, mod_revision=revision)
