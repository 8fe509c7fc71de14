"""What etcd's errors mean: was the request carried out, can trying again help, and what to tell people."""

from __future__ import annotations

import enum
import re

import grpc


class Trouble(enum.Enum):
    """What is wrong with etcd, as people would say it."""

    UNREACHABLE = "cannot be reached"
    SLOW = "answers too slowly"
    CHANGING_LEADER = "is changing its leader"
    LEARNER = "was asked at a learner, which serves no clients until it is promoted"
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


class EtcdClosed(EtcdUnknown):
    """The client was closed meanwhile, or before."""

    def __init__(self) -> None:
        super().__init__(Trouble.BROKEN, "the connections to it were closed by this daemon")

    @property
    def passing(self) -> bool:
        return False


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
    ("not supported for learner", EtcdRefused, Trouble.LEARNER),
    ("leader changed", EtcdUnknown, Trouble.CHANGING_LEADER),
    ("previous leader failure", EtcdUnknown, Trouble.CHANGING_LEADER),
    ("database space exceeded", EtcdRefused, Trouble.OUT_OF_SPACE),
    ("message larger than max", EtcdRefused, Trouble.MISUSED),
    ("too many requests", EtcdRefused, Trouble.SLOW),
    ("request timed out", EtcdUnknown, Trouble.SLOW),
    # a member that hangs: its host still accepts connections
    ("before receiving SETTINGS", EtcdUnknown, Trouble.SLOW),
    ("ping timeout", EtcdUnknown, Trouble.SLOW),
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
_WRONG_NAME = "etcd's certificate is not for the name or address that --etcd-endpoints gives"
_NO_TLS = "etcd ended the TLS handshake: if it speaks no TLS there, leave out --etcd-ca, --etcd-cert and --etcd-key"
_CLIENT = "etcd refuses this daemon's certificate, or asks for one: --etcd-cert and --etcd-key"
# A token is bound to an endpoint, its process and 300 s; a change of users makes it old.
_STALE_TOKEN = ("invalid auth token", "user name is empty", "revision of auth store is old")
# What gRPC's words on a connection that failed mean to whoever set it up. The first that fits is taken.
_CONNECTING: tuple[tuple[str, str], ...] = (
    ("Hostname Verification Check failed", _WRONG_NAME),
    ("not in peer certificate", _WRONG_NAME),  # older grpcio
    ("certificate has expired", "etcd's certificate, or that of its CA, has expired"),
    ("certificate is not yet valid", "etcd's certificate is not valid yet: compare the clocks"),
    ("CERTIFICATE_VERIFY_FAILED", "etcd's certificate is not signed by the CA in --etcd-ca"),
    ("Handshake read failed", _NO_TLS),
    ("WRONG_VERSION_NUMBER", _NO_TLS),
    ("ALERT_CERTIFICATE_EXPIRED", "etcd refuses the certificate of --etcd-cert: it has expired"),
    *((alert, _CLIENT) for alert in ("BAD_CERTIFICATE", "UNKNOWN_CA", "CERTIFICATE_REQUIRED", "CERTIFICATE_UNKNOWN")),
    ("TSI_DATA_CORRUPTED", _CLIENT),  # with TLS 1.3 it is refused after the handshake
    (
        "Failed to create security handshaker",
        "the files of --etcd-ca, --etcd-cert and --etcd-key are not all PEM, or the key is not the certificate's",
    ),
    ("TSI_", "the TLS handshake failed"),
    ("Socket closed", "etcd closed the connection at once: if it speaks TLS there, give --etcd-ca"),
)
_NOT_CONNECTED = re.compile(r"failed to connect to all addresses; last error: (\w+: )?(ipv[46]:\S+: )?")
# Longer texts of gRPC are stacks of its inner errors.
_TEXT_MAX = 200


def judge(code: grpc.StatusCode, details: str) -> EtcdError:
    """Return what a failed call means. Whatever is not known for certain is EtcdUnknown."""
    text = _readable(details) or code.name.lower().replace("_", " ")
    for part, kind, trouble in _BY_TEXT:
        if part in details:
            return kind(trouble, text)
    kind, trouble = _BY_CODE.get(code, (EtcdUnknown, Trouble.BROKEN))
    return kind(trouble, text)


def _readable(details: str) -> str:
    """Return etcd's or gRPC's text for people. Why there is no connection comes first."""
    found = _NOT_CONNECTED.match(details)
    if found is None:
        return details.removeprefix("etcdserver: ")[:_TEXT_MAX]
    rest = details[found.end() :]
    words = next((words for part, words in _CONNECTING if part in rest), "")
    # the last words of a stack say the most
    return f"{words} ({rest.rpartition('OPENSSL_internal:')[2][:_TEXT_MAX]})" if words else rest[:_TEXT_MAX]


def stale_token(code: grpc.StatusCode, details: str) -> bool:
    """Return whether authenticating anew may help."""
    return code is grpc.StatusCode.UNAUTHENTICATED or any(part in details for part in _STALE_TOKEN)


def lease_ended(error: EtcdError) -> bool:
    """Return whether something was to be put under a lease that is no more."""
    return "lease not found" in error.text


def compacted(details: str) -> bool:
    """Return whether a read failed because its revision is no longer kept."""
    return "has been compacted" in details
