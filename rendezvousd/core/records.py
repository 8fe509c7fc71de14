"""The objects that a record of a job is made of, and what is kept of a record that a newer release has written.

Fields have names, and the head has the version of the whole record: major and minor. A release that adds a field, or a
kind of part, raises the minor. An older daemon reads such a record, and keeps what it does not know when it writes the
record (`Unknown`), as long as the object that the field belongs to is the same one. Everything else that changes (the
meaning of a field, another value of an enum) raises the major, and records of another major are not read. A field that
is added needs a default, for the records that do not have it yet; the defaults here are part of the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rendezvousd.core.model import (
    Calm,
    CauseKind,
    Departure,
    Failure,
    JobSpec,
    JobUid,
    Known,
    NodeUid,
    Outcome,
    Phase,
    RoundUid,
    Seat,
    SitOut,
)

MAJOR, MINOR = 1, 0


class RecordError(Exception):
    """A stored record cannot be read. The text says why."""


# -------------------------------------------------------------------------------------------------- what is stored


class Stored(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An object of a record. What is in it besides, of the core's own types, is stored with all its fields."""


class StoredRound(Stored, frozen=True, kw_only=True):
    uid: RoundUid
    number: int
    restart_count: int
    admitted: bool = False
    broken: bool = False
    final: bool = False
    done: int = 0
    notice: str = ""


class StoredRecovering(Stored, frozen=True, kw_only=True):
    uid: RoundUid
    number: int
    size: int


class StoredEnding(Stored, frozen=True, kw_only=True):
    outcome: Outcome
    exit_code: int
    may_exit: bool = False


class StoredHead(Stored, frozen=True, kw_only=True):
    version: tuple[int, int]
    run_id: str
    uid: JobUid
    spec: JobSpec
    submission: str = ""
    arrivals: int
    departures: int = 0
    known: Known
    calm: Calm
    lease_s: float = 0.0
    round: StoredRound | None = None
    recovering: StoredRecovering | None = None
    lost: bool = False
    apart: bool = False
    ending: StoredEnding | None = None


class StoredWorkers(Stored, frozen=True, kw_only=True):
    """What lives on a node of a round that is long over."""

    round_uid: RoundUid
    round: int
    phase: Phase
    alive: int


class StoredNode(Stored, frozen=True, kw_only=True):
    uid: NodeUid
    name: str
    arrival: int
    slots: int = 1
    role: str = ""
    node_rank: int | None = None
    topology: str = ""
    stop_grace_s: float = 30.0
    leaving: Departure | None = None
    held: StoredWorkers | None = None
    cooling: bool = False
    sits_out: SitOut = SitOut.UNREACHABLE
    unreachables: int = 0
    overdue: bool = False


class StoredGone(Stored, frozen=True, kw_only=True):
    uid: NodeUid
    departure: Departure


class StoredMarks(Stored, frozen=True, kw_only=True):
    """One letter for each seat: how its holder's part ended, how it gave it up, whether it did not see the master."""

    round_uid: RoundUid
    ends: str
    forfeits: str
    unreachable: str


class StoredCause(Stored, frozen=True, kw_only=True):
    kind: CauseKind
    after_s: float = 0.0  # the earliest one that is stored with it
    text: str
    uid: NodeUid = NodeUid("")
    name: str = ""
    failure: Failure | None = None
    note: str = ""


class StoredCauses(Stored, frozen=True, kw_only=True):
    last: StoredCause | None = None
    ending: StoredCause | None = None


class StoredFence(Stored, frozen=True, kw_only=True):
    uid: NodeUid
    name: str
    round_uid: RoundUid
    bound_s: float


class StoredSuspect(Stored, frozen=True, kw_only=True):
    name: str
    rounds: int = 0
    pauses: int = 0
    round: int = 0
    sits_out: bool = False
    why: SitOut = SitOut.FAILING


# What a part of this kind is: a list of such objects, or one.
LISTS: dict[str, type[Struct]] = {
    "nodes": StoredNode,
    "gone": StoredGone,
    "seats": Seat,
    "evidence": StoredCause,
    "fences": StoredFence,
    "suspects": StoredSuspect,
}
SINGLES: dict[str, type[Struct]] = {"marks": StoredMarks, "causes": StoredCauses}
DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    **{kind: msgspec.json.Decoder(list[of]) for kind, of in LISTS.items()},  # type: ignore[valid-type]
    **{kind: msgspec.json.Decoder(of) for kind, of in SINGLES.items()},
}
HEAD_DECODER = msgspec.json.Decoder(StoredHead)
# By what an object is the same one as before, and what is not known of it is kept. Of other types there is one only.
_IDENTITY: dict[type[Struct], tuple[str, ...]] = {
    StoredHead: ("uid",),
    StoredRound: ("uid",),
    StoredRecovering: ("uid",),
    StoredNode: ("uid",),
    StoredWorkers: ("round_uid",),
    StoredGone: ("uid",),
    Seat: ("uid", "offer_id"),
    StoredMarks: ("round_uid",),
    StoredCause: ("kind", "uid", "text"),
    Failure: ("rank",),
    StoredFence: ("uid", "round_uid"),
    Departure: ("order",),
    StoredSuspect: ("name",),
}


@dataclass(frozen=True, slots=True)
class _More:
    """What an object has that this version does not know, and what the objects in it have."""

    identity: tuple[Any, ...]
    fields: Mapping[str, Any]
    inner: Mapping[str, _More]


@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """What a record of a newer minor version has that this one does not know."""

    minor: int
    uid: JobUid
    head: _More | None
    objects: Mapping[str, Mapping[tuple[Any, ...], _More]]  # by kind of part, and identity
    parts: Mapping[str, bytes]  # of kinds that are not known


# ------------------------------------------------------------------------------------------- what is not known here


def find_unknown(head: bytes, parts: Mapping[str, bytes]) -> Unknown | None:
    """Return what a record that was loaded has that this version does not know; None: it is not of a newer one."""
    raw = msgspec.json.decode(head)
    minor = raw["version"][1]
    if minor <= MINOR:
        return None
    objects: dict[str, dict[tuple[Any, ...], _More]] = {}
    for (kind, _), data in whole_parts(parts).items():
        decoded = msgspec.json.decode(data)
        of, found = (LISTS[kind], decoded) if kind in LISTS else (SINGLES[kind], [decoded])
        for it in found:
            if (more := _more(it, of)) is not None:
                objects.setdefault(kind, {})[more.identity] = more
    strange = {name: data for name, data in parts.items() if part_kind(name) not in DECODERS}
    return Unknown(minor=minor, uid=raw["uid"], head=_more(raw, StoredHead), objects=objects, parts=strange)


def check_version(what: str, version: Any, major: int) -> None:
    """Return if a version, major and minor, is of this major. Raises RecordError."""
    if not isinstance(version, list) or len(version) != 2 or not all(type(n) is int for n in version):
        raise RecordError(f"its {what} is {version!r}, and should be major and minor, as [{major}, 0]")
    if version[0] != major:
        raise RecordError(f"its {what} is {version[0]}.{version[1]}, and this daemon reads {major}.x")


def encode_part(kind: str, made: Any, unknown: Unknown | None) -> bytes:
    """Return a part as bytes, with what is not known of its objects."""
    mores = unknown.objects.get(kind) if unknown is not None else None
    if mores is None:
        return msgspec.json.encode(made)
    if kind in SINGLES:
        return msgspec.json.encode(_with_more(made, mores.get(_identity(made))))
    return msgspec.json.encode([_with_more(it, mores.get(_identity(it))) for it in made])


def encode_head(head: StoredHead, unknown: Unknown | None) -> bytes:
    if unknown is None:
        return msgspec.json.encode(head)
    head = replace(head, version=(MAJOR, max(MINOR, unknown.minor)))
    same = unknown.head is not None and unknown.head.identity == _identity(head)
    return msgspec.json.encode(_with_more(head, unknown.head if same else None))


def _with_more(it: Struct, more: _More | None) -> Any:
    """Return the object, with what is not known of it, for encoding."""
    if more is None:
        return it
    raw = msgspec.to_builtins(it)
    for name, deeper in more.inner.items():
        inner = getattr(it, name)
        if isinstance(inner, Struct) and _identity(inner) == deeper.identity:
            raw[name] = _with_more(inner, deeper)
    return {**raw, **more.fields}


def _more(raw: Mapping[str, Any], of: type[Struct]) -> _More | None:
    """Return what the object has that its type does not know; None: nothing."""
    fields = {it.name: it.type for it in msgspec.structs.fields(of)}
    more = {name: value for name, value in raw.items() if name not in fields}
    inner = {}
    for name, type_ in fields.items():
        value, kind = raw.get(name), _struct_of(type_)
        if kind is not None and isinstance(value, dict) and (deeper := _more(value, kind)) is not None:
            inner[name] = deeper
    if not more and not inner:
        return None
    return _More(_identity(msgspec.convert(raw, of)), more, inner)


def _identity(it: Struct) -> tuple[Any, ...]:
    return tuple(getattr(it, name) for name in _IDENTITY.get(type(it), ()))


def _struct_of(type_: Any) -> type[Struct] | None:
    """Return the type of objects in a field, if it has any."""
    for option in get_args(type_) or (type_,):
        if isinstance(option, type) and issubclass(option, Struct):
            return option
    return None


def part_kind(name: str) -> str:
    return name.partition("+")[0].partition("/")[0]


def whole_parts(parts: Mapping[str, bytes]) -> dict[tuple[str, int], bytes]:
    """Return the parts by kind and number, in order, whatever they were cut into."""

    def order(name: str) -> tuple[str, int, int]:
        name, _, piece = name.partition("+")
        kind, _, number = name.partition("/")
        return kind, int(number or 0), int(piece or 0)

    whole: dict[tuple[str, int], list[bytes]] = {}
    for name in sorted((name for name in parts if part_kind(name) in DECODERS), key=order):
        kind, number, _ = order(name)
        whole.setdefault((kind, number), []).append(parts[name])
    return {key: b"".join(pieces) for key, pieces in whole.items()}
