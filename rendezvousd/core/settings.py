"""How long the daemon waits, and how much it holds. Values only; config.py fills them from flags, variables and files.

Durations are seconds, sizes are bytes. A job may bring its own durations for what concerns it alone
(`rendezvous.proto`, Timeouts); these are then the defaults.
"""

from __future__ import annotations

from msgspec import Struct


class Timing(Struct, frozen=True, kw_only=True):
    """Durations in seconds, and the counts that belong to them."""

    # A node speaks so often: 1,000 nodes at 1 s are what one core answers with ease. More nodes speak less often.
    heartbeat_s: float = 1.0
    # A node silent for so many intervals is lost. Five: one lost packet, with its retransmission, and one garbage
    # collection of some seconds are survived.
    lease_intervals: float = 5
    # What a node whose stream broke may take to return, before 5 round trips are added: a reconnect takes
    # milliseconds, a killed launcher never returns, and its peers wait for nothing else.
    grace_s: float = 1.0
    # A first round waits so long after the last arrival once min nodes are there: nodes of one submission start within
    # a second or two of each other.
    settle_s: float = 3.0
    # ... but no longer than this in all, however slowly they trickle in.
    settle_max_s: float = 30.0
    # Nodes that wait while a round runs are let in after so long without another arrival, so that ten nodes which
    # arrive together cost one restart.
    grow_s: float = 5.0
    # ... but after this long whatever arrives.
    grow_max_s: float = 30.0
    # Below min nodes for so long: the job has failed. As torchrun's join_timeout.
    join_s: float = 600.0
    # From stopped to ready for the next round: a fresh store is bound in milliseconds, a loaded host needs seconds.
    offer_s: float = 30.0
    # A daemon that knows nothing of a round its nodes speak of waits so long after the last member that came back:
    # they call again every second.
    recovery_s: float = 10.0
    # ... but no longer than this in all.
    recovery_max_s: float = 60.0
    # An ended job stays readable for so long: latecomers learn its outcome, people read its cause.
    ended_s: float = 300.0
    # Growth back-off: an admission within this time of the last one waits twice as long as that one did. A round that
    # broke within this time after nodes were let in makes the next admission wait twice the running time.
    calm_soon_s: float = 300.0
    # The longest wait that the growth back-off adds: nodes that arrive one by one cost one restart in five minutes.
    growth_backoff_max_s: float = 300.0
    # So long without a break, and growth is trusted again.
    calm_reset_s: float = 600.0
    # A node that could not reach its peers sits out so long, doubled each time ...
    cooldown_s: float = 5.0
    # ... up to this: a repaired network is noticed within a minute.
    cooldown_max_s: float = 60.0
    # A round that broke sooner is short: it cannot have saved a checkpoint.
    short_round_s: float = 10.0
    # From SIGKILL to gone, the waking of who sends it included, where workers end with their lease
    # (--on-daemon-loss=stop): an exit takes milliseconds, that of a process with hundreds of GB a second or two.
    kill_s: float = 2.0
    # So many short rounds in a row fail the job, whatever they were charged to: 20 are minutes of going nowhere.
    short_rounds_max: int = 20

    @property
    def lease_s(self) -> float:
        """The lease at the shortest interval, in seconds."""
        return self.heartbeat_s * self.lease_intervals


class Limits(Struct, frozen=True, kw_only=True):
    """Counts and sizes in bytes. What goes beyond is refused with the limit's name, or cut and said to be cut."""

    # Streams of one job: 10,000 were measured with 250 MB; a power of two above that.
    nodes_per_job: int = 16384
    # Jobs known at a time, ended ones included: a head host of a busy cluster sees tens.
    jobs: int = 1024
    # One message on the wire. A node's state with 8 failures of 8 KiB is 70 KiB.
    message_bytes: int = 1 << 20
    # Text of one failure: some 100 lines of traceback; what is cut is said.
    error_text_bytes: int = 8192
    # Failures told by one node: the first explains, the others are mostly its victims.
    failures_per_node: int = 8
    # Node uids of a job that were lost, removed or left and must not come back; the oldest are forgotten first.
    tombstones: int = 4096
    # Longest run id; it becomes a part of keys and file names.
    run_id_bytes: int = 256
    # Longest node name, role, topology label and submission token.
    name_bytes: int = 256
    # Keys of one store namespace: a process group sets one per rank and a few more.
    store_keys: int = 65536
    # Longest key of a store.
    store_key_bytes: int = 1024
    # Largest value of a store: half a message, so that a value and what surrounds it always fit into one.
    store_value_bytes: int = 1 << 19
    # Keys and values of one store namespace together.
    store_bytes: int = 64 << 20
