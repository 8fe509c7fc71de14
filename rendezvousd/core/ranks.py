"""Who sits where: group ranks kept as far as a gap-free numbering allows, global and role ranks as running sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rendezvousd.core.model import Node, NodeUid, Round, Seat


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
    others.sort(key=lambda n: (n.spec.node_rank is None, n.spec.node_rank or 0, n.spec.topology, n.arrival))
    rest = iter(others)
    return [places[i] if i in places else next(rest) for i in range(size)]


def seat_index(seats: Sequence[Seat]) -> dict[NodeUid, int]:
    """Return group rank by node uid."""
    return {seat.uid: seat.group_rank for seat in seats}
