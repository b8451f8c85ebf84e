"""Private stores that outlive a primary: a Redis Cluster, and a primary watched by sentinels.

Everything is a process of ours on free loopback ports, as in ``tests/servers.py``. A primary that does not
answer for a second is replaced. ``kill`` returns at once; who must know the successor waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from tests import servers

SHARDS = 3
SILENCE_MS = 1000  # after which a node counts as dead
SETTLE_SECONDS = 30.0  # for a vote, a promotion and a copy of the data, on a busy machine
PATIENCE_SECONDS = 2.0  # with one node that may be dead
MASTER_NAME = "main"
SENTINELS = 3
QUORUM = 2

_SMALL = {"maxmemory": "64mb", "repl-backlog-size": "1mb"}


class Node(servers.PrivateRedis):
    """One server of several."""

    def __init__(self, program: Path, folder: Path, **options: str) -> None:
        folder.mkdir()
        super().__init__(program, folder)
        named = {name.replace("_", "-"): value for name, value in (_SMALL | options).items()}
        self._command += itertools.chain.from_iterable((f"--{k}", v) for k, v in named.items())

    def ask(self, *command: str | int) -> Any:
        """The answer to one command, as redis-py has it; words of their own are answered raw."""
        client: Any = redis.Redis.from_url(self.url, socket_timeout=PATIENCE_SECONDS, protocol=2)
        with contextlib.closing(client):
            return client.execute_command(*command)

    def is_in_step(self) -> bool:
        """Whether a replica has all that its primary has; a primary always does."""
        found: dict[str, Any] = self.ask("INFO", "replication")
        return bool(found.get("master_link_status", "up") == "up")


def _wait(description: str, condition: Callable[[], bool]) -> None:
    """For a condition that does not hold while a node does not answer."""

    def holds() -> bool:
        try:
            return condition()
        except redis.RedisError:
            return False

    servers.wait_until(holds, SETTLE_SECONDS, description)


# --- a cluster ------------------------------------------------------------------------------------


class ClusterNode(Node):
    """``id`` is how the others know it."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.bus = servers.free_port()
        super().__init__(
            program,
            folder,
            cluster_enabled="yes",
            cluster_port=str(self.bus),
            cluster_announce_ip="127.0.0.1",
            cluster_node_timeout=str(SILENCE_MS),
            cluster_replica_validity_factor="0",  # a busy machine must not make a replica too old
        )

    @property
    def id(self) -> str:
        name: bytes = self.ask("CLUSTER", "MYID")
        return name.decode()

    def follow(self, primary: ClusterNode) -> None:
        """Becomes the replica of a primary, as soon as it has heard of it."""
        name = primary.id
        _wait("a replica follows", lambda: bool(self.ask("CLUSTER", "REPLICATE", name)))

    def serves(self) -> bool:
        """Whether it answers for its slots; a node that misses others does not."""
        return bool(self.ask("CLUSTER INFO")["cluster_state"] == "ok")

    def knows(self) -> int:
        """How many nodes there are, itself too."""
        return int(self.ask("CLUSTER INFO")["cluster_known_nodes"])

    def shards(self) -> list[tuple[range, list[int]]]:
        """Slots → ports of their nodes, the primary's first, as this node sees it."""
        found = self.ask("CLUSTER", "SLOTS")
        return [(range(first, last + 1), [node[1] for node in nodes]) for first, last, *nodes in found]

    def serves_slots(self) -> bool:
        """Whether it is a primary with a part of its own."""
        return any(ports[0] == self.port for _, ports in self.shards())

    def primary_port(self, slot: int) -> int:
        """As this node sees it; 0: nobody serves the slot."""
        return next((ports[0] for slots, ports in self.shards() if slot in slots), 0)


class PrivateCluster:
    """Three primaries with a replica each; ``url`` names the nodes that are asked for all others."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.nodes: list[ClusterNode] = []
        self._program = program
        self._folder = folder

    @property
    def url(self) -> str:
        """For ``redis_connect.connect``."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:SHARDS])

    def start(self) -> None:
        """Makes the nodes know each other and their parts."""
        nodes = [self._started() for _ in range(2 * SHARDS)]
        for epoch, node in enumerate(nodes, start=1):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for node in nodes[1:]:
            node.ask("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].bus)
        bounds = [REDIS_CLUSTER_HASH_SLOTS * shard // SHARDS for shard in range(SHARDS + 1)]
        primaries, replicas = nodes[:SHARDS], nodes[SHARDS:]
        for primary, (first, after) in zip(primaries, itertools.pairwise(bounds), strict=True):
            primary.ask("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
        _wait("all know each other", self._all_know_all)
        for primary, replica in zip(primaries, replicas, strict=True):
            replica.follow(primary)
        self.wait_healthy()

    def join(self) -> ClusterNode:
        """One more primary, which serves no slot yet."""
        node = self._started()
        node.ask("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, self.nodes[0].bus)
        _wait("all know the new node", self._all_know_all)
        self.wait_healthy()
        return node

    def kill(self, node: ClusterNode | None = None) -> None:
        """SIGKILL to one node, or to all."""
        for doomed in self.nodes if node is None else [node]:
            doomed.kill()

    def restart(self, node: ClusterNode) -> None:
        """Brings a node back, as a replica when it was replaced; waits until nothing is amiss."""
        node.restart()
        self.wait_healthy()

    def primary_of(self, key: str) -> ClusterNode:
        """Who serves a key, in the eyes of a node that lives."""
        port = self._living()[0].primary_port(slot_of(key))
        return next(node for node in self.nodes if node.port == port)

    def wait_replaced(self, old: ClusterNode, key: str) -> None:
        """Until all other nodes agree that somebody else serves the key."""

        def is_replaced() -> bool:
            others = [node for node in self._living() if node is not old]
            ports = {node.primary_port(slot_of(key)) for node in others}
            return len(ports) == 1 and not ports & {old.port, 0} and all(node.serves() for node in others)

        _wait(f"port {old.port} is replaced", is_replaced)

    def wait_healthy(self) -> None:
        """Until every node lives, all slots are served, and each replica has what its primary has."""

        def is_healthy() -> bool:
            views = {tuple((slots, ports[0]) for slots, ports in node.shards()) for node in self.nodes}
            return len(views) == 1 and all(node.serves() and node.is_in_step() for node in self.nodes)

        _wait("the cluster is whole", is_healthy)

    def _started(self) -> ClusterNode:
        node = ClusterNode(self._program, self._folder / str(len(self.nodes)))
        self.nodes.append(node)
        return node.start()

    def _living(self) -> list[ClusterNode]:
        return [node for node in self.nodes if node.pid() is not None]

    def _all_know_all(self) -> bool:
        return all(node.knows() == len(self.nodes) for node in self.nodes)


class SlotMove:
    """The slot of a key on its way to another node, step by step."""

    def __init__(self, cluster: PrivateCluster, key: str, target: ClusterNode) -> None:
        self._cluster = cluster
        self._slot = slot_of(key)
        self._source = cluster.primary_of(key)
        self._target = target

    def announce(self) -> None:
        """The source asks for what it lacks at the target from now on."""
        self._target.ask("CLUSTER", "SETSLOT", self._slot, "IMPORTING", self._source.id)
        self._source.ask("CLUSTER", "SETSLOT", self._slot, "MIGRATING", self._target.id)

    def move_one(self) -> None:
        """One key goes, the others stay."""
        self._move(1)

    def move_all(self) -> None:
        """All keys have gone, and the source still serves the slot."""
        while self._source.ask("CLUSTER", "COUNTKEYSINSLOT", self._slot):
            self._move(1000)

    def finish(self) -> None:
        """The target serves the slot."""
        name = self._target.id
        self._target.ask("CLUSTER", "SETSLOT", self._slot, "NODE", name)
        self._source.ask("CLUSTER", "SETSLOT", self._slot, "NODE", name)
        self._cluster.wait_healthy()

    def _move(self, at_most: int) -> None:
        found = self._source.ask("CLUSTER", "GETKEYSINSLOT", self._slot, at_most)
        place = ("127.0.0.1", self._target.port, "", 0, round(PATIENCE_SECONDS * 1000))
        self._source.ask("MIGRATE", *place, "KEYS", *found)


def slot_of(key: str) -> int:
    """Of the key, or of its hash tag."""
    return int(key_slot(key.encode()))


@contextlib.contextmanager
def private_cluster() -> Iterator[PrivateCluster]:
    """A running cluster; ServerMissing when there is no redis-server."""
    program = servers.find_program("redis-server", "valkey-server")
    with servers.private_folder() as folder:
        cluster = PrivateCluster(program, folder)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.kill()


# --- a primary and its sentinels ------------------------------------------------------------------


class SentinelNode(Node):
    """One sentinel; it writes what it learns into its own configuration file."""

    def __init__(self, program: Path, folder: Path, primary_port: int) -> None:
        super().__init__(program, folder)
        rules = [
            f"monitor {MASTER_NAME} 127.0.0.1 {primary_port} {QUORUM}",
            f"down-after-milliseconds {MASTER_NAME} {SILENCE_MS}",
            f"failover-timeout {MASTER_NAME} 5000",
        ]
        lines = [f"port {self.port}", "bind 127.0.0.1", *(f"sentinel {rule}" for rule in rules)]
        config = folder / "sentinel.conf"
        config.write_text("\n".join(lines) + "\n")
        self._command = [str(program), str(config), "--sentinel"]

    def view(self) -> dict[str, Any]:
        """What it knows of the primary."""
        known: dict[str, Any] = self.ask("SENTINEL MASTER", MASTER_NAME)
        return known

    def could_replace(self) -> bool:
        """Whether it knows the replica, and the other sentinels that must agree."""
        known = self.view()
        return (known["num-slaves"], known["num-other-sentinels"]) == (1, SENTINELS - 1)


class PrivateSentinels:
    """A primary with one replica, and three sentinels of which two must agree."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self.data: list[Node] = []
        self.sentinels: list[SentinelNode] = []

    @property
    def url(self) -> str:
        """For ``redis_connect.connect``."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.sentinels)
        return f"redis+sentinel://{hosts}/{MASTER_NAME}"

    def start(self) -> None:
        """Starts all, and waits until the sentinels could replace the primary."""
        for name in ("primary", "replica"):
            self.data.append(Node(self._program, self._folder / name))
            self.data[-1].start()
        primary, replica = self.data
        replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        for number in range(SENTINELS):
            node = SentinelNode(self._program, self._folder / f"sentinel{number}", primary.port)
            self.sentinels.append(node)
            node.start()
        _wait("the sentinels know each other", lambda: all(s.could_replace() for s in self.sentinels))
        _wait("the replica is in step", replica.is_in_step)

    def kill(self, node: Node | None = None) -> None:
        """SIGKILL to one node, or to all."""
        for doomed in [*self.data, *self.sentinels] if node is None else [node]:
            doomed.kill()

    def primary(self) -> Node:
        """In the eyes of the first sentinel that lives."""
        sentinel = next(node for node in self.sentinels if node.pid() is not None)
        return next(node for node in self.data if node.port == sentinel.view()["port"])

    def wait_replaced(self, old: Node, asking: Sequence[SentinelNode]) -> None:
        """Until these sentinels name another primary, and it is one."""
        (new,) = (node for node in self.data if node is not old)

        def is_replaced() -> bool:
            named = {node.view()["port"] for node in asking}
            return named == {new.port} and new.ask("INFO", "replication")["role"] == "master"

        _wait(f"port {old.port} is replaced", is_replaced)


@contextlib.contextmanager
def private_sentinel() -> Iterator[PrivateSentinels]:
    """A primary that is watched; ServerMissing when there is no redis-server."""
    program = servers.find_program("redis-server", "valkey-server")
    with servers.private_folder() as folder:
        watched = PrivateSentinels(program, folder)
        try:
            watched.start()
            yield watched
        finally:
            watched.kill()
