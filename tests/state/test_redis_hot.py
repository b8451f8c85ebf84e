"""The hot store against real servers: what each script answers, and that it writes all or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio as redis_asyncio

from state_service.adapters import redis_connect, redis_hot, redis_scripts
from state_service.adapters.redis_connect import connect
from state_service.adapters.redis_hot import RedisHot, problems_of
from state_service.core import keys, members
from state_service.ports import (
    Acquired,
    Acquisition,
    Applied,
    Code,
    Lease,
    Op,
    OpName,
    Phase,
    Read,
    Scope,
    StoreCorrupt,
    StoreUnavailable,
)
from tests import servers
from turnfence import records as r
from turnfence.axes import CallStatus, SideEffect

LEASE_MS, TTL_MS, NOW_MS = 30_000, 600_000, 1_700_000_000_000
SCOPE = Scope("organ", "conversation")
TASK, NODE = "t1", "n1"
_numbers = itertools.count(1)


class Bench:
    """A store of its own prefix on a shared server, and a view of what really lies there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.prefix = f"test{next(_numbers)}:"
        self.hot = connect(url, prefix=self.prefix, socket_timeout=5, max_connections=8)
        self.raw: Any = redis_asyncio.Redis.from_url(url, decode_responses=True, protocol=2)

    def key(self, suffix: str, scope: Scope = SCOPE) -> str:
        return f"{self.prefix}{keys.tag(scope.organ_id, scope.conversation_id)}:{suffix}"

    async def dump(self) -> dict[str, Any]:
        """Every key of the prefix with its content."""
        found: dict[str, Any] = {}
        async for key in self.raw.scan_iter(match=f"{self.prefix}*", count=1000):
            found[key] = await self._content(key)
        return found

    async def _content(self, key: str) -> Any:
        match await self.raw.type(key):
            case "hash":
                return await self.raw.hgetall(key)
            case "list":
                return await self.raw.lrange(key, 0, -1)
            case "set":
                return sorted(await self.raw.smembers(key))
            case "zset":
                return await self.raw.zrange(key, 0, -1, withscores=True)
            case "stream":
                return await self.raw.xrange(key)
            case _:
                return await self.raw.get(key)

    async def assert_all_expire(self) -> None:
        for key in await self.dump():
            assert 0 < await self.raw.pttl(key) <= max(TTL_MS, LEASE_MS), key

    async def state(self) -> dict[str, str]:
        found: dict[str, str] = await self.raw.hgetall(self.key(keys.STATE))
        return found

    async def acquire(self, run: str = "r1", **changes: Any) -> Acquired:
        wanted: dict[str, Any] = {
            "run_id": run,
            "user_id": "user",
            "token": f"token-{run}",
            "lease_ms": LEASE_MS,
            "ttl_ms": TTL_MS,
            "now_ms": NOW_MS,
            "baseline": 0,
        }
        return await self.hot.acquire(changes.pop("scope", SCOPE), **{**wanted, **changes})

    async def begin(self, run: str = "r1", **changes: Any) -> r.TurnRef:
        got = await self.acquire(run, **changes)
        assert got.kind is Acquisition.ACQUIRED
        return turn_of(run, got)

    async def apply(self, turn: r.TurnRef, *ops: Op, **changes: Any) -> Applied:
        return await self.hot.apply(turn, ops, **{"ttl_ms": TTL_MS, "now_ms": NOW_MS, **changes})

    async def register(self, turn: r.TurnRef, head: r.EvidenceHead, *ops: Op, **changes: Any) -> Any:
        wanted = {"ttl_ms": TTL_MS, "now_ms": NOW_MS, "index_field": keys.write_field("pay", "k1"), **changes}
        return await self.hot.register_write(turn, head=head, ops=ops, **wanted)


def turn_of(run: str, got: Acquired, seen_seq: int = 0) -> r.TurnRef:
    return r.TurnRef(
        organ_id=SCOPE.organ_id,
        conversation_id=SCOPE.conversation_id,
        run_id=run,
        version=got.version,
        lease_token=got.token,
        seen_seq=seen_seq,
    )


def hset(key: str, field: str, value: str) -> Op:
    return Op(OpName.HSET, key=key, field=field, value=value)


GRAPH = keys.graph(TASK)
SET_NODE = hset(GRAPH, "n1", "{}")


@pytest.fixture(params=["valkey", "redis_private"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    server: servers.PrivateRedis = request.getfixturevalue(request.param)
    bench = Bench(server.url)
    yield bench
    await bench.hot.close()
    await bench.raw.aclose()


# --- renew.lua ------------------------------------------------------------------------------------


async def test_an_unknown_conversation_writes_nothing(bench: Bench) -> None:
    assert await bench.acquire(baseline=None) == Acquired(kind=Acquisition.UNKNOWN)
    assert await bench.dump() == {}


async def test_the_version_is_one_above_both_stores(bench: Bench) -> None:
    assert (await bench.acquire("r1", baseline=6)).version == 7
    await bench.raw.delete(bench.key(keys.LOCK))
    assert (await bench.acquire("r2", baseline=3)).version == 8
    await bench.raw.delete(bench.key(keys.LOCK))
    assert (await bench.acquire("r3", baseline=20)).version == 21
    await bench.assert_all_expire()


async def test_the_same_run_gets_the_same_answer(bench: Bench) -> None:
    before = await bench.begin("r0")
    await bench.apply(before, SET_NODE, Op(OpName.UNLOCK))
    first = await bench.acquire("r1")
    assert (first.version, first.previous_run, first.data_version, first.data_seq) == (2, "r0", 1, 1)
    await bench.apply(turn_of("r1", first), SET_NODE, sequence=1)
    state = await bench.state()

    again = await bench.acquire("r1", token="another", now_ms=NOW_MS + 5)
    assert again == first
    assert await bench.state() == state  # the flush sequence above all


async def test_the_same_run_returns_after_its_lease_ran_out(bench: Bench) -> None:
    first = await bench.acquire("r1")
    await bench.raw.delete(bench.key(keys.LOCK))
    again = await bench.acquire("r1", token="fresh")
    assert again == msgspec.structs.replace(first, token="fresh")
    assert (await bench.hot.extend_lease(turn_of("r1", again), lease_ms=LEASE_MS)).held


async def test_a_baseline_that_overtook_the_same_run_gives_a_new_version(bench: Bench) -> None:
    before = await bench.begin("r0")
    await bench.apply(before, SET_NODE, Op(OpName.UNLOCK))
    first = await bench.acquire("r1")
    behind = await bench.acquire("r1", baseline=first.version)
    assert behind == msgspec.structs.replace(first, version=first.version + 1)
    assert behind.previous_run == "r0"


async def test_a_run_whose_turn_ended_cleanly_begins_anew(bench: Bench) -> None:
    turn = await bench.begin("r1")
    await bench.apply(turn, hset(keys.STATE, "lastTraceId", ""), Op(OpName.UNLOCK))
    again = await bench.acquire("r1")
    assert (again.version, again.previous_run) == (turn.version + 1, "")


async def test_another_run_finds_it_busy_for_the_rest_of_the_lease(bench: Bench) -> None:
    await bench.begin("r1")
    before = await bench.dump()
    busy = await bench.acquire("r2")
    assert busy.kind is Acquisition.BUSY
    assert 0 < busy.busy_for_ms <= LEASE_MS
    assert await bench.dump() == before


@pytest.mark.parametrize("locked", [True, False])
async def test_another_user_is_refused_and_writes_nothing(bench: Bench, locked: bool) -> None:
    await bench.begin("r1")
    if not locked:
        await bench.raw.delete(bench.key(keys.LOCK))
    before = await bench.dump()
    assert await bench.acquire("r2", user_id="thief") == Acquired(kind=Acquisition.FORBIDDEN)
    assert await bench.dump() == before


async def test_a_deleted_conversation_is_told_apart(bench: Bench) -> None:
    await bench.raw.hset(bench.key(keys.STATE), mapping={"version": 3, "deleted": "1"})
    before = await bench.dump()
    assert await bench.acquire("r1", user_id="anybody") == Acquired(kind=Acquisition.DELETED)
    assert await bench.dump() == before


async def test_acquire_renews_what_is_there_and_leaves_the_stamp(bench: Bench) -> None:
    turn = await bench.begin("r1")
    await bench.apply(turn, Op(OpName.LPUSH_TRIM, key=keys.DIALOGUE, value="m", number=5), ttl_ms=1000)
    await bench.apply(turn, Op(OpName.DIRTY, field="m"), Op(OpName.UNLOCK), ttl_ms=1000)
    stamp = [(await bench.state())[name] for name in ("dataVersion", "dataSeq")]
    got = await bench.acquire("r2")
    assert (got.data_version, got.data_seq, got.previous_run) == (1, 2, "r1")
    assert [(await bench.state())[name] for name in ("dataVersion", "dataSeq")] == stamp
    for key in (keys.STATE, keys.DIALOGUE, keys.DIRTY):
        assert await bench.raw.pttl(bench.key(key)) > 1000
    assert await bench.raw.exists(bench.key(keys.RECORDS)) == 0


async def test_of_many_runs_at_once_one_acquires(bench: Bench) -> None:
    answers = await asyncio.gather(*(bench.acquire(f"r{i}") for i in range(24)))
    assert sorted(got.kind for got in answers) == ["ACQUIRED"] + ["BUSY"] * 23
    assert (await bench.state())["version"] == "1"


async def test_two_organisations_never_meet(bench: Bench) -> None:
    other = Scope("other", SCOPE.conversation_id)
    await bench.begin("r1")
    assert (await bench.acquire("r2", scope=other, user_id="somebody")).kind is Acquisition.ACQUIRED
    assert await bench.hot.read(other, [Read("HGET", keys.STATE, ("lastTraceId",))]) == ["r2"]


# --- undo.lua -------------------------------------------------------------------------------------


async def test_undo_leaves_no_key_of_an_unknown_conversation(bench: Bench) -> None:
    turn = await bench.begin("r1")
    await bench.hot.undo_acquire(turn, previous_run="")
    assert await bench.dump() == {}
    await bench.hot.undo_acquire(turn, previous_run="")
    assert await bench.dump() == {}


async def test_undo_restores_the_owner_and_never_the_version(bench: Bench) -> None:
    dead = await bench.begin("r1")
    await bench.apply(dead, SET_NODE)
    await bench.raw.delete(bench.key(keys.LOCK))
    got = await bench.acquire("r2")
    await bench.hot.undo_acquire(turn_of("r2", got), previous_run=got.previous_run)
    state = await bench.state()
    assert (state["lastTraceId"], state["version"]) == ("r1", "2")
    assert await bench.raw.exists(bench.key(keys.LOCK)) == 0
    assert (await bench.apply(dead, SET_NODE)).code is Code.FENCED
    assert (await bench.acquire("r2")).version == 3


async def test_undo_of_somebody_elses_turn_does_nothing(bench: Bench) -> None:
    old = await bench.begin("r1")
    await bench.raw.delete(bench.key(keys.LOCK))
    await bench.begin("r2")
    before = await bench.dump()
    await bench.hot.undo_acquire(old, previous_run="")
    assert await bench.dump() == before


# --- lease.lua ------------------------------------------------------------------------------------


async def test_the_lease_is_extended_for_its_holder_alone(bench: Bench) -> None:
    turn = await bench.begin("r1", lease_ms=5000)
    for stranger in (
        msgspec.structs.replace(turn, lease_token="other"),
        msgspec.structs.replace(turn, run_id="r2"),
    ):
        assert await bench.hot.extend_lease(stranger, lease_ms=LEASE_MS) == Lease(held=False)
    assert await bench.raw.pttl(bench.key(keys.LOCK)) <= 5000
    assert await bench.hot.extend_lease(turn, lease_ms=LEASE_MS) == Lease(held=True)
    assert await bench.raw.pttl(bench.key(keys.LOCK)) > 5000


async def test_the_lease_brings_a_cancel_back(bench: Bench) -> None:
    turn = await bench.begin("r1")
    await bench.raw.hset(bench.key(keys.LOCK), "cancel", "USER")
    assert await bench.hot.extend_lease(turn, lease_ms=LEASE_MS) == Lease(held=True, cancel="USER")


async def test_a_lost_lease_is_not_made_again(bench: Bench) -> None:
    turn = await bench.begin("r1")
    await bench.raw.delete(bench.key(keys.LOCK))
    assert await bench.hot.extend_lease(turn, lease_ms=LEASE_MS) == Lease(held=False)
    assert await bench.raw.exists(bench.key(keys.LOCK)) == 0
    with pytest.raises(ValueError, match="INPUT lease"):
        await bench.hot.extend_lease(turn, lease_ms=0)


# --- flush.lua: the guards ------------------------------------------------------------------------


async def test_a_flush_is_applied_and_stamped(bench: Bench) -> None:
    turn = await bench.begin("r1", baseline=4)
    assert await bench.apply(turn, SET_NODE, base_seq=9) == Applied(code=Code.APPLIED, data_seq=10)
    assert await bench.apply(turn, SET_NODE, base_seq=3) == Applied(code=Code.APPLIED, data_seq=11)
    state = await bench.state()
    assert (state["dataVersion"], state["dataSeq"], state["updatedAt"]) == ("5", "11", str(NOW_MS))
    assert "createdBy" not in state
    await bench.assert_all_expire()


async def test_a_repeat_is_told_apart_from_another_flush(bench: Bench) -> None:
    turn = await bench.begin("r1")
    push = Op(OpName.LPUSH_TRIM, key=keys.DIALOGUE, value="m1", number=9)
    assert await bench.apply(turn, push, sequence=1) == Applied(Code.APPLIED, 1)
    before = await bench.dump()
    assert await bench.apply(turn, push, sequence=1, now_ms=NOW_MS + 1) == Applied(Code.ALREADY, 1)
    assert (await bench.apply(turn, SET_NODE, sequence=1)).code is Code.GAP
    assert (await bench.apply(turn, push, sequence=3)).code is Code.GAP
    assert await bench.dump() == before
    assert await bench.apply(turn, push, sequence=2) == Applied(Code.APPLIED, 2)
    assert (await bench.apply(turn, push, sequence=1)).code is Code.GAP


async def test_an_unnumbered_flush_leaves_the_numbering_alone(bench: Bench) -> None:
    turn = await bench.begin("r1")
    assert (await bench.apply(turn, SET_NODE, sequence=1)).code is Code.APPLIED
    assert (await bench.apply(turn, SET_NODE)).code is Code.APPLIED
    assert (await bench.apply(turn, SET_NODE, sequence=1)).code is Code.ALREADY


async def test_an_older_turn_and_a_stranger_are_fenced(bench: Bench) -> None:
    old = await bench.begin("r1")
    await bench.raw.delete(bench.key(keys.LOCK))
    turn = await bench.begin("r2")
    before = await bench.dump()
    for stranger in (
        old,
        msgspec.structs.replace(old, version=turn.version),
        msgspec.structs.replace(turn, version=turn.version + 1),
        msgspec.structs.replace(turn, run_id="r3"),
    ):
        assert (await bench.apply(stranger, SET_NODE)).code is Code.FENCED
    assert await bench.dump() == before


async def test_a_deleted_conversation_is_fenced(bench: Bench) -> None:
    turn = await bench.begin("r1")
    await bench.raw.hset(bench.key(keys.STATE), "deleted", "1")
    assert (await bench.apply(turn, SET_NODE)).code is Code.FENCED


async def test_loss_is_no_conflict(bench: Bench) -> None:
    turn = await bench.begin("r1")
    await bench.apply(turn, SET_NODE)
    ahead = msgspec.structs.replace(turn, seen_seq=2)
    assert await bench.apply(ahead, SET_NODE) == Applied(Code.LOST, 1)
    await bench.raw.hdel(bench.key(keys.STATE), "dataVersion", "dataSeq")
    assert (await bench.apply(ahead, SET_NODE)).code is Code.MISSING
    await bench.raw.delete(bench.key(keys.STATE))
    before = await bench.dump()
    assert (await bench.apply(turn, SET_NODE)).code is Code.MISSING
    assert await bench.dump() == before


async def test_a_stamp_guards_what_was_seen(bench: Bench) -> None:
    turn = await bench.begin("r1")
    assert (await bench.apply(turn, SET_NODE, stamp=(1, 1))).code is Code.GAP
    assert await bench.apply(turn, SET_NODE, stamp=(0, 0)) == Applied(Code.APPLIED, 1)
    before = await bench.dump()
    for stamp in ((0, 0), (1, 0), (1, 2), (2, 1)):
        assert (await bench.apply(turn, SET_NODE, stamp=stamp)).code is Code.GAP
    assert await bench.dump() == before
    assert await bench.apply(turn, SET_NODE, stamp=(1, 1)) == Applied(Code.APPLIED, 2)


# --- flush.lua: the operations --------------------------------------------------------------------


async def content(bench: Bench, *ops: Op, on: Sequence[Op] = ()) -> dict[str, Any]:
    """What lies there after ``on`` and then ``ops``, by suffix."""
    turn = await bench.begin()
    if on:
        assert (await bench.apply(turn, *on)).code is Code.APPLIED
    assert (await bench.apply(turn, *ops)).code is Code.APPLIED
    await bench.assert_all_expire()
    start = len(bench.key(""))
    return {key[start:]: value for key, value in (await bench.dump()).items()}


DIALOGUE_OPS = [Op(OpName.LPUSH_TRIM, key=keys.DIALOGUE, value=f"m{i}", number=3) for i in range(5)]
EVENTS = keys.events("r1")
CHECKPOINT = keys.checkpoint(TASK)
OPS: dict[str, tuple[list[Op], list[Op], dict[str, Any]]] = {
    "HSET merges fields of one key": (
        [],
        [hset(GRAPH, "a", "1"), hset(keys.SHARED, "s", "9"), hset(GRAPH, "b", "2"), hset(GRAPH, "a", "3")],
        {GRAPH: {"a": "3", "b": "2"}, keys.SHARED: {"s": "9"}, keys.KEYS: [GRAPH]},
    ),
    "HDEL": (
        [hset(GRAPH, "a", "1"), SET_NODE],
        [Op(OpName.HDEL, key=GRAPH, field="a")],
        {GRAPH: {"n1": "{}"}},
    ),
    "SET": ([], [Op(OpName.SET, key=CHECKPOINT, value="{}")], {CHECKPOINT: "{}", keys.KEYS: [CHECKPOINT]}),
    "SET over another type": ([SET_NODE], [Op(OpName.SET, key=GRAPH, value="x")], {GRAPH: "x"}),
    "DEL": ([SET_NODE], [Op(OpName.DEL, key=GRAPH)], {GRAPH: None, keys.KEYS: None}),
    "UNLIST": ([SET_NODE], [Op(OpName.UNLIST, key=GRAPH)], {GRAPH: {"n1": "{}"}, keys.KEYS: None}),
    "written and unlisted": (
        [],
        [SET_NODE, Op(OpName.UNLIST, key=GRAPH)],
        {GRAPH: {"n1": "{}"}, keys.KEYS: None},
    ),
    "DEL, then another type": (
        [SET_NODE],
        [Op(OpName.DEL, key=GRAPH), Op(OpName.LPUSH_TRIM, key=GRAPH, value="x", number=1)],
        {GRAPH: ["x"], keys.KEYS: [GRAPH]},
    ),
    "written and deleted": ([], [SET_NODE, Op(OpName.DEL, key=GRAPH)], {GRAPH: None, keys.KEYS: None}),
    "LPUSH_TRIM": ([], DIALOGUE_OPS, {keys.DIALOGUE: ["m4", "m3", "m2"], keys.KEYS: None}),
    "JAPPEND": (
        [Op(OpName.JAPPEND, key=GRAPH, field="_edges", value='{"a":1}')],
        [Op(OpName.JAPPEND, key=GRAPH, field="_edges", value=text) for text in ('{"b":"é"}', "[]")],
        {GRAPH: {"_edges": '[{"a":1},{"b":"é"},[]]'}},
    ),
    "JAPPEND to an empty array": (
        [hset(GRAPH, "_edges", "[]")],
        [Op(OpName.JAPPEND, key=GRAPH, field="_edges", value="12345678901234567890")],
        {GRAPH: {"_edges": "[12345678901234567890]"}},
    ),
    "XADD": (
        [Op(OpName.XADD, key=EVENTS, field="1", value="e1")],
        [Op(OpName.XADD, key=EVENTS, field=str(i), value=f"e{i}") for i in (1, 2, 2, 3)],
        {EVENTS: [(f"{i}-0", {"e": f"e{i}"}) for i in (1, 2, 3)], keys.KEYS: [EVENTS]},
    ),
    "DIRTY has the score of the write": (
        [Op(OpName.DIRTY, field="a"), Op(OpName.DIRTY, field="b")],
        [Op(OpName.DIRTY, field="b")],
        {keys.DIRTY: [("a", 1.0), ("b", 2.0)]},
    ),
    "OUTBOX marks too": (
        [],
        [Op(OpName.OUTBOX, field="commit:r1", value="bytes")],
        {keys.OUTBOX: {"commit:r1": "bytes"}, keys.DIRTY: [("commit:r1", 1.0)]},
    ),
    "CLEAN up to a sequence": (
        [Op(OpName.DIRTY, field="a"), Op(OpName.OUTBOX, field="b", value="x")],
        [
            Op(OpName.DIRTY, field="c"),
            *[Op(OpName.CLEAN, field=member, number=1) for member in ("a", "b", "c", "unknown")],
        ],
        {keys.DIRTY: [("c", 2.0)], keys.OUTBOX: None},
    ),
    "CLEAN keeps what changed since": (
        [Op(OpName.OUTBOX, field="a", value="new")],
        [Op(OpName.CLEAN, field="a", number=0)],
        {keys.DIRTY: [("a", 1.0)], keys.OUTBOX: {"a": "new"}},
    ),
    "UNLOCK": ([], [Op(OpName.UNLOCK)], {keys.LOCK: None}),
    "values are opaque": (
        [],
        [hset(GRAPH, "n", '{"list":[],"big":9007199254740993,"nul":null,"text":"\\u0000 \x00 😀"}')],
        {GRAPH: {"n": '{"list":[],"big":9007199254740993,"nul":null,"text":"\\u0000 \x00 😀"}'}},
    ),
}


@pytest.mark.parametrize("case", OPS)
async def test_an_operation_does_what_it_says(bench: Bench, case: str) -> None:
    on, ops, expected = OPS[case]
    found = await content(bench, *ops, on=on)
    assert {suffix: found.get(suffix) for suffix in expected} == expected


def test_every_operation_is_tried() -> None:
    tried = {op.op for on, ops, _ in OPS.values() for op in (*on, *ops)}
    assert tried | {OpName.EXPIRE} == set(OpName)


async def test_the_last_word_on_expiry_counts(bench: Bench) -> None:
    turn = await bench.begin()
    await bench.apply(turn, SET_NODE, hset(keys.SHARED, "a", "b"))
    await bench.apply(
        turn,
        Op(OpName.EXPIRE, key=GRAPH, number=2000),  # not written in this call
        Op(OpName.EXPIRE, key=keys.SHARED, number=2000),
        hset(keys.SHARED, "a", "c"),
        hset(CHECKPOINT, "x", "y"),
        Op(OpName.EXPIRE, key=CHECKPOINT, number=3000),
        Op(OpName.EXPIRE, key="nothing", number=3000),
        Op(OpName.EXPIRE, key=keys.STATE, number=4000),
    )
    graph, checkpoint, state, shared = [
        await bench.raw.pttl(bench.key(key)) for key in (GRAPH, CHECKPOINT, keys.STATE, keys.SHARED)
    ]
    assert 0 < graph <= 2000 < checkpoint <= 3000 < state <= 4000 < shared
    assert await bench.raw.exists(bench.key("nothing")) == 0


async def test_unlock_is_for_the_holder_alone(bench: Bench) -> None:
    turn = await bench.begin()
    await bench.raw.hset(bench.key(keys.LOCK), "token", "another")
    assert (await bench.apply(turn, Op(OpName.UNLOCK))).code is Code.APPLIED
    assert await bench.raw.exists(bench.key(keys.LOCK)) == 1


async def test_a_large_rehydration_is_one_call(bench: Bench) -> None:
    ops = [hset(f"task:t{i % 3}:graph", f"n{i}", "x" * 100) for i in range(3000)]
    found = await content(bench, *ops)
    assert sum(len(found[f"task:t{i}:graph"]) for i in range(3)) == 3000


# --- nothing is written unless all input is good --------------------------------------------------

GOOD: list[Any] = ["HSET", 6, 2, "a", "b"]
HEADER: list[Any] = [1, "r1", "token-r1", 0, NOW_MS, TTL_MS, 0, "", "", "", "", ""]


PLACES = {
    "version": 0,
    "run": 1,
    "seen": 3,
    "now": 4,
    "ttl": 5,
    "sequence": 6,
    "stamp_version": 8,
    "stamp_seq": 9,
    "base_seq": 10,
    "phase": 11,
}


def header(**changes: Any) -> list[Any]:
    changed: list[Any] = list(HEADER)
    for name, value in changes.items():
        changed[PLACES[name]] = value
    return changed


BAD_INPUT: dict[str, list[Any]] = {
    "unknown op": [*HEADER, 2, *GOOD, "LREM", 6, 1, "x"],
    "op in lower case": [*HEADER, 2, *GOOD, "hset", 6, 2, "a", "b"],
    "no op at all": [*HEADER, 2, *GOOD],
    "arguments after the last": [*HEADER, 1, *GOOD, "more"],
    "count is no number": [*HEADER, "x", *GOOD],
    "key index beyond KEYS": [*HEADER, 2, *GOOD, "HSET", 9, 2, "a", "b"],
    "key index missing": [*HEADER, 2, *GOOD, "HSET", 0, 2, "a", "b"],
    "key where none belongs": [*HEADER, 2, *GOOD, "DIRTY", 6, 1, "m"],
    "too few arguments": [*HEADER, 2, *GOOD, "HSET", 6, 2, "a"],
    "odd fields": [*HEADER, 2, *GOOD, "HSET", 6, 3, "a", "b", "c"],
    "no fields": [*HEADER, 2, *GOOD, "HSET", 6, 0],
    "wrong count of arguments": [*HEADER, 2, *GOOD, "SET", 6, 2, "a", "b"],
    "keep nothing": [*HEADER, 2, *GOOD, "LPUSH_TRIM", 7, 2, "v", 0],
    "keep half": [*HEADER, 2, *GOOD, "LPUSH_TRIM", 7, 2, "v", "1.5"],
    "keep hexadecimal": [*HEADER, 2, *GOOD, "LPUSH_TRIM", 7, 2, "v", "0x10"],
    "expire at once": [*HEADER, 2, *GOOD, "EXPIRE", 6, 1, 0],
    "expire in the past": [*HEADER, 2, *GOOD, "EXPIRE", 6, 1, -5],
    "expire never": [*HEADER, 2, *GOOD, "EXPIRE", 6, 1, 2**60],
    "event without a number": [*HEADER, 2, *GOOD, "XADD", 7, 2, "x", "v"],
    "event zero": [*HEADER, 2, *GOOD, "XADD", 7, 2, 0, "v"],
    "no member": [*HEADER, 2, *GOOD, "DIRTY", 0, 1, ""],
    "clean without a number": [*HEADER, 2, *GOOD, "CLEAN", 0, 2, "m", ""],
    "the fence as a field": [*HEADER, 2, *GOOD, "HSET", 1, 2, "version", "99"],
    "the stamp as a field": [*HEADER, 2, *GOOD, "HDEL", 1, 1, "dataVersion"],
    "the state deleted": [*HEADER, 2, *GOOD, "DEL", 1, 0],
    "the lock deleted": [*HEADER, 2, *GOOD, "DEL", 2, 0],
    "the dirty set written": [*HEADER, 2, *GOOD, "HSET", 3, 2, "a", "b"],
    "the set of keys overwritten": [*HEADER, 2, *GOOD, "SET", 5, 1, "x"],
    "ttl zero": [*header(ttl=0), 1, *GOOD],
    "ttl negative": [*header(ttl=-1), 1, *GOOD],
    "ttl too long": [*header(ttl=2**62), 1, *GOOD],
    "ttl is text": [*header(ttl="7d"), 1, *GOOD],
    "version zero": [*header(version=0), 1, *GOOD],
    "version is text": [*header(version="v"), 1, *GOOD],
    "no run": [*header(run=""), 1, *GOOD],
    "seen sequence": [*header(seen="-1"), 1, *GOOD],
    "now": [*header(now=""), 1, *GOOD],
    "sequence": [*header(sequence="1e3"), 1, *GOOD],
    "half a stamp": [*header(stamp_version=1), 1, *GOOD],
    "stamp is text": [*header(stamp_version="x", stamp_seq="y"), 1, *GOOD],
    "base sequence": [*header(base_seq="x"), 1, *GOOD],
    "phase": [*header(phase="LATER"), 1, *GOOD],
    "no members": [*HEADER, 2, *GOOD, "DIRTY", 0, 0],
    "the set of keys unlisted": [*HEADER, 2, *GOOD, "UNLIST", 5, 0],
    "nothing": [],
}


async def test_the_header_itself_is_good(bench: Bench) -> None:
    """Else no bad input below would be refused for what is bad about it."""
    await bench.begin("r1")
    names = [bench.key(suffix) for suffix in (*redis_hot.OWN_KEYS, GRAPH)]
    assert await bench.hot._run(redis_scripts.FLUSH, names, [*HEADER, 1, *GOOD]) == [1, 1]


@pytest.mark.parametrize("phase", [Phase.BEGIN, Phase.RECOVERY])
async def test_a_phase_of_begin_is_over_once_the_turn_has_flushed(bench: Bench, phase: Phase) -> None:
    turn = await bench.begin("r1")
    mended = await bench.apply(turn, hset(GRAPH, "a", "1"), phase=phase)
    assert mended.code is Code.APPLIED
    stamped = await bench.raw.hget(bench.key(keys.STATE), "dataVersion")
    assert stamped == ("1" if phase is Phase.BEGIN else None)
    assert (await bench.apply(turn, hset(GRAPH, "a", "2"), sequence=1)).code is Code.APPLIED
    late = await bench.apply(turn, hset(GRAPH, "a", "3"), phase=phase)
    assert late.code is Code.FENCED
    assert await bench.raw.hget(bench.key(GRAPH), "a") == "2"


async def test_C151_two_versions_of_a_script_work_side_by_side(bench: Bench) -> None:
    """While a new release takes over: each is asked for by the hash of its own text."""
    await bench.begin("r1")
    text = redis_scripts.FLUSH.text + "\n-- as another release has it"
    other = redis_scripts.Script(
        text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    )
    names = [bench.key(suffix) for suffix in (*redis_hot.OWN_KEYS, GRAPH)]
    for sequence, script in enumerate([redis_scripts.FLUSH, other, redis_scripts.FLUSH, other], start=1):
        numbered = [*header(sequence=sequence), 1, *GOOD]
        assert await bench.hot._run(script, names, numbered) == [1, sequence]


@pytest.mark.parametrize("case", BAD_INPUT)
async def test_bad_input_writes_nothing(bench: Bench, case: str) -> None:
    await bench.begin("r1")
    names = [bench.key(suffix) for suffix in (*redis_hot.OWN_KEYS, GRAPH, keys.DIALOGUE)]
    before = await bench.dump()
    with pytest.raises(ValueError, match="INPUT"):
        await bench.hot._run(redis_scripts.FLUSH, names, BAD_INPUT[case])
    assert await bench.dump() == before


@pytest.mark.parametrize(
    "alien",
    [
        "elsewhere",
        "",
        "test:{organ:other}:graph",
        "PREFIX{organ:conversation}:",
        "PREFIX{organ:conversation}:lock",
    ],
    ids=["another prefix", "empty", "another conversation", "the bare prefix", "a key twice"],
)
@pytest.mark.parametrize("script", [redis_scripts.FLUSH, redis_scripts.ABANDON], ids=["flush", "abandon"])
async def test_keys_of_others_are_refused(bench: Bench, alien: str, script: redis_scripts.Script) -> None:
    await bench.begin("r1")
    names = [bench.key(suffix) for suffix in redis_hot.OWN_KEYS]
    before = await bench.dump()
    start: list[Any] = HEADER if script is redis_scripts.FLUSH else ["r1", NOW_MS, TTL_MS, "h"]
    names.append(alien.replace("PREFIX", bench.prefix))
    with pytest.raises(ValueError, match="INPUT KEYS"):
        await bench.hot._run(script, names, [*start, 1, *GOOD])
    assert await bench.dump() == before


WRONG_TYPES = {
    "HSET": (GRAPH, hset(GRAPH, "a", "b")),
    "HDEL": (GRAPH, Op(OpName.HDEL, key=GRAPH, field="a")),
    "JAPPEND": (GRAPH, Op(OpName.JAPPEND, key=GRAPH, field="a", value="1")),
    "LPUSH_TRIM": (keys.DIALOGUE, Op(OpName.LPUSH_TRIM, key=keys.DIALOGUE, value="m", number=1)),
    "XADD": (EVENTS, Op(OpName.XADD, key=EVENTS, field="1", value="e")),
    "DIRTY": (keys.DIRTY, Op(OpName.DIRTY, field="m")),
    "OUTBOX": (keys.OUTBOX, Op(OpName.OUTBOX, field="m", value="v")),
    "CLEAN": (keys.DIRTY, Op(OpName.CLEAN, field="m", number=1)),
    "keys": (keys.KEYS, hset(GRAPH, "a", "b")),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
async def test_a_key_of_another_type_is_corruption_and_nothing_is_written(bench: Bench, case: str) -> None:
    turn = await bench.begin("r1")
    suffix, op = WRONG_TYPES[case]
    await bench.raw.set(bench.key(suffix), "a string")
    before = await bench.dump()
    with pytest.raises(StoreCorrupt, match="WRONGTYPE"):
        await bench.apply(turn, hset(keys.SHARED, "good", "1"), op)
    assert await bench.dump() == before


async def test_types_are_followed_through_one_call(bench: Bench) -> None:
    turn = await bench.begin("r1")
    before = await bench.dump()
    with pytest.raises(StoreCorrupt, match="WRONGTYPE"):
        await bench.apply(turn, Op(OpName.SET, key=GRAPH, value="x"), hset(GRAPH, "a", "b"))
    assert await bench.dump() == before


async def test_an_array_that_is_none_is_corruption(bench: Bench) -> None:
    turn = await bench.begin("r1")
    await bench.apply(turn, hset(GRAPH, "_edges", '{"no":"array"}'))
    before = await bench.dump()
    with pytest.raises(StoreCorrupt, match="no array"):
        await bench.apply(turn, SET_NODE, Op(OpName.JAPPEND, key=GRAPH, field="_edges", value="1"))
    assert await bench.dump() == before


@pytest.mark.parametrize("field", ["version", "dataVersion", "dataSeq", "flushSeq"])
async def test_a_broken_fence_is_corruption(bench: Bench, field: str) -> None:
    turn = await bench.begin("r1")
    await bench.raw.hset(bench.key(keys.STATE), field, "many")
    with pytest.raises(StoreCorrupt, match=field):
        await bench.apply(turn, SET_NODE)


@pytest.mark.parametrize(
    "ops",
    [
        [Op(OpName.HSET, field="a", value="b")],
        [Op(OpName.DIRTY, key=GRAPH, field="m")],
        [hset(GRAPH, "e", "[]"), Op(OpName.JAPPEND, key=GRAPH, field="e", value="1")],
    ],
    ids=["no key", "a key too many", "set and appended"],
)
def test_operations_that_no_server_should_see(ops: list[Op]) -> None:
    with pytest.raises(ValueError, match=r"key|appended"):
        redis_scripts.encode_ops(ops, redis_hot.OWN_KEYS)


@pytest.mark.parametrize("organ", ["", "a}b", "a{b", "a:b"])
async def test_ids_that_would_leave_the_slot(bench: Bench, organ: str) -> None:
    with pytest.raises(ValueError, match="id"):
        await bench.acquire(scope=Scope(organ, "c"))


@pytest.mark.parametrize(
    "change",
    [
        {"run": ""},
        {"user_id": ""},
        {"token": ""},
        {"lease_ms": 0},
        {"ttl_ms": 0},
        {"ttl_ms": 2**60},
        {"now_ms": -1},
        {"baseline": -1},
    ],
    ids=str,
)
async def test_acquire_checks_its_input(bench: Bench, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="INPUT"):
        await bench.acquire(**change)
    assert await bench.dump() == {}


# --- register.lua ---------------------------------------------------------------------------------


def started(evidence_id: str = "e1", *, task_id: str = TASK, node_id: str = NODE) -> r.EvidenceHead:
    return r.EvidenceHead(
        evidence_id=evidence_id,
        task_id=task_id,
        node_id=node_id,
        tool_name="pay",
        side_effect=SideEffect.WRITE,
        status=CallStatus.STARTED,
        idempotency_key="k1",
    )


async def test_a_write_is_registered_in_one_step(bench: Bench) -> None:
    turn = await bench.begin()
    await bench.apply(turn, Op(OpName.SET, key=CHECKPOINT, value="{}"))
    consume = (Op(OpName.DEL, key=CHECKPOINT), Op(OpName.DIRTY, field="checkpoint-gone:t1:c1"))
    done = await bench.register(turn, started(), *consume)
    assert (done.code, done.data_seq, done.found) == (Code.APPLIED, 2, None)
    found = await bench.dump()
    assert json.loads(found[bench.key(keys.evidence(TASK, NODE))]["e1"])["status"] == "STARTED"
    field = keys.write_field("pay", "k1")
    assert json.loads(found[bench.key(keys.writes(TASK))][field]) == {"evidenceId": "e1", "status": "STARTED"}
    assert json.loads(found[bench.key(keys.UNRESOLVED)][field]) == {
        "evidenceId": "e1",
        "taskId": TASK,
        "nodeId": NODE,
        "status": "STARTED",
    }
    assert {member for member, _ in found[bench.key(keys.DIRTY)]} == {
        members.evidence(TASK, NODE, "e1"),
        "checkpoint-gone:t1:c1",
    }
    assert found[bench.key(keys.KEYS)] == sorted([keys.evidence(TASK, NODE), keys.writes(TASK)])
    assert bench.key(CHECKPOINT) not in found
    await bench.assert_all_expire()


async def test_a_registration_repeated_is_known(bench: Bench) -> None:
    turn = await bench.begin()
    await bench.register(turn, started())
    before = await bench.dump()
    again = await bench.register(turn, started())
    assert (again.code, again.data_seq, again.found) == (Code.ALREADY, 1, None)
    assert await bench.dump() == before


def entry(**fields: Any) -> str:
    return json.dumps({"evidenceId": "e0", **fields})


IN_TASK: dict[str, tuple[str, bool]] = {
    "STARTED": (entry(status="STARTED"), True),
    "UNKNOWN": (entry(status="UNKNOWN"), True),
    "UNKNOWN_PRE_CALL": (entry(status="UNKNOWN_PRE_CALL"), True),
    "SUCCESS, effective": (entry(status="SUCCESS", businessOk=True), True),
    "SUCCESS, refused": (entry(status="SUCCESS", businessOk=False), False),
    "SUCCESS, unsaid": (entry(status="SUCCESS"), False),
    "FAILED": (entry(status="FAILED"), False),
    "CANCELLED": (entry(status="CANCELLED"), False),
    "FAILED, not before later": (entry(status="FAILED", notBefore=NOW_MS + 1), True),
    "FAILED, not before now": (entry(status="FAILED", notBefore=NOW_MS), False),
}


@pytest.mark.parametrize("case", IN_TASK)
async def test_what_bars_a_write_in_its_task(bench: Bench, case: str) -> None:
    value, bars = IN_TASK[case]
    turn = await bench.begin()
    await bench.apply(turn, hset(keys.writes(TASK), keys.write_field("pay", "k1"), value))
    before = await bench.dump()
    answer = await bench.register(turn, started("e9"))
    assert answer.code is Code.APPLIED
    if not bars:
        assert answer.found is None
        assert answer.data_seq == 2
        return
    assert (answer.found.entry, answer.found.same_task, answer.found.task_id) == (
        r.from_json(value, r.WriteIndexEntry),
        True,
        TASK,
    )
    assert await bench.dump() == before


@pytest.mark.parametrize("status", ["STARTED", "UNKNOWN", "UNKNOWN_PRE_CALL"])
async def test_an_unresolved_write_of_another_task_bars_too(bench: Bench, status: str) -> None:
    turn = await bench.begin()
    value = entry(status=status, taskId="t0", nodeId="n0")
    await bench.apply(turn, hset(keys.UNRESOLVED, keys.write_field("pay", "k1"), value))
    before = await bench.dump()
    found = (await bench.register(turn, started("e9"))).found
    assert found.entry.evidence_id == "e0"
    assert (found.task_id, found.node_id, found.same_task) == ("t0", "n0", False)
    assert await bench.dump() == before


async def test_a_settled_write_of_another_task_does_not_bar(bench: Bench) -> None:
    turn = await bench.begin()
    settled = entry(status="SUCCESS", businessOk=True)
    await bench.apply(turn, hset(keys.writes("t0"), keys.write_field("pay", "k1"), settled))
    assert (await bench.register(turn, started("e9"))).found is None


async def test_another_key_or_tool_is_another_write(bench: Bench) -> None:
    turn = await bench.begin()
    await bench.register(turn, started("e1"))
    for number, field in enumerate([keys.write_field("pay", "k2"), keys.write_field("refund", "k1")]):
        assert (await bench.register(turn, started(f"x{number}"), index_field=field)).found is None


async def test_register_has_the_guards_of_a_flush(bench: Bench) -> None:
    old = await bench.begin("r1")
    await bench.raw.delete(bench.key(keys.LOCK))
    turn = await bench.begin("r2")
    await bench.apply(turn, SET_NODE)
    before = await bench.dump()
    assert (await bench.register(old, started())).code is Code.FENCED
    assert (await bench.register(msgspec.structs.replace(turn, seen_seq=5), started())).code is Code.LOST
    assert await bench.dump() == before
    await bench.raw.delete(bench.key(keys.STATE))
    assert (await bench.register(turn, started())).code is Code.MISSING


@pytest.mark.parametrize("index", [keys.writes(TASK), keys.UNRESOLVED])
@pytest.mark.parametrize(
    "value", ["no json", "[]", '{"status":"STARTED"}', '{"evidenceId":1,"status":"STARTED"}']
)
async def test_a_broken_index_is_corruption(bench: Bench, index: str, value: str) -> None:
    turn = await bench.begin()
    await bench.apply(turn, hset(index, keys.write_field("pay", "k1"), value))
    before = await bench.dump()
    with pytest.raises(StoreCorrupt, match="CORRUPT"):
        await bench.register(turn, started())
    assert await bench.dump() == before


async def test_register_checks_its_input(bench: Bench) -> None:
    turn = await bench.begin()
    before = await bench.dump()
    with pytest.raises(ValueError, match="INPUT"):
        await bench.register(turn, started(), index_field="")
    with pytest.raises(ValueError, match="INPUT"):
        await bench.register(turn, started(), Op(OpName.EXPIRE, key=GRAPH, number=0))
    with pytest.raises(ValueError, match="another type"):
        await bench.register(turn, started(), Op(OpName.SET, key=keys.writes(TASK), value="x"))
    assert await bench.dump() == before


async def test_of_two_registrations_at_once_one_goes_through(bench: Bench) -> None:
    turn = await bench.begin()
    answers = await asyncio.gather(*(bench.register(turn, started(f"e{i}")) for i in range(16)))
    assert sum(answer.found is None for answer in answers) == 1


# --- abandon.lua ----------------------------------------------------------------------------------


async def test_abandon_records_the_end_and_frees_the_lock(bench: Bench) -> None:
    turn = await bench.begin("r1")
    await bench.apply(turn, SET_NODE)
    ops = [
        Op(OpName.OUTBOX, field="run:r1", value="end"),
        Op(OpName.JAPPEND, key=GRAPH, field="x", value="1"),
    ]
    for _ in range(2):
        assert await bench.hot.abandon(SCOPE, "r1", ops, ttl_ms=TTL_MS, now_ms=NOW_MS)
    found = await bench.dump()
    assert found[bench.key(GRAPH)]["x"] == "[1]"
    assert found[bench.key(keys.OUTBOX)] == {"run:r1": "end"}
    assert bench.key(keys.LOCK) not in found
    assert found[bench.key(keys.STATE)]["lastTraceId"] == "r1"
    assert (await bench.acquire("r2")).previous_run == "r1"
    await bench.assert_all_expire()


async def test_abandon_before_anything_was_loaded_makes_no_data(bench: Bench) -> None:
    await bench.begin("r1")
    ops = [Op(OpName.OUTBOX, field="run:r1", value="end")]
    assert await bench.hot.abandon(SCOPE, "r1", ops, ttl_ms=TTL_MS, now_ms=NOW_MS)
    got = await bench.acquire("r2")
    assert (got.data_version, got.data_seq) == (0, 0)


async def test_abandon_does_not_make_old_data_look_new(bench: Bench) -> None:
    turn = await bench.begin("r1")
    await bench.apply(turn, SET_NODE, Op(OpName.UNLOCK))
    await bench.begin("r2")
    ops = [Op(OpName.OUTBOX, field="run:r2", value="end")]
    assert await bench.hot.abandon(SCOPE, "r2", ops, ttl_ms=TTL_MS, now_ms=NOW_MS)
    assert (await bench.acquire("r3")).data_version == turn.version


async def test_who_owns_nothing_abandons_nothing(bench: Bench) -> None:
    assert not await bench.hot.abandon(SCOPE, "r1", [SET_NODE], ttl_ms=TTL_MS, now_ms=NOW_MS)
    assert await bench.dump() == {}
    await bench.begin("r1")
    before = await bench.dump()
    assert not await bench.hot.abandon(SCOPE, "r2", [SET_NODE], ttl_ms=TTL_MS, now_ms=NOW_MS)
    assert await bench.dump() == before


# --- reads ----------------------------------------------------------------------------------------


async def test_every_plain_read(bench: Bench) -> None:
    turn = await bench.begin()
    await bench.apply(
        turn,
        SET_NODE,
        Op(OpName.SET, key=CHECKPOINT, value="é"),
        *DIALOGUE_OPS,
        *[Op(OpName.XADD, key=EVENTS, field=str(i), value=f"e{i}") for i in (1, 2, 10)],
        Op(OpName.DIRTY, field="m"),
    )
    found = await bench.hot.read(
        SCOPE,
        [
            Read("HGETALL", GRAPH),
            Read("HGETALL", "none"),
            Read("HGET", GRAPH, ("n1",)),
            Read("HGET", GRAPH, ("none",)),
            Read("GET", CHECKPOINT),
            Read("GET", "none"),
            Read("LRANGE", keys.DIALOGUE, (0, 1)),
            Read("LRANGE", keys.DIALOGUE),
            Read("ZRANGE", keys.DIRTY, (0, -1)),
            Read("XRANGE", EVENTS, ("(2-0", "+")),
            Read("EXISTS", GRAPH),
            Read("EXISTS", "none"),
        ],
    )
    assert found == [
        {"n1": "{}"},
        {},
        "{}",
        None,
        "é",
        None,
        ["m4", "m3"],
        ["m4", "m3", "m2"],
        [("m", 1)],
        [(10, "e10")],
        True,
        False,
    ]
    (listed,) = await bench.hot.read(SCOPE, [Read("SMEMBERS", keys.KEYS)])
    assert sorted(listed) == sorted([GRAPH, CHECKPOINT, EVENTS])
    assert await bench.hot.read(SCOPE, []) == []


async def test_only_plain_reads_are_sent(bench: Bench) -> None:
    with pytest.raises(ValueError, match="no plain read"):
        await bench.hot.read(SCOPE, [Read("DEL", GRAPH)])
    with pytest.raises(ValueError, match="no plain read"):
        await bench.hot._run(redis_scripts.READ, [bench.key(GRAPH)], ["DEL", 0])


async def test_stored_bytes_of_another_shape(bench: Bench) -> None:
    await bench.begin()
    await bench.raw.set(bench.key(CHECKPOINT), b"\xff\xfe")
    with pytest.raises(StoreCorrupt, match="UTF-8"):
        await bench.hot.read(SCOPE, [Read("GET", CHECKPOINT)])
    with pytest.raises(StoreCorrupt, match="WRONGTYPE"):
        await bench.hot.read(SCOPE, [Read("HGETALL", CHECKPOINT)])
    await bench.raw.zadd(bench.key(keys.DIRTY), {"m": 1.5})
    with pytest.raises(StoreCorrupt, match="another shape"):
        await bench.hot.read(SCOPE, [Read("ZRANGE", keys.DIRTY)])


async def test_events_are_waited_for(bench: Bench) -> None:
    turn = await bench.begin()

    def add(*sequences: int) -> list[Op]:
        return [Op(OpName.XADD, key=EVENTS, field=str(i), value=f"e{i}") for i in sequences]

    waiting = asyncio.create_task(bench.hot.wait_events(SCOPE, "r1", 0, block_ms=10_000))
    await asyncio.sleep(0)
    await bench.apply(turn, *add(1))
    assert await waiting == [(1, "e1")]
    await bench.apply(turn, *add(2, 3))
    assert await bench.hot.wait_events(SCOPE, "r1", 1, block_ms=10_000) == [(2, "e2"), (3, "e3")]
    assert await bench.hot.wait_events(SCOPE, "r1", 3, block_ms=20) == []
    assert await bench.hot.wait_events(SCOPE, "r1", 3, block_ms=0) == []


async def test_watchers_never_starve_turns_nor_each_other(bench: Bench) -> None:
    hot = connect(bench.url, prefix=bench.prefix, socket_timeout=5, max_connections=2)
    try:
        turn = await bench.begin()
        watchers = [asyncio.create_task(hot.wait_events(SCOPE, "r1", 0, block_ms=300)) for _ in range(10)]
        await asyncio.sleep(0)
        event = Op(OpName.XADD, key=EVENTS, field="1", value="e1")
        done = await hot.apply(turn, [event], ttl_ms=TTL_MS, now_ms=NOW_MS)
        assert done.code is Code.APPLIED
        assert await asyncio.gather(*watchers) == [[(1, "e1")]] * 10
    finally:
        await hot.close()


# --- the connection -------------------------------------------------------------------------------


async def test_a_server_that_forgot_the_scripts_gets_them_again(bench: Bench) -> None:
    turn = await bench.begin()
    for _ in range(2):
        await bench.raw.script_flush()
        assert (await bench.apply(turn, SET_NODE)).code is Code.APPLIED
    await bench.raw.script_flush()
    assert (await bench.hot.extend_lease(turn, lease_ms=LEASE_MS)).held
    assert (await bench.state())["dataSeq"] == "2"


async def test_a_slow_script_runs_once(bench: Bench) -> None:
    """redis-py's own retries would run it eleven times (gotcha 1)."""
    hot = connect(bench.url, prefix=bench.prefix, socket_timeout=0.2, max_connections=2)
    text = "redis.call('INCR', KEYS[1]) for _ = 1, tonumber(ARGV[1]) do redis.sha1hex('x') end return 1"
    slow = redis_scripts.Script(text=text, sha="0" * 40)
    key = bench.key("count")
    rounds = 10_000
    late = False
    try:
        while not late:  # as many rounds as take longer than the deadline on this machine
            rounds *= 4
            await bench.raw.delete(key)
            try:
                await hot._run(slow, [key], [rounds])
            except StoreUnavailable:
                late = await bench.raw.get(key) is not None  # else the machine was late, not the script
        assert await bench.raw.get(key) == "1"
    finally:
        await hot.close()


@pytest.mark.parametrize("pause", [0.0, 0.0005])
async def test_cancelled_calls_never_cross_replies(bench: Bench, pause: float) -> None:
    hot = connect(bench.url, prefix=bench.prefix, socket_timeout=5, max_connections=4)
    choose = random.Random(7)  # noqa: S311 - a repeatable schedule
    scopes = [Scope("organ", f"c{i}") for i in range(12)]
    try:
        for scope in scopes:
            await bench.raw.set(bench.key(CHECKPOINT, scope), scope.conversation_id)

        async def ask(scope: Scope) -> None:
            assert await hot.read(scope, [Read("GET", CHECKPOINT)]) == [scope.conversation_id]

        cancelled = 0
        while cancelled < 300:
            tasks = [asyncio.create_task(ask(choose.choice(scopes))) for _ in range(8)]
            for _ in range(choose.randrange(12)):
                await asyncio.sleep(pause * choose.random())
            for task in choose.sample(tasks, 4):
                cancelled += task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        assert await asyncio.gather(*(ask(scope) for scope in scopes)) == [None] * len(scopes)
        assert not hot._calls._places.locked()
    finally:
        await hot.close()


async def test_who_finds_no_connection_in_time_hears_unavailable(bench: Bench) -> None:
    hot = connect(bench.url, prefix=bench.prefix, socket_timeout=0.1, max_connections=1)
    try:
        async with hot._calls.place(1):
            with pytest.raises(StoreUnavailable, match="no connection"):
                await hot.read(SCOPE, [Read("EXISTS", keys.STATE)])
        assert await hot.read(SCOPE, [Read("EXISTS", keys.STATE)]) == [False]
    finally:
        await hot.close()


@pytest.fixture(scope="module", params=["valkey", "redis"])
def own_server(request: pytest.FixtureRequest) -> Iterator[servers.PrivateRedis]:
    """A server that a test may break."""
    start = {"valkey": servers.private_valkey, "redis": servers.private_redis}[request.param]
    try:
        with start() as server:
            yield server
    except servers.ServerMissing as error:
        pytest.skip(str(error))


@pytest.fixture
async def own(own_server: servers.PrivateRedis) -> AsyncIterator[Bench]:
    bench = Bench(own_server.url)
    yield bench
    await bench.hot.close()
    await bench.raw.aclose()


async def test_a_full_server_is_unavailable_and_a_turn_can_still_unlock(own: Bench) -> None:
    turn = await own.begin()
    await own.raw.config_set("maxmemory", "1")
    try:
        before = await own.dump()
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await own.apply(turn, SET_NODE)
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await own.register(turn, started())
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await own.acquire("r2", scope=Scope("organ", "other"))
        assert await own.dump() == before
        assert (await own.apply(turn, Op(OpName.UNLOCK))).code is Code.APPLIED
        assert (await own.hot.read(SCOPE, [Read("EXISTS", keys.LOCK)])) == [False]
    finally:
        await own.raw.config_set("maxmemory", "0")


async def test_a_read_only_server_is_unavailable(own: Bench) -> None:
    turn = await own.begin()
    await own.raw.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailable):
            await own.apply(turn, SET_NODE)
        assert any("replica" in problem for problem in await own.hot.check_server())
    finally:
        await own.raw.execute_command("REPLICAOF", "NO", "ONE")


async def test_too_few_replicas_are_unavailable(own: Bench) -> None:
    turn = await own.begin()
    await own.raw.config_set("min-replicas-to-write", "1")
    try:
        with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
            await own.apply(turn, SET_NODE)
    finally:
        await own.raw.config_set("min-replicas-to-write", "0")


async def test_an_evicting_server_is_named(own: Bench) -> None:
    assert await own.hot.check_server() == []
    await own.raw.config_set("maxmemory-policy", "volatile-lru")
    try:
        (problem,) = await own.hot.check_server()
        assert "volatile-lru" in problem
        assert "noeviction" in problem
    finally:
        await own.raw.config_set("maxmemory-policy", "noeviction")


async def test_a_frozen_server_is_unavailable_within_the_deadline(
    own: Bench, own_server: servers.PrivateRedis
) -> None:
    hot = connect(own.url, prefix=own.prefix, socket_timeout=0.3, max_connections=2)
    clock = asyncio.get_running_loop().time
    own_server.pause()
    try:
        before = clock()
        with pytest.raises(StoreUnavailable):
            await hot.read(SCOPE, [Read("EXISTS", keys.STATE)])
        assert clock() - before < 3
    finally:
        own_server.resume()
        await hot.close()


@pytest.mark.crash
async def test_a_dead_server_is_unavailable_and_comes_back(
    own: Bench, own_server: servers.PrivateRedis
) -> None:
    turn = await own.begin()
    own_server.kill()  # the last moment before it may be lost
    with pytest.raises(StoreUnavailable):
        await own.apply(turn, SET_NODE)
    with pytest.raises(StoreUnavailable):
        await own.hot.check_server()
    own_server.start()
    assert (await own.apply(await own.begin(), SET_NODE)).code is Code.APPLIED


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"redis_version": "7.0.15"}, []),
        ({"redis_version": "6.2.0", "maxmemory_policy": "noeviction", "role": "master"}, []),
        ({"redis_version": "6.0.16"}, ["6.2"]),
        ({"redis_version": "7.2.4", "maxmemory_policy": "allkeys-lru"}, ["noeviction"]),
        ({"redis_version": "7.2.4", "role": "slave", "cluster_enabled": 1}, ["primary", "redis+cluster"]),
    ],
)
def test_what_info_gives_away(info: dict[str, Any], words: list[str]) -> None:
    problems = problems_of(info, is_cluster=False)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


# --- Cluster and Sentinel -------------------------------------------------------------------------


class ClusterNode(servers.PrivateRedis):
    """One node that serves all slots: the smallest cluster."""

    def __init__(self, program: Path, folder: Path) -> None:
        super().__init__(program, folder)
        bus = str(servers.free_port())  # by default port + 10000, which may be none
        self._command += ["--cluster-enabled", "yes", "--cluster-port", bus]


class SentinelServer(servers.PrivateRedis):
    """One sentinel that is a quorum by itself."""

    def __init__(self, program: Path, folder: Path, primary_port: int) -> None:
        super().__init__(program, folder)
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {primary_port} 1\n"
        )
        self._command = [str(program), str(config), "--sentinel"]


@pytest.fixture
def cluster_url() -> Iterator[str]:
    with servers.private_folder() as folder:
        node = ClusterNode(servers.bundled_valkey(), folder)
        try:
            node.start()
            client: Any = redis.Redis.from_url(node.url)
            with contextlib.closing(client):
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

                def is_up() -> bool:
                    return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")

                servers.wait_until(is_up, 10, "all slots are served")
            yield f"redis+cluster://127.0.0.1:{node.port},127.0.0.1:{node.port}"
        finally:
            node.kill()


@pytest.fixture
def sentinel_url(own_server: servers.PrivateRedis) -> Iterator[str]:
    with servers.private_folder() as folder:
        sentinel = SentinelServer(servers.bundled_valkey(), folder, own_server.port)
        try:
            sentinel.start()
            yield f"redis+sentinel://127.0.0.1:{sentinel.port}/main/2"
        finally:
            sentinel.kill()


async def a_whole_turn(hot: RedisHot) -> None:
    scope = Scope("organ", "c1")
    clock: Any = {"ttl_ms": TTL_MS, "now_ms": NOW_MS}
    got = await hot.acquire(
        scope, run_id="r1", user_id="u", token="t", lease_ms=LEASE_MS, baseline=0, **clock
    )
    turn = r.TurnRef("organ", "c1", "r1", got.version, got.token)
    event = Op(OpName.XADD, key=EVENTS, field="1", value="e1")
    assert (await hot.apply(turn, [SET_NODE, event], sequence=1, **clock)).code is Code.APPLIED
    field = keys.write_field("pay", "k1")
    done = await hot.register_write(turn, head=started(), index_field=field, ops=[], **clock)
    assert (done.code, done.found) == (Code.APPLIED, None)
    assert await hot.read(scope, [Read("HGETALL", GRAPH), Read("EXISTS", keys.LOCK)]) == [{"n1": "{}"}, True]
    assert await hot.wait_events(scope, "r1", 0, block_ms=100) == [(1, "e1")]
    assert await hot.wait_events(scope, "r1", 1, block_ms=20) == []
    assert (await hot.extend_lease(turn, lease_ms=LEASE_MS)).held
    assert await hot.abandon(scope, "r1", [], **clock)
    await hot.undo_acquire(turn, previous_run="")


async def test_a_cluster_serves_a_whole_turn(cluster_url: str) -> None:
    hot = connect(cluster_url, prefix="g2rain:rt:", socket_timeout=5, max_connections=4)
    try:
        assert await hot.check_server() == []
        await a_whole_turn(hot)
    finally:
        await hot.close()
    plain = cluster_url.replace("+cluster", "").partition(",")[0]
    wrong = connect(plain, prefix="p:", socket_timeout=5, max_connections=1)
    try:
        assert any("redis+cluster" in problem for problem in await wrong.check_server())
    finally:
        await wrong.close()


async def test_a_sentinel_finds_the_primary(sentinel_url: str, own: Bench) -> None:
    hot = connect(sentinel_url, prefix="g2rain:rt:", socket_timeout=5, max_connections=4)
    try:
        assert await hot.check_server() == []
        await a_whole_turn(hot)
    finally:
        await hot.close()
    raw: Any = redis_asyncio.Redis.from_url(own.url.removesuffix("/0") + "/2")
    assert await raw.dbsize() > 0
    await raw.flushdb()
    await raw.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://localhost",
        "localhost:6379",
        "redis+cluster://localhost",
        "redis+cluster://localhost:6379,other",
        "redis+sentinel://localhost:26379",
        "redis+sentinel://localhost:port/main",
        "redis+sentinel://localhost:26379/main/db",
    ],
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|host:port|sentinel|invalid literal"):
        connect(url, prefix="p:", socket_timeout=1, max_connections=1)


def test_credentials_and_tls_of_many_hosts() -> None:
    url = "rediss+sentinel://me:p%40ss@one:1,[::1]:2/main/3?sentinel_password=other&ssl_cert_reqs=none"
    many = redis_connect._many_hosts(url)
    assert many.hosts == [("one", 1), ("::1", 2)]
    assert many.path == "main/3"
    expected = {"username": "me", "password": "p@ss", "ssl": True, "ssl_cert_reqs": "none"}
    assert many.options.items() >= expected.items()
