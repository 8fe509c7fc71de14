from __future__ import annotations

from collections.abc import Iterator

from rendezvousd.core.errors import Refusal
from rendezvousd.rpc.status import CODES


def leaves(kind: type[Refusal]) -> Iterator[type[Refusal]]:
    for sub in kind.__subclasses__():
        if sub.__subclasses__():
            yield from leaves(sub)
        elif sub.__module__.startswith("rendezvousd."):
            yield sub


def test_every_refusal_has_a_code() -> None:
    assert set(leaves(Refusal)) == set(CODES)
