"""One job of a run: the nodes that its plan has, what they train, and its judge; and all of them together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.world.calls import Contents, User
from tests.sim.world.judge import LEADER, Judge
from tests.sim.world.machines import Process, World
from tests.sim.world.network import JOIN, Network, Stream
from tests.sim.world.nodes import Node
from tests.sim.world.plan import Plan
from tests.sim.world.training import Training, Worker

if TYPE_CHECKING:
    from tests.sim.world.cluster import Cluster

SPARE_JOIN_S = 60.0
ETCD = "/etcdserverpb."
# Of a node that is not as the plan has it: by what it differs.
KINDS = ("same", "name", "token", "options")


class JobRun:
    def __init__(self, cluster: Cluster, world: World, plan: Plan) -> None:
        self.cluster, self.world, self.plan = cluster, world, plan
        self.run_id = plan.run_id
        self.key = f"/jobs/{plan.run_id}/".encode()
        self.token = plan.wide.token
        self.attempt = 0  # of the submission as a whole
        self.nodes: dict[str, Node] = {}
        self.contents: dict[tuple[str, str], Contents] = {}  # of the job's store, by job and, without etcd, its daemon
        self._users: dict[Worker, User] = {}
        self.training = Training(world, plan.work_s, plan.stubborn)
        self.judge = Judge(world, cluster, self)
        self.training.on_start = self._worker_started
        self.training.on_meet = self.judge.worker_met
        self.training.on_end = self._worker_ended
        self.training.find_store = self._find_store
        for i in range(plan.nodes):
            ahead_s, rate = plan.clocks[i]
            self.add_node(f"{plan.names}{i}", {"ahead_s": ahead_s, "rate": rate})

    def add_node(self, name: str, clock: dict[str, float], kind: str = "same") -> Node:
        """`kind`: by what its options differ from what the plan has."""
        cluster = self.cluster
        node = Node(self.world, cluster.net, self.training, self.judge, name, lambda: self._argv(name, kind), **clock)
        node.kind = kind
        self.nodes[name] = cluster.nodes[name] = node
        return node

    def token_of(self, node: Node) -> str:
        if node.kind == "token":
            return "another"
        return f"{self.token}.{self.attempt}" if self.attempt else self.token

    def agrees(self, node: Node) -> bool:
        """Whether it has the plan's options."""
        return node.kind != "options"

    def _argv(self, name: str, kind: str) -> tuple[str, ...]:
        plan, node = self.plan, self.nodes[name]
        token = self.token_of(node)
        conf = [f"join_timeout={SPARE_JOIN_S:g}", f"node_name={self._label(name, kind)}", f"grow={plan.grow}"]
        return (
            f"--nnodes={plan.size}",
            f"--nproc-per-node={plan.slots}",
            f"--max-restarts={plan.max_restarts + (kind == 'options')}",
            f"--rdzv-endpoint={self.cluster.endpoints}",
            f"--rdzv-id={plan.run_id}",
            f"--rdzv-conf={','.join([*conf, *([f'submission={token}'] if token else [])])}",
            f"--local-addr={name}",
            f"--shutdown-timeout={plan.grace_s:g}",
            "--start-method=exec",
            *(("--on-daemon-loss=stop",) if plan.wide.stop else ()),
        )

    def _label(self, name: str, kind: str) -> str:
        return f"{self.plan.names}0" if kind == "name" else name

    @property
    def restarts_max(self) -> int:
        """The greatest --max-restarts of any of its nodes."""
        return self.plan.max_restarts + any(node.kind == "options" for node in self.nodes.values())

    def _find_store(self, worker: Worker) -> str:
        host, port = worker.master
        master, net = self.cluster.nodes.get(host), self.cluster.net
        if master is None or net.is_cut(worker.node.name, host) or net.is_cut(host, worker.node.name):
            return ""
        return master.stores.get(port, "")

    def _worker_started(self, worker: Worker) -> None:
        self.judge.worker_started(worker)
        if self.plan.wide.calls and worker.rank == 0:
            self._users[worker] = User(self, worker)

    def _worker_ended(self, worker: Worker) -> None:
        self.judge.worker_ended(worker)
        if (user := self._users.pop(worker, None)) is not None:
            user.end()

    # ------------------------------------------------------------------------------------------------- how it ends

    def begin(self) -> None:
        for at, node in zip(self.plan.arrivals_s, list(self.nodes.values()), strict=True):
            self.world.after(at, node.boot)

    def fill_up(self) -> None:
        """Start nodes as long as there are too few for a job that has not ended."""
        plan = self.plan
        willing = sum(node.up for node in self.nodes.values() if node.kind in ("same", "name"))
        for i in range(plan.min_nodes + 8):
            if willing >= plan.min_nodes or self.judge.endings:
                break
            name = f"{plan.names}{i}"
            node = self.nodes.get(name) or self.add_node(name, {"ahead_s": 7.0, "rate": 1.0})
            if not node.up and not any(said.startswith("job ") for _, said in node.exits):
                node.boot()
                willing += 1

    def done(self) -> bool:
        up = any(node.up for node in self.nodes.values())
        return self.judge.started > 0 and not up and self._nobody_comes()

    def _nobody_comes(self) -> bool:
        return bool(self.judge.endings) or (self.cluster.peaceful and bool(self.judge.exits))

    def check_end(self, healed_s: float) -> None:
        """In peace a job comes to an end, and to the right one."""
        up = [node.uid for node in self.nodes.values() if node.up]
        if up:
            self.world.fail("Liveness", f"{', '.join(up)} still there {healed_s:g} s after the last fault")
        for uid, code, said in self.judge.exits:
            if said.startswith("job failed"):
                self._check_failure(uid, said)
            elif said != "job succeeded" and not said.startswith("job closed"):
                self.world.fail("Outcome", f"{uid} exits with {code}: {said}")

    def _check_failure(self, uid: str, said: str) -> None:
        failures = sum(1 for book in self.judge.books.values() if book.failures)
        by_worker = "rank" in said and "rounds in a row" not in said and "join timeout" not in said
        if by_worker and failures <= self.plan.max_restarts:
            self.world.fail("Outcome", f"{uid}: {said}, after {failures} rounds with failures")


class Judges:
    """All jobs' judges: each hears what concerns its job."""

    def __init__(self, world: World, jobs: dict[str, JobRun], net: Network) -> None:
        self._world, self._jobs = world, jobs
        net.on_data = self._data
        net.on_over = self._over

    def _data(self, stream: Stream, way: str, data: bytes) -> None:
        if stream.path == JOIN and not self._world.over:
            _node(stream).judge.data(stream, way, data)
        elif way == "said" and stream.path.startswith(ETCD):
            for job in self._jobs.values():
                if job.key in data:
                    job.judge.written(stream.client.process, data)

    def _over(self, stream: Stream) -> None:
        if stream.path == JOIN:
            _node(stream).judge.stream_over(stream)

    def etcd_wrote(self, key: bytes, value: bytes) -> None:
        for job in self._jobs.values():
            if job.key in key:
                job.judge.etcd_wrote(value)
        if key == LEADER:
            self._world.say(f"{value.decode() or 'nobody'} leads")

    def stored(self, daemon: Process, job: Any) -> None:
        """A daemon keeps a job in its memory."""
        sealed = job.round is not None and job.round.uid == job.known.round_uid
        roster = [str(seat.uid) for seat in job.round.seats] if sealed else []
        if job.run_id in self._jobs:
            self._jobs[job.run_id].judge.stored(daemon, job.known.round_uid, roster)

    def operated(self, what: str, run_id: str, machine: str) -> None:
        """An operator has been obeyed."""
        instances = self._jobs[run_id].judge.instances
        if what == "remove":
            self.trouble(machine)
            instances.removed(machine)
        elif what == "close":
            instances.closed()

    def trouble(self, machine: str, seconds: float = 0.0) -> None:
        """A machine's connections have an excuse until some time from now."""
        for job in self._jobs.values():
            job.judge.trouble(machine, seconds)


def _node(stream: Stream) -> Any:
    """Return the node whose stream it is."""
    assert stream.client.process is not None
    return stream.client.process.owner
