"""The hot store on Redis or Valkey: standalone, Sentinel or Cluster (design: state.md, the fence).

Every write is one Lua script (``lua/*.lua``, each with its contract in its header) on keys of one hash
slot. A call is one command on one connection with one deadline that covers waiting for a connection too;
nothing is retried but ``NOSCRIPT``, which means that the script did not run. What the server answers is
bytes; it is decoded here, strictly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, runtime_checkable

import msgspec
from redis import exceptions as redis_errors
from redis.asyncio.cluster import RedisCluster

from state_service.adapters.redis_scripts import (
    ABANDON,
    BURY,
    CANCEL,
    FLUSH,
    LEASE,
    READ,
    REGISTER,
    RENEW,
    UNDO,
    Argument,
    Script,
    content_hash,
    encode_ops,
)
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

OWN_KEYS = (keys.STATE, keys.LOCK, keys.DIRTY, keys.OUTBOX, keys.KEYS)  # KEYS[1..5] of all but lease.lua
RENEWED_KEYS = tuple(key for key in keys.CONVERSATION_KEYS if key not in OWN_KEYS)


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


@runtime_checkable
class Routed(Protocol):
    """A client that knows which node serves what, and may be wrong."""

    def look_again(self) -> None: ...


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
            if isinstance(self._client, Routed):
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
