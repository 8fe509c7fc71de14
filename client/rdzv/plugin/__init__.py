"""A node whose workers are run by torch's own agent instead of rdzvrun.

    torch's agent ──next_rendezvous, num_nodes_waiting, store──→ Handler ──→ Node (a thread) ──→ Attendance ──→ daemon

handler.py       torch's RendezvousHandler: what its agent calls
agent_store.py   the store that its agent exchanges ranks through, answered from what the daemon dealt
node.py          calls from the agent's thread into the one that attends the daemon
attendance.py    rdzv.agent's orders carried out, with torch's agent in the place of the supervisor
bootstrap.py     the bootstrap stores
settings.py      torch's parameters and our keys, as one value
stock.py         what torch's agent does not pass to a handler, and is found all the same
"""
