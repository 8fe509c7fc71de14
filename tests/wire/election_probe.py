"""One candidate in a process of its own, for test_election.py: says on stdout what it does, and when.

    election_probe.py ENDPOINT ADDRESS    ->  leads T REVISION | acts T | ended T WHY

T is seconds of the machine's boot clock, which all processes here share. It acts as a daemon does: whenever it likes,
but only right after a check.
"""

from __future__ import annotations

import asyncio
import sys

from rendezvousd.backends.etcd_client import Access, EtcdClient
from rendezvousd.core.errors import NotLeader
from rendezvousd.election import Election, Term, boottime


async def main(endpoint: str, address: str) -> None:
    election = Election(EtcdClient(Access(endpoints=(endpoint,))), address=address)
    while True:
        try:
            async with election.term() as term:
                say("leads", term.revision)
                await act_for_ever(term)
        except NotLeader as error:
            say("ended", error)


async def act_for_ever(term: Term) -> None:
    while True:
        term.check()
        say("acts")
        await asyncio.sleep(0.005)


def say(*words: object) -> None:
    what, *rest = words
    print(what, f"{boottime():.6f}", *rest, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
