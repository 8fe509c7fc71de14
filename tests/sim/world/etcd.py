"""An etcd cluster without its inside: one history of revisions, transactions, leases and watches, at several endpoints.

It keeps the promises that etcd makes and no more: a request whose answer is lost may have been carried out, or still
will be; a member cut off from the others answers what needs no agreement; a lease may live longer than asked, never
shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from rendezvousd.etcd.v1 import etcd_pb2 as pb
from tests.sim.world.machines import World
from tests.sim.world.network import CONNECTED, DATA, GONE, STATUS, End, Item, Network, Stream

PORT = 2379
KV, LEASE = "/etcdserverpb.KV/", "/etcdserverpb.Lease/"
# Of one request, and of a transaction's operations: as etcd has it by default.
BYTES_MAX = 1_500_000
OPERATIONS_MAX = 128
COMPACTED = "etcdserver: mvcc: required revision has been compacted"
SMALL_BYTES_MAX = 60_000  # of one request, where it takes smaller ones only
COMPACTS_S = 0.2
LATE_S = (0.0, 4.0)  # how late an etcd in trouble carries out what it has taken


@dataclass
class Lease:
    ttl_s: int
    until: float
    keys: set[bytes] = field(default_factory=set)


class Etcd:
    def __init__(self, world: World, net: Network, members: int) -> None:
        self.world, self.net = world, net
        self.members = [f"e{i}" for i in range(members)]
        self.revision = 1
        self.kvs: dict[bytes, Any] = {}
        self.leases: dict[int, Lease] = {}
        self.events: list[Any] = []
        self.watches: list[tuple[Member, bytes, bytes]] = []
        self.on_write: Callable[[bytes, bytes], None] = lambda key, value: None
        self.alone: dict[str, float] = {}  # members cut off from the others, until when
        self.leaderless_until = -1.0
        self.late_until = -1.0  # requests are carried out late, and answers are lost
        self.compacted = 0  # the newest revision that cannot be read any more
        self.compacts = False  # every few seconds it forgets all but the newest
        self._compacts_at = 0.0
        self._operations_max, self._bytes_max = OPERATIONS_MAX, BYTES_MAX
        self._chance = world.random("etcd")
        self._lease = 1000
        for member in self.members:
            net.listeners[f"{member}:{PORT}"] = _Listener(self, member)

    def limit(self, operations_max: int) -> None:
        """Take smaller requests only; 0: as by default."""
        if operations_max:
            self._operations_max, self._bytes_max = operations_max, SMALL_BYTES_MAX

    # ----------------------------------------------------------------------------------------------- its troubles

    def lose_leader(self, seconds: float) -> None:
        """The members choose a leader anew; a new leader lets all leases live on for their time."""
        self.leaderless_until = self.world.now + seconds
        self.world.after(seconds, self._new_leader)

    def _new_leader(self) -> None:
        for number, lease in self.leases.items():
            self._prolong(number, lease)

    def heal(self) -> None:
        self.alone.clear()
        self.leaderless_until = min(self.leaderless_until, self.world.now)
        self.late_until = min(self.late_until, self.world.now)

    def is_alone(self, member: str) -> bool:
        return self.world.now < self.alone.get(member, -1.0)

    # ------------------------------------------------------------------------------------------------- requests

    def request(self, end: Member, path: str, data: bytes) -> None:
        """Take one request of a member's client."""
        method = path.rpartition("/")[2]
        now = self.world.now
        if method == "Status":
            leader = 0 if now < self.leaderless_until or self.is_alone(end.machine) else 1
            end.answer(pb.StatusResponse(version="3.5", leader=leader))
        elif method == "LeaseKeepAlive" and self.is_alone(end.machine):
            lease = self.leases.get(request := pb.LeaseKeepAliveRequest.FromString(data).id)
            end.answer(pb.LeaseKeepAliveResponse(id=request, ttl=lease.ttl_s if lease is not None else 0), last=False)
        elif now < self.leaderless_until or self.is_alone(end.machine):
            if self._chance.random() < 0.5:
                end.refuse(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
            elif self._chance.random() < 0.5 and not self.is_alone(end.machine):
                self.world.after(self._chance.uniform(*LATE_S), self._carry_out, end, method, data)
        elif now < self.late_until:
            if self._chance.random() < 0.5:
                end.mute = True  # it is carried out, and nobody hears of it
            self.world.after(self._chance.uniform(*LATE_S) ** 2 / LATE_S[1], self._carry_out, end, method, data)
        else:
            self._carry_out(end, method, data)

    def _carry_out(self, end: Member, method: str, data: bytes) -> None:
        if self.world.over:
            return
        self._compact()
        if len(data) > self._bytes_max:
            end.refuse(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large")
        else:
            getattr(self, f"_do_{method.lower()}")(end, data)

    def _compact(self) -> None:
        if self.compacts and self.world.now >= self._compacts_at:
            self._compacts_at = self.world.now + COMPACTS_S
            self.compacted = self.revision - 1

    def _do_range(self, end: Member, data: bytes) -> None:
        request = pb.RangeRequest.FromString(data)
        if 0 < request.revision <= self.compacted:
            end.refuse(grpc.StatusCode.OUT_OF_RANGE, COMPACTED)
        else:
            end.answer(self._range(request))

    def _do_txn(self, end: Member, data: bytes) -> None:
        request = pb.TxnRequest.FromString(data)
        if max(len(request.compare), len(request.success), len(request.failure)) > self._operations_max:
            end.refuse(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: too many operations in txn request")
            return
        answer = self._txn(request)
        if answer is None:
            end.refuse(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        else:
            end.answer(answer)

    def _do_leasegrant(self, end: Member, data: bytes) -> None:
        self._lease += 1
        lease = self.leases[self._lease] = Lease(pb.LeaseGrantRequest.FromString(data).ttl, 0.0)
        self._prolong(self._lease, lease)
        end.answer(pb.LeaseGrantResponse(header=self._header(), id=self._lease, ttl=lease.ttl_s))

    def _do_leaserevoke(self, end: Member, data: bytes) -> None:
        if self._end_lease(pb.LeaseRevokeRequest.FromString(data).id):
            end.answer(pb.LeaseRevokeResponse(header=self._header()))
        else:
            end.refuse(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")

    def _do_leasekeepalive(self, end: Member, data: bytes) -> None:
        number = pb.LeaseKeepAliveRequest.FromString(data).id
        lease = self.leases.get(number)
        if lease is not None:
            self._prolong(number, lease)
        ttl = 0 if lease is None else lease.ttl_s
        end.answer(pb.LeaseKeepAliveResponse(header=self._header(), id=number, ttl=ttl), last=False)

    def _do_watch(self, end: Member, data: bytes) -> None:
        self._watch(end, pb.WatchRequest.FromString(data).create)

    def _header(self) -> Any:
        return pb.Header(revision=self.revision)

    def _range(self, request: Any) -> Any:
        found = self._at(request.revision) if 0 < request.revision < self.revision else self.kvs
        keys = [key for key in sorted(found) if _within(key, request.key, request.range_end)]
        limit = request.limit or len(keys)
        kvs = [found[key] for key in keys[:limit]]
        return pb.RangeResponse(header=self._header(), kvs=kvs, more=len(keys) > limit, count=len(keys))

    def _at(self, revision: int) -> dict[bytes, Any]:
        """Return all that was there at a revision."""
        found: dict[bytes, Any] = {}
        for event in self.events:
            if event.kv.mod_revision > revision:
                break
            if event.type == pb.Event.PUT:
                found[event.kv.key] = event.kv
            else:
                found.pop(event.kv.key, None)
        return found

    def _txn(self, request: Any) -> Any:
        succeeded = all(self._holds(compare) for compare in request.compare)
        operations = request.success if succeeded else request.failure
        if any(op.put.lease and op.put.lease not in self.leases for op in operations):
            return None  # it refuses the whole
        writes = any(not op.HasField("range") for op in operations)
        if writes:
            self.revision += 1
        responses = [self._operation(op) for op in operations]
        answer = pb.TxnResponse(succeeded=succeeded, responses=responses)
        answer.header.revision = self.revision
        if writes:
            self._notify()
        return answer

    def _holds(self, compare: Any) -> bool:
        kv = self.kvs.get(compare.key)
        have, want = {
            pb.Compare.VERSION: (kv.version if kv else 0, compare.version),
            pb.Compare.CREATE: (kv.create_revision if kv else 0, compare.create_revision),
            pb.Compare.MOD: (kv.mod_revision if kv else 0, compare.mod_revision),
            pb.Compare.VALUE: (kv.value if kv else b"", compare.value),
            pb.Compare.LEASE: (kv.lease if kv else 0, compare.lease),
        }[compare.target]
        return bool(
            {
                pb.Compare.EQUAL: have == want,
                pb.Compare.GREATER: have > want,
                pb.Compare.LESS: have < want,
                pb.Compare.NOT_EQUAL: have != want,
            }[compare.result]
        )

    def _operation(self, op: Any) -> Any:
        if op.HasField("range"):
            return pb.ResponseOp(range=self._range(op.range))
        if op.HasField("put"):
            self._put(op.put)
            return pb.ResponseOp(put=pb.PutResponse())
        keys = [key for key in self.kvs if _within(key, op.delete_range.key, op.delete_range.range_end)]
        for key in keys:
            self._delete(key)
        return pb.ResponseOp(delete_range=pb.DeleteRangeResponse(deleted=len(keys)))

    def _put(self, put: Any) -> None:
        old = self.kvs.get(put.key)
        kv = pb.KeyValue(
            key=put.key,
            value=put.value,
            create_revision=old.create_revision if old is not None else self.revision,
            mod_revision=self.revision,
            version=old.version + 1 if old is not None else 1,
            lease=put.lease,
        )
        if old is not None and old.lease in self.leases:
            self.leases[old.lease].keys.discard(put.key)
        if put.lease:
            self.leases[put.lease].keys.add(put.key)
        self.kvs[put.key] = kv
        self.events.append(pb.Event(type=pb.Event.PUT, kv=kv))
        self.on_write(put.key, put.value)

    def _delete(self, key: bytes) -> None:
        kv = self.kvs.pop(key)
        if kv.lease in self.leases:
            self.leases[kv.lease].keys.discard(key)
        gone = pb.KeyValue(key=key, mod_revision=self.revision)
        self.events.append(pb.Event(type=pb.Event.DELETE, kv=gone))
        self.on_write(key, b"")

    # --------------------------------------------------------------------------------------- leases and watches

    def _prolong(self, number: int, lease: Lease) -> None:
        lease.until = self.world.now + lease.ttl_s
        self.world.at(lease.until, self._expire, number, lease.until)

    def _expire(self, number: int, until: float) -> None:
        lease = self.leases.get(number)
        if lease is None or lease.until != until:
            return
        if self.world.now < self.leaderless_until:
            return  # the next leader lets it live on
        self._end_lease(number)

    def _end_lease(self, number: int) -> bool:
        lease = self.leases.get(number)
        if lease is None:
            return False
        if lease.keys:
            self.revision += 1
            for key in sorted(lease.keys):
                self._delete(key)
            self._notify()
        del self.leases[number]
        return True

    def _watch(self, end: Member, create: Any) -> None:
        if 0 < create.start_revision <= self.compacted:
            gone = pb.WatchResponse(header=self._header(), canceled=True, compact_revision=self.compacted + 1)
            end.answer(gone, last=False)
            return
        end.watches = (create.key, create.range_end)
        end.answer(pb.WatchResponse(header=self._header(), created=True), last=False)
        end.seen = create.start_revision - 1
        self.watches.append((end, create.key, create.range_end))
        self._notify()

    def _notify(self) -> None:
        self.watches = [watch for watch in self.watches if not watch[0].over]
        for end, key, range_end in self.watches:
            if self.is_alone(end.machine):
                continue
            events = [e for e in self.events if e.kv.mod_revision > end.seen and _within(e.kv.key, key, range_end)]
            end.seen = self.revision
            if events:
                end.answer(pb.WatchResponse(header=self._header(), events=events), last=False)


class _Listener:
    def __init__(self, etcd: Etcd, member: str) -> None:
        self._etcd = etcd

    def accept(self, stream: Stream) -> None:
        stream.server = Member(self._etcd, stream)
        stream.server.pipe.send((CONNECTED, None))


class Member(End):
    """A member's end of one call."""

    def __init__(self, etcd: Etcd, stream: Stream) -> None:
        super().__init__(stream, None, stream.server_machine, stream.server.pipe)
        self._etcd = etcd
        self.mute = False
        self.seen = 0
        self.watches: tuple[bytes, bytes] | None = None

    def take(self, item: Item) -> None:
        kind, what = item
        if kind == DATA:
            self._etcd.request(self, self.stream.path, what)
        elif kind == GONE:
            self.over = True
            self.stream.closed(self)

    def answer(self, message: Any, *, last: bool = True) -> None:
        if self.over or self.mute:
            return
        self.pipe.send((DATA, message.SerializeToString()))
        if last:
            self.pipe.send((STATUS, (grpc.StatusCode.OK, "")))

    def refuse(self, code: grpc.StatusCode, details: str) -> None:
        if not self.over and not self.mute:
            self.pipe.send((STATUS, (code, details)))


def _within(key: bytes, start: bytes, end: bytes) -> bool:
    if not end:
        return key == start
    return key >= start and (end == b"\0" or key < end)
