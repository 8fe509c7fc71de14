"""What etcd's errors mean: was the request carried out, can trying again help, and what to tell people."""

from __future__ import annotations

import enum

import grpc


class Trouble(enum.Enum):
    """What is wrong with etcd, as people would say it."""

    UNREACHABLE = "cannot be reached"
    SLOW = "answers too slowly"
    CHANGING_LEADER = "is changing its leader"
    NO_QUORUM = "has no quorum"
    OUT_OF_SPACE = "is out of space"
    PASSWORD = "refuses the user name or password"
    DENIED = "denies permission"
    BROKEN = "fails"
    MISUSED = "does not accept the request"


class EtcdError(Exception):
    """A call failed. `passing`: trying it again may help, after a time or after somebody has mended etcd."""

    def __init__(self, trouble: Trouble, text: str) -> None:
        super().__init__(f"etcd {trouble.value}: {text}")
        self.trouble = trouble
        self.text = text

    @property
    def passing(self) -> bool:
        return self.trouble is not Trouble.MISUSED


class EtcdUnknown(EtcdError):
    """Nobody knows whether the request was carried out, or still will be. Look before you try again."""


class EtcdRefused(EtcdError):
    """The request was not carried out and will not be."""


class EtcdCompacted(Exception):
    """What was asked for is no longer kept: list anew, and go on from there."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"etcd keeps nothing before revision {revision}")
        self.revision = revision


# Texts that come with more than one status code, or with one that says too little.
_BY_TEXT: tuple[tuple[str, type[EtcdError], Trouble], ...] = (
    # before the request is looked at, because the `hasleader` of every call is (see EtcdClient)
    ("no leader", EtcdRefused, Trouble.CHANGING_LEADER),
    ("leader changed", EtcdUnknown, Trouble.CHANGING_LEADER),
    ("previous leader failure", EtcdUnknown, Trouble.CHANGING_LEADER),
    ("database space exceeded", EtcdRefused, Trouble.OUT_OF_SPACE),
    ("message larger than max", EtcdRefused, Trouble.MISUSED),
    ("too many requests", EtcdRefused, Trouble.SLOW),
    ("request timed out", EtcdUnknown, Trouble.SLOW),
    ("invalid user ID or password", EtcdRefused, Trouble.PASSWORD),
    ("user name is empty", EtcdRefused, Trouble.PASSWORD),
    ("invalid auth token", EtcdRefused, Trouble.PASSWORD),
    ("revision of auth store is old", EtcdRefused, Trouble.PASSWORD),
    ("permission denied", EtcdRefused, Trouble.DENIED),
)
_BY_CODE: dict[grpc.StatusCode, tuple[type[EtcdError], Trouble]] = {
    grpc.StatusCode.UNAVAILABLE: (EtcdUnknown, Trouble.UNREACHABLE),
    grpc.StatusCode.DEADLINE_EXCEEDED: (EtcdUnknown, Trouble.SLOW),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (EtcdRefused, Trouble.SLOW),
    grpc.StatusCode.UNAUTHENTICATED: (EtcdRefused, Trouble.PASSWORD),
    grpc.StatusCode.PERMISSION_DENIED: (EtcdRefused, Trouble.DENIED),
    grpc.StatusCode.INVALID_ARGUMENT: (EtcdRefused, Trouble.MISUSED),
    grpc.StatusCode.FAILED_PRECONDITION: (EtcdRefused, Trouble.MISUSED),
    grpc.StatusCode.NOT_FOUND: (EtcdRefused, Trouble.MISUSED),
    grpc.StatusCode.UNIMPLEMENTED: (EtcdRefused, Trouble.MISUSED),
}
# A token is bound to an endpoint, its process and 300 s; a change of users makes it old.
_STALE_TOKEN = ("invalid auth token", "user name is empty", "revision of auth store is old")
# Longer texts of gRPC are stacks of its inner errors.
_TEXT_MAX = 200


def judge(code: grpc.StatusCode, details: str) -> EtcdError:
    """Return what a failed call means. Whatever is not known for certain is EtcdUnknown."""
    text = details.removeprefix("etcdserver: ")[:_TEXT_MAX] or code.name.lower().replace("_", " ")
    for part, kind, trouble in _BY_TEXT:
        if part in details:
            return kind(trouble, text)
    kind, trouble = _BY_CODE.get(code, (EtcdUnknown, Trouble.BROKEN))
    return kind(trouble, text)


def stale_token(code: grpc.StatusCode, details: str) -> bool:
    """Return whether authenticating anew may help."""
    return code is grpc.StatusCode.UNAUTHENTICATED or any(part in details for part in _STALE_TOKEN)


def lease_ended(error: EtcdError) -> bool:
    """Return whether something was to be put under a lease that is no more."""
    return "lease not found" in error.text


def compacted(details: str) -> bool:
    """Return whether a read failed because its revision is no longer kept."""
    return "has been compacted" in details
