"""The hot store on Redis or Valkey: standalone, Sentinel or Cluster (design: state.md, the fence).

Every write is one Lua script (``lua/*.lua``, each with its contract in its header) on keys of one hash
slot. A call is one command on one connection with one deadline that covers waiting for a connection too;
nothing is retried but ``NOSCRIPT``, which means that the script did not run. What the server answers is
bytes; it is decoded here, strictly.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.resources
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import msgspec
import redis.asyncio as redis_asyncio
from redis import exceptions as redis_errors
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from state_service.core import keys, members
from state_service.core.changes import unresolved_json, write_entry
from state_service.ports import (
    Acquired,
    Acquisition,
    Applied,
    Code,
    Found,
    HotStore,
    Lease,
    Op,
    OpName,
    Phase,
    Read,
    Registered,
    Scope,
    StoreCorrupt,
    StoreUnavailable,
)
from turnfence import records as r
from turnfence.axes import CallStatus

OLDEST_SERVER = (6, 2)
EVENTS_AT_ONCE = 500
BURY_KEYS_AT_ONCE = 1000  # well below what Lua can unpack, and short enough for others
FIELDS_AT_ONCE = 500  # well below what Lua's unpack takes

OWN_KEYS = (keys.STATE, keys.LOCK, keys.DIRTY, keys.OUTBOX, keys.KEYS)  # KEYS[1..5] of all but lease.lua
RENEWED_KEYS = tuple(key for key in keys.CONVERSATION_KEYS if key not in OWN_KEYS)

Argument = str | int


# --- scripts --------------------------------------------------------------------------------------


class Script(msgspec.Struct, frozen=True):
    """The text of a script and the name that the server knows it by."""

    text: str
    sha: str


def _script(*parts: str) -> Script:
    folder = importlib.resources.files("state_service.adapters") / "lua"
    text = "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in parts)
    return Script(text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


RENEW = _script("ops", "renew")
UNDO = _script("ops", "undo")
FLUSH = _script("ops", "flush")
REGISTER = _script("ops", "register")
ABANDON = _script("ops", "abandon")
LEASE = _script("lease")
CANCEL = _script("cancel")
BURY = _script("bury")
READ = _script("read")


# --- operations as arguments ----------------------------------------------------------------------

_ARGUMENTS: Mapping[OpName, Callable[[Op], tuple[Argument, ...]]] = {
    OpName.HDEL: lambda op: (op.field,),
    OpName.SET: lambda op: (op.value,),
    OpName.DEL: lambda op: (),
    OpName.UNLIST: lambda op: (),
    OpName.LPUSH_TRIM: lambda op: (op.value, op.number),
    OpName.JAPPEND: lambda op: (op.field, op.value),
    OpName.EXPIRE: lambda op: (op.number,),
    OpName.XADD: lambda op: (op.field, op.value),
    OpName.DIRTY: lambda op: (op.field,),
    OpName.OUTBOX: lambda op: (op.field, op.value),
    OpName.CLEAN: lambda op: (op.field, op.number),
    OpName.UNLOCK: lambda op: (),
}
_KEYLESS = frozenset({OpName.DIRTY, OpName.OUTBOX, OpName.CLEAN, OpName.UNLOCK})


class Encoded(msgspec.Struct, frozen=True):
    """Operations as a script takes them: all key suffixes, and flat arguments that point into them."""

    suffixes: tuple[str, ...]
    arguments: tuple[Argument, ...]


def encode_ops(ops: Sequence[Op], known: Sequence[str]) -> Encoded:
    """``known``: the key suffixes that come first in KEYS anyway. Neighbouring HSETs of one key become
    one, and all DIRTYs. Raises ValueError for operations that no server should ever see."""
    check_ops(ops)
    places = {suffix: place for place, suffix in enumerate(known, start=1)}
    arguments: list[Argument] = []
    count = 0
    for name, key, args in _merged(ops):
        place = 0 if name in _KEYLESS else places.setdefault(key, len(places) + 1)
        arguments += (name, place, len(args), *args)
        count += 1
    return Encoded(suffixes=tuple(places), arguments=(count, *arguments))


def check_ops(ops: Sequence[Op]) -> None:
    """Keys where they belong, and no field that one call both sets and appends to: the script checks a
    stored array before it writes anything."""
    for op in ops:
        if (op.op in _KEYLESS) != (op.key == ""):
            raise ValueError(f"{op.op} {'takes no' if op.key else 'needs a'} key")
    appended = {(op.key, op.field) for op in ops if op.op is OpName.JAPPEND}
    if appended and any((op.key, op.field) in appended for op in ops if op.op is OpName.HSET):
        raise ValueError("a field is both set and appended to")


def _merged(ops: Sequence[Op]) -> Iterator[tuple[OpName, str, tuple[Argument, ...]]]:
    marked: list[str] = []
    if all(op.op is not OpName.CLEAN for op in ops):  # else their order counts
        marked = list(dict.fromkeys(op.field for op in ops if op.op is OpName.DIRTY))
        ops = [op for op in ops if op.op is not OpName.DIRTY]
    for is_hset, run in groupby(ops, key=lambda op: op.op is OpName.HSET):
        if is_hset:
            yield from _merged_hsets(run)
        else:
            for op in run:
                yield op.op, op.key, _ARGUMENTS[op.op](op)
    for first in range(0, len(marked), FIELDS_AT_ONCE):
        yield OpName.DIRTY, "", tuple(marked[first : first + FIELDS_AT_ONCE])


def _merged_hsets(run: Iterable[Op]) -> Iterator[tuple[OpName, str, tuple[Argument, ...]]]:
    by_key: dict[str, list[Op]] = {}
    for op in run:
        by_key.setdefault(op.key, []).append(op)
    for key, sets in by_key.items():
        for first in range(0, len(sets), FIELDS_AT_ONCE):
            part = sets[first : first + FIELDS_AT_ONCE]
            yield OpName.HSET, key, tuple(text for op in part for text in (op.field, op.value))


def content_hash(ops: Sequence[Op]) -> str:
    """Identity of what a flush writes: equal for a repeat, whatever the time."""
    return hashlib.sha256(msgspec.json.encode(ops)).hexdigest()[:32]


# --- answers --------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    """Bytes from the server as text; StoreCorrupt when they are no UTF-8."""
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise StoreCorrupt("a stored value is no UTF-8") from error


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _pairs(flat: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _stream_entry(entry: Any) -> tuple[int, str]:
    entry_id, fields = entry
    return int(_text(entry_id).partition("-")[0]), _text(fields[1])


class _Shape(msgspec.Struct, frozen=True):
    """How a plain read is sent when it names no arguments, and how its answer is understood."""

    decode: Callable[[Any], Any]
    default: tuple[Argument, ...] = ()
    suffix: tuple[Argument, ...] = ()


_READS: Mapping[str, _Shape] = {
    "HGETALL": _Shape(lambda raw: {_text(field): _text(value) for field, value in _pairs(raw)}),
    "HGET": _Shape(_text_or_none),
    "GET": _Shape(_text_or_none),
    "LRANGE": _Shape(lambda raw: [_text(item) for item in raw], default=(0, -1)),
    "SMEMBERS": _Shape(lambda raw: [_text(item) for item in raw]),
    "ZRANGE": _Shape(
        lambda raw: [(_text(member), int(_text(score))) for member, score in _pairs(raw)],
        default=(0, -1),
        suffix=("WITHSCORES",),
    ),
    "XRANGE": _Shape(lambda raw: [_stream_entry(entry) for entry in raw], default=("-", "+")),
    "EXISTS": _Shape(bool),
}


def _read_arguments(reads: Sequence[Read]) -> Iterator[Argument]:
    for read in reads:
        if read.command not in _READS:
            raise ValueError(f"{read.command} is no plain read")
        shape = _READS[read.command]
        args = (*(read.args or shape.default), *shape.suffix)
        yield from (read.command, len(args), *args)


def _decoded(read: Read, raw: Any) -> Any:
    try:
        return _READS[read.command].decode(raw)
    except (ValueError, IndexError) as error:
        raise StoreCorrupt(f"{read.key} has another shape") from error


# --- errors ---------------------------------------------------------------------------------------

# Error words of the server that say "not now". Everything else it refuses is about what is stored.
_UNAVAILABLE_WORDS = frozenset(
    {"OOM", "READONLY", "LOADING", "BUSY", "UNKILLABLE", "MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN"}
    | {"TRYAGAIN", "MOVED", "ASK", "NOSCRIPT", "NOAUTH", "NOPERM", "WRONGPASS"}
)
_UNAVAILABLE = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.OutOfMemoryError,
    redis_errors.ReadOnlyError,
    redis_errors.NoScriptError,
    redis_errors.NoPermissionError,
    redis_errors.TryAgainError,
    redis_errors.AskError,
    redis_errors.ClusterError,
    redis_errors.RedisClusterException,
    OSError,
)


def _as_ours(error: Exception) -> Exception:
    """A driver's error as an error of the port. ValueError: our own call was malformed."""
    message = str(error) or type(error).__name__
    if isinstance(error, _UNAVAILABLE):
        return StoreUnavailable(f"the hot store: {message}")
    word = message.partition(" ")[0]
    if word == "INPUT":
        return ValueError(f"a script refused its input: {message}")
    if word in _UNAVAILABLE_WORDS or "OOM command not allowed" in message:
        return StoreUnavailable(f"the hot store: {message}")
    return StoreCorrupt(f"the hot store: {message}")


# --- the store ------------------------------------------------------------------------------------


class Client(Protocol):
    """What all of redis-py's asyncio clients can do."""

    async def execute_command(self, *args: Any, **options: Any) -> Any: ...

    async def aclose(self) -> None: ...


class _NoPlace(StoreUnavailable):
    """All connections were taken for as long as the caller could wait."""


class _Lane:
    """A client with as many places as it has connections: who finds none free waits, up to a limit."""

    def __init__(self, client: Client, places: int) -> None:
        self._client = client
        self._places = asyncio.Semaphore(places)

    @asynccontextmanager
    async def place(self, within_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(within_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise _NoPlace(f"no connection to the hot store was free within {within_s:g} s") from error
        try:
            yield
        finally:
            self._places.release()

    async def send(self, *args: Argument, deadline_s: float, **options: Any) -> Any:
        """One command, from a place. Raises the errors of the port, and redis' NoScriptError.

        A caller that is cancelled, or whose deadline passes, takes its connection with it: redis-py
        closes a connection whose answer was not read.
        """
        try:
            async with asyncio.timeout(deadline_s):
                return await self._client.execute_command(*args, **options)
        except TimeoutError as error:
            if isinstance(self._client, _Cluster):
                self._client.look_again()
            raise StoreUnavailable(f"the hot store did not answer within {deadline_s:g} s") from error
        except redis_errors.NoScriptError:
            raise
        except (redis_errors.RedisError, redis_errors.RedisClusterException, OSError) as error:
            raise _as_ours(error) from error

    async def call(self, *args: Argument, deadline_s: float, **options: Any) -> Any:
        """``send`` with one deadline over the wait for a place and the command."""
        clock = asyncio.get_running_loop().time
        end = clock() + deadline_s
        async with self.place(deadline_s):
            return await self.send(*args, deadline_s=max(end - clock(), 0.001), **options)

    async def close(self) -> None:
        await self._client.aclose()


class RedisHot(HotStore):
    """``calls`` carries scripts; ``waits`` carries blocking reads, so that watchers never delay a turn."""

    def __init__(
        self,
        calls: Client,
        waits: Client,
        *,
        prefix: str,
        socket_timeout: float,
        max_connections: int,
        is_cluster: bool = False,
    ) -> None:
        self._calls = _Lane(calls, max_connections)
        self._waits = _Lane(waits, max_connections)
        self._prefix = prefix
        self._deadline_s = socket_timeout
        self._is_cluster = is_cluster

    async def close(self) -> None:
        await self._calls.close()
        await self._waits.close()

    async def _run(self, script: Script, names: Sequence[str], arguments: Iterable[Argument]) -> Any:
        """Run a script by its hash; a server that does not know it gets its text, once."""
        tail = (len(names), *names, *arguments)
        try:
            return await self._calls.call("EVALSHA", script.sha, *tail, deadline_s=self._deadline_s)
        except redis_errors.NoScriptError:
            pass
        return await self._calls.call("EVAL", script.text, *tail, deadline_s=self._deadline_s)

    def _names(self, scope: Scope | r.TurnRef, suffixes: Iterable[str]) -> list[str]:
        """Full key names. Ids were checked at the door; braces would let a key leave its slot (L12)."""
        ids = (scope.organ_id, scope.conversation_id)
        if not all(ids) or any(mark in part for part in ids for mark in "{}:"):
            raise ValueError("an organisation or conversation id that cannot be part of a key")
        base = f"{self._prefix}{keys.tag(*ids)}:"
        return [base + suffix for suffix in suffixes]

    # --- begin and end ---

    async def acquire(
        self,
        scope: Scope,
        *,
        run_id: str,
        user_id: str,
        token: str,
        lease_ms: int,
        ttl_ms: int,
        now_ms: int,
        baseline: int | None,
    ) -> Acquired:
        names = self._names(scope, (*OWN_KEYS, *RENEWED_KEYS))
        arguments = (run_id, user_id, token, lease_ms, ttl_ms, now_ms, "" if baseline is None else baseline)
        kind, version, held, data_version, data_seq, previous, busy_ms = await self._run(
            RENEW, names, arguments
        )
        return Acquired(
            kind=Acquisition(_text(kind)),
            version=version,
            token=_text(held),
            data_version=data_version,
            data_seq=data_seq,
            previous_run=_text(previous),
            busy_for_ms=busy_ms,
        )

    async def undo_acquire(self, turn: r.TurnRef, *, previous_run: str) -> None:
        arguments = (turn.version, turn.run_id, turn.lease_token, previous_run)
        await self._run(UNDO, self._names(turn, OWN_KEYS), arguments)

    async def extend_lease(self, turn: r.TurnRef, *, lease_ms: int) -> Lease:
        names = self._names(turn, (keys.LOCK,))
        held, cancel = await self._run(LEASE, names, (turn.run_id, turn.lease_token, lease_ms))
        return Lease(held=held == 1, cancel=_text(cancel))

    async def request_cancel(self, scope: Scope, run_id: str, reason: str) -> bool:
        return bool(await self._run(CANCEL, self._names(scope, (keys.LOCK,)), (run_id, reason)))

    async def bury(self, scope: Scope, doomed: Sequence[str], *, version: int, ttl_ms: int) -> None:
        names = self._names(scope, dict.fromkeys((keys.STATE, keys.LOCK, *doomed)))
        for first in range(2, max(3, len(names)), BURY_KEYS_AT_ONCE):
            part = [*names[:2], *names[first : first + BURY_KEYS_AT_ONCE]]
            await self._run(BURY, part, (version, ttl_ms))

    async def abandon(
        self, scope: Scope, run_id: str, ops: Sequence[Op], *, ttl_ms: int, now_ms: int
    ) -> bool:
        encoded = encode_ops(ops, OWN_KEYS)
        arguments = (run_id, now_ms, ttl_ms, content_hash(ops), *encoded.arguments)
        return bool(await self._run(ABANDON, self._names(scope, encoded.suffixes), arguments))

    # --- fenced writes ---

    async def apply(
        self,
        turn: r.TurnRef,
        ops: Sequence[Op],
        *,
        ttl_ms: int,
        now_ms: int,
        sequence: int = 0,
        stamp: tuple[int, int] | None = None,
        base_seq: int | None = None,
        phase: Phase = Phase.TURN,
    ) -> Applied:
        encoded = encode_ops(ops, OWN_KEYS)
        arguments = (
            *_fence(turn, now_ms, ttl_ms),
            sequence,
            content_hash(ops) if sequence else "",
            *(stamp if stamp is not None else ("", "")),
            base_seq if base_seq is not None else "",
            phase,
            *encoded.arguments,
        )
        code, data_seq = await self._run(FLUSH, self._names(turn, encoded.suffixes), arguments)
        return Applied(code=Code(code), data_seq=data_seq)

    async def register_write(
        self,
        turn: r.TurnRef,
        *,
        head: r.EvidenceHead,
        index_field: str,
        ops: Sequence[Op],
        ttl_ms: int,
        now_ms: int,
    ) -> Registered:
        task_id, node_id, evidence_id = head.task_id, head.node_id, head.evidence_id
        own = (*OWN_KEYS, keys.evidence(task_id, node_id), keys.writes(task_id), keys.UNRESOLVED)
        encoded = encode_ops(ops, own)
        arguments = (
            *_fence(turn, now_ms, ttl_ms),
            evidence_id,
            index_field,
            members.evidence(task_id, node_id, evidence_id),
            r.to_json(head),
            r.to_json(write_entry(head)),
            unresolved_json(head),
            *encoded.arguments,
        )
        code, data_seq, where, value = await self._run(
            REGISTER, self._names(turn, encoded.suffixes), arguments
        )
        found = _found(_text(where), _text(value), task_id)
        return Registered(code=Code(code), data_seq=data_seq, found=found)

    # --- reads ---

    async def read(self, scope: Scope, reads: Sequence[Read]) -> list[Any]:
        """One consistent view: nothing else runs between these reads. LRANGE and ZRANGE without
        arguments read everything, XRANGE takes ids; EXISTS answers bool."""
        if not reads:
            return []
        arguments = list(_read_arguments(reads))
        raw = await self._run(READ, self._names(scope, (read.key for read in reads)), arguments)
        return [_decoded(read, answer) for read, answer in zip(reads, raw, strict=True)]

    async def wait_events(
        self, scope: Scope, run_id: str, after: int, *, block_ms: int
    ) -> list[tuple[int, str]]:
        """At most ``EVENTS_AT_ONCE``. Who finds all of the watchers' connections taken waits for one
        as long as it would for an event, then looks once: it hears later, and hears all."""
        (name,) = self._names(scope, (keys.events(run_id),))
        place = ("STREAMS", name, f"{after}-0")
        block_s = max(block_ms, 1) / 1000
        try:
            async with self._waits.place(block_s):
                block: tuple[Argument, ...] = ("BLOCK", block_ms) if block_ms > 0 else ()
                command = ("XREAD", "COUNT", EVENTS_AT_ONCE, *block, *place)
                raw = await self._waits.send(*command, deadline_s=block_s + self._deadline_s)
        except _NoPlace:
            command = ("XREAD", "COUNT", EVENTS_AT_ONCE, *place)
            raw = await self._calls.call(*command, deadline_s=self._deadline_s)
        return [_stream_entry(entry) for entry in (raw[0][1] if raw else ())]

    # --- start-up ---

    async def check_server(self) -> list[str]:
        """What makes this server unfit, one sentence each, saying what to change; empty when it is fit.
        Raises ``StoreUnavailable`` when it does not answer."""
        options = {"target_nodes": RedisCluster.PRIMARIES} if self._is_cluster else {}
        raw = await self._calls.call("INFO", deadline_s=self._deadline_s, **options)
        by_node = all(isinstance(value, dict) for value in raw.values())  # a cluster of more than one
        servers = raw.values() if by_node else [raw]
        found = [problem for info in servers for problem in problems_of(info, is_cluster=self._is_cluster)]
        return list(dict.fromkeys(found))


def _fence(turn: r.TurnRef, now_ms: int, ttl_ms: int) -> tuple[Argument, ...]:
    """ARGV[1..6] of flush.lua and register.lua."""
    return turn.version, turn.run_id, turn.lease_token, turn.seen_seq, now_ms, ttl_ms


class _Place(msgspec.Struct, frozen=True, rename="camel"):
    """What the two write indexes have in common, and what only one of them has."""

    evidence_id: str
    status: CallStatus
    task_id: str = ""
    node_id: str = ""
    business_ok: bool | None = None
    not_before: int | None = None


def _found(where: str, value: str, task_id: str) -> Found | None:
    """``where``: the index that barred a write, '' for none. The ``writes`` index names no node."""
    if not where:
        return None
    try:
        place = msgspec.json.decode(value, type=_Place)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(f"an entry of {where} has another shape") from error
    entry = r.WriteIndexEntry(
        evidence_id=place.evidence_id,
        status=place.status,
        business_ok=place.business_ok,
        not_before=place.not_before,
    )
    found_in = place.task_id or task_id
    return Found(entry=entry, task_id=found_in, node_id=place.node_id, same_task=found_in == task_id)


def problems_of(info: Mapping[str, Any], *, is_cluster: bool) -> list[str]:
    """What INFO says that would lose data or cannot work; one sentence each."""
    version = str(info.get("redis_version", "0"))
    policy = info.get("maxmemory_policy", "noeviction")
    problems: list[str] = []
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        problems.append(f"the hot store is version {version}: {oldest} or newer is needed")
    if policy != "noeviction":
        problems.append(f"maxmemory-policy is {policy}, which evicts live state: set it to noeviction")
    if info.get("role", "master") != "master":
        problems.append("the hot store is a replica: give the address of its primary")
    if bool(info.get("cluster_enabled", 0)) and not is_cluster:
        problems.append("the hot store is a cluster: use a redis+cluster:// URL")
    return problems


# --- connecting -----------------------------------------------------------------------------------


def connect(url: str, *, prefix: str, socket_timeout: float, max_connections: int) -> RedisHot:
    """The store at a URL; connects at the first call. ``socket_timeout``: seconds that one call may take
    altogether. ``max_connections``: for calls, and as many again for watchers of events.

    ``redis://``, ``rediss://`` and ``unix://`` as redis-py has them;
    ``redis[s]+cluster://[user:password@]host:port[,host:port]``;
    ``redis[s]+sentinel://[user:password@]host:port[,host:port]/master[/db]``, where
    ``?sentinel_username=…&sentinel_password=…`` are for the sentinels themselves.
    Raises ValueError for any other URL.
    """
    make = _CONNECT.get(urlsplit(url).scheme)
    if make is None:
        raise ValueError(f"no URL of a hot store: it must begin with one of {', '.join(sorted(_CONNECT))}")

    def client() -> Any:
        made = make(url, _options(socket_timeout, max_connections))
        made.set_response_callback("XREAD", _as_it_came)
        return made

    return RedisHot(
        client(),
        client(),
        prefix=prefix,
        socket_timeout=socket_timeout,
        max_connections=max_connections,
        is_cluster=make is _connect_cluster,
    )


def _as_it_came(response: Any, **_options: Any) -> Any:
    return response


def _options(socket_timeout: float, max_connections: int) -> dict[str, Any]:
    """No retries (a script would run again), no time limit below ours (redis-py's own runs on
    asyncio.wait_for, which can swallow a cancellation), and RESP2, the same from every server."""
    return {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": socket_timeout,
        "max_connections": max_connections,
    }


def _connect_one(url: str, options: dict[str, Any]) -> Any:
    return redis_asyncio.Redis.from_url(url, **options)


def _connect_cluster(url: str, options: dict[str, Any]) -> Any:
    many = _many_hosts(url)
    nodes = [ClusterNode(host, port) for host, port in many.hosts]
    return _Cluster(
        startup_nodes=nodes,
        require_full_coverage=False,
        reinitialize_steps=0,  # else each fifth MOVED closes the connections of all other calls
        **many.options,
        **options,
    )


class _Cluster(RedisCluster):
    """redis-py's client, and what it lacks to find its way after a failover or a resharding."""

    def look_again(self) -> None:
        """The next call asks who serves what. redis-py itself does so when a connection breaks; a machine
        that is cut off breaks none, and its successor would never be found."""
        self._initialize = True

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            await self.initialize()  # redis-py would send the first calls to any node
            if args[0] == "XREAD":
                # redis-py would ask a server where the key is: always the same one, dead or not
                options["target_nodes"] = self.get_node_from_key(args[args.index("STREAMS") + 1])
            return await super().execute_command(*args, **options)
        except (KeyError, redis_errors.SlotNotCoveredError) as error:
            self.look_again()
            raise redis_errors.SlotNotCoveredError("no node is known to serve this key") from error

    def get_node(self, *args: Any, **wanted: Any) -> ClusterNode:
        """redis-py follows an ASK to a node that it has not heard of yet as if it were None."""
        found = super().get_node(*args, **wanted)
        if found is None:
            raise redis_errors.ClusterError("a slot is on its way to a node that is not known yet")
        return found


def _connect_sentinel(url: str, options: dict[str, Any]) -> Any:
    many = _many_hosts(url)
    master, _, db = many.path.partition("/")
    if not master:
        raise ValueError("a sentinel URL ends in /master or /master/db")
    own = {key: many.options.pop(f"sentinel_{key}", None) for key in ("username", "password")}
    secure = {key: value for key, value in many.options.items() if key.startswith("ssl")}
    settings = {**options, **secure, **own}
    sentinel = _Sentinels(many.hosts, sentinel_kwargs=settings)
    client = sentinel.master_for(master, db=int(db or 0), **many.options, **options)
    return _BehindSentinel(sentinel, client)


class _Sentinels(Sentinel):
    """Asked by one caller at a time: redis-py moves the one that answered to the front of its list, and two
    who do that at once lose another from it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self._asking = asyncio.Lock()

    async def discover_master(self, service_name: str) -> Any:
        async with self._asking:
            try:
                return await super().discover_master(service_name)
            except asyncio.CancelledError:  # one that is silent must not be the first again
                self.sentinels.append(self.sentinels.pop(0))
                raise


class _BehindSentinel:
    """The primary's client, together with the sentinels' own: who closes one closes all."""

    def __init__(self, sentinel: Any, client: Any) -> None:
        self._sentinel = sentinel
        self._client = client
        self.execute_command = client.execute_command
        self.set_response_callback = client.set_response_callback

    async def aclose(self) -> None:
        await self._client.aclose()
        await self._sentinel.aclose()


_CONNECT: Mapping[str, Callable[[str, dict[str, Any]], Any]] = {
    "redis": _connect_one,
    "rediss": _connect_one,
    "unix": _connect_one,
    "redis+cluster": _connect_cluster,
    "rediss+cluster": _connect_cluster,
    "redis+sentinel": _connect_sentinel,
    "rediss+sentinel": _connect_sentinel,
}


class _ManyHosts(msgspec.Struct, frozen=True):
    hosts: list[tuple[str, int]]
    path: str
    options: dict[str, Any]


def _many_hosts(url: str) -> _ManyHosts:
    """A URL with several hosts; credentials and ``?options`` are read as redis-py reads them."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    scheme = parts.scheme.partition("+")[0]
    options: dict[str, Any] = dict(parse_url(f"{scheme}://{user}{at}localhost?{parts.query}"))
    options.pop("host", None)
    if options.pop("connection_class", None) is SSLConnection:
        options["ssl"] = True
    return _ManyHosts(
        hosts=[_host_and_port(host) for host in hosts.split(",")],
        path=unquote(parts.path.strip("/")),
        options=options,
    )


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{text!r} is no host:port")
    return host.strip("[]"), int(port)
