"""Who sits where: group ranks kept as far as a gap-free numbering allows, global and role ranks as running sums."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from rendezvousd.core.model import Node, NodeUid, Round, Seat

# Names, and wishes that were not met, that are spelled out before "and N more".
SAID_MAX = 3


def order(last: Round | None, survivors: Sequence[Node], newcomers: Sequence[Node]) -> list[Node]:
    """Return the nodes by group rank.

    A survivor keeps its rank if there still is one of that number; rank 0 is always a survivor's, so that what rank 0
    alone knows is not lost to a newcomer. A newcomer named like the last holder of a vacated rank gets that one. What
    is left goes to displaced survivors first, then to newcomers in the order of a first round.
    """
    size = len(survivors) + len(newcomers)
    if last is None:
        return _first_order(newcomers, size)
    places: list[Node | None] = [None] * size
    displaced = []
    for node in sorted(survivors, key=lambda n: last.index[n.uid]):
        rank = last.index[node.uid]
        if rank < size:
            places[rank] = node
        else:
            displaced.append(node)
    if places[0] is None and survivors:
        places[0] = displaced.pop(0) if displaced else _take_first(places)
    strangers = _seat_successors(last, places, newcomers)
    rest = iter([*displaced, *_first_order(strangers, len(strangers))])
    return [node if node is not None else next(rest) for node in places]


def deal(nodes: Sequence[Node]) -> tuple[Seat, ...]:
    """Return the seats of nodes given by group rank. Every node must have an offer."""
    role_size: dict[str, int] = defaultdict(int)
    for node in nodes:
        role_size[node.spec.role] += node.spec.slots
    seats, first_rank = [], 0
    role_first: dict[str, int] = defaultdict(int)
    for group_rank, node in enumerate(nodes):
        assert node.offer is not None
        role = node.spec.role
        seats.append(
            Seat(
                uid=node.uid,
                name=node.name,
                group_rank=group_rank,
                slots=node.spec.slots,
                first_rank=first_rank,
                role=role,
                role_first_rank=role_first[role],
                role_world_size=role_size[role],
                address=node.offer.address,
                port=node.offer.port,
                offer_id=node.offer.offer_id,
            )
        )
        first_rank += node.spec.slots
        role_first[role] += node.spec.slots
    return tuple(seats)


def choose(last: Round | None, newcomers: Sequence[Node], seats: int) -> list[Node]:
    """Return the newcomers that get one of `seats` free seats: successors by name first, then by arrival."""
    vacated = {last.seats[last.index[uid]].name for uid in last.forfeits} if last is not None else set()
    return sorted(newcomers, key=lambda n: (n.name not in vacated, n.arrival))[:seats]


def _take_first(places: list[Node | None]) -> Node:
    """Take the lowest-ranked node out of its place."""
    rank = next(i for i, node in enumerate(places) if node is not None)
    node, places[rank] = places[rank], None
    assert node is not None
    return node


def _seat_successors(last: Round, places: list[Node | None], newcomers: Sequence[Node]) -> list[Node]:
    """Seat newcomers named like the last holder of a free place there; return the other newcomers."""
    free: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(places):
        if node is None and rank < len(last.seats):
            free[last.seats[rank].name].append(rank)
    strangers = []
    for node in sorted(newcomers, key=lambda n: n.arrival):
        if free.get(node.name):
            places[free[node.name].pop(0)] = node
        else:
            strangers.append(node)
    return strangers


def _first_order(nodes: Sequence[Node], size: int) -> list[Node]:
    """Return the nodes of a first round: at their --node-rank where given and free, else by topology, then arrival."""
    places: dict[int, Node] = {}
    others = []
    for node in sorted(nodes, key=lambda n: n.arrival):
        wish = node.spec.node_rank
        if wish is not None and wish < size and wish not in places:
            places[wish] = node
        else:
            others.append(node)
    others.sort(key=lambda n: (n.spec.node_rank is None, n.spec.node_rank or 0, *_natural(n.spec.topology), n.arrival))
    rest = iter(others)
    return [places[i] if i in places else next(rest) for i in range(size)]


def _natural(label: str) -> tuple[list[str | int], str]:
    """Return what sorts labels as people do: numbers in them by their value (node8 before node66)."""
    parts = re.split(r"([0-9]+)", label)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], label


def unmet_wishes(nodes: Sequence[Node], newcomers: Collection[NodeUid]) -> str:
    """Return what the newcomers among the nodes of a round, given by group rank, asked for and did not get, and which
    names are shared; empty: nothing is amiss. For people."""
    asked: dict[int, list[Node]] = defaultdict(list)
    named: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        named[node.name].append(node)
        if node.uid in newcomers and node.spec.node_rank is not None:
            asked[node.spec.node_rank].append(node)
    said = [_unmet(nodes, rank, those) for rank, those in sorted(asked.items())]
    for name, those in sorted(named.items()):
        if len(those) > 1 and any(node.uid in newcomers for node in those):
            said.append(f"{len(those)} nodes are named {name}: --rdzv-conf node_name= gives each its own")
    said = [text for text in said if text]
    more = [f"{len(said) - SAID_MAX} more such"] if len(said) > SAID_MAX else []
    return "; ".join([*said[:SAID_MAX], *more])


def _unmet(nodes: Sequence[Node], rank: int, asked: Sequence[Node]) -> str:
    """Return how the wish for this rank was not met; empty: it was."""
    wanted = f"--node-rank={rank} was asked for by {_names(asked)}"
    if rank >= len(nodes):
        return f"{wanted}, and there are {len(nodes)} nodes"
    holder = nodes[rank]
    if holder.uid in {node.uid for node in asked}:
        return f"{wanted}; {holder.name} has it" if len(asked) > 1 else ""
    return f"{wanted}, and {holder.name} has it"


def _names(nodes: Sequence[Node]) -> str:
    named = [node.name for node in sorted(nodes, key=lambda node: node.arrival)]
    more = f" and {len(named) - SAID_MAX} more" if len(named) > SAID_MAX else ""
    return ", ".join(named[:SAID_MAX]) + more


def seat_index(seats: Sequence[Seat]) -> dict[NodeUid, int]:
    """Return group rank by node uid."""
    return {seat.uid: seat.group_rank for seat in seats}
