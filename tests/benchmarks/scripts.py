"""G6: the time that a flush takes inside Redis, against a script that is given the same as JSON."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import redis

from state_service.adapters.redis_connect import connect
from state_service.adapters.redis_hot import OWN_KEYS
from state_service.core import keys
from state_service.core.changes import dirty, hset
from state_service.ports import Op, Scope
from tests.benchmarks.meters import Result
from tests.contract.turns import NOW, new_id
from turnfence import records as r

ROUNDS, CALLS = 5, 60
TTL = 600_000
# KB of a flush → goal of the ratio
SIZES = {2: 0.7, 16: 0.5, 128: 0.4}

# All or nothing, too: it looks at every key before it writes the first.
JSON_SCRIPT = """
local state = redis.call('HMGET', KEYS[1], 'version', 'lastTraceId', 'flushSeq', 'dataVersion', 'dataSeq')
if state[1] ~= ARGV[1] or state[2] ~= ARGV[2] then return 0 end
local ops = cjson.decode(ARGV[4])
for _, op in ipairs(ops) do
  if op.op == 'HSET' then
    local kind = redis.call('TYPE', op.key).ok
    if kind ~= 'none' and kind ~= 'hash' then return redis.error_reply('WRONGTYPE') end
  end
end
redis.call('HSET', KEYS[1], 'flushSeq', ARGV[3], 'dataVersion', ARGV[1], 'dataSeq', ARGV[3])
for _, op in ipairs(ops) do
  if op.op == 'HSET' then redis.call('HSET', op.key, op.field, cjson.encode(op.value)) end
  if op.op == 'DIRTY' then redis.call('ZADD', KEYS[2], ARGV[3], op.field) end
  if op.key ~= '' then redis.call('PEXPIRE', op.key, ARGV[5]) end
end
return 1
"""


def operations(kilobytes: int) -> list[Op]:
    """Evidence-like records of about 500 bytes, each with its mark."""
    ops: list[Op] = []
    text = "the load is normal, as it was an hour ago; "
    for number in range(max(2, kilobytes * 2)):
        value = msgspec.json.encode({"id": number, "facts": [text] * 9, "ok": True}).decode()
        ops.append(hset(keys.evidence("t1", "n1"), f"e{number}", value))
        ops.append(dirty(f"evidence:t1:n1:e{number}"))
    return ops


class InRedis:
    """Microseconds that scripts have run for, as the server counts them."""

    def __init__(self, url: str) -> None:
        self.client: Any = redis.Redis.from_url(url)

    def reset(self) -> None:
        self.client.config_resetstat()

    def microseconds(self) -> float:
        stats = self.client.info("commandstats")
        ran = [stats[name] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats]
        return sum(float(one["usec"]) for one in ran) / sum(int(one["calls"]) for one in ran)


async def flush_scripts(url: str) -> list[Result]:
    hot, counted = connect(url, prefix=keys.PREFIX, socket_timeout=5, max_connections=2), InRedis(url)
    sha = counted.client.script_load(JSON_SCRIPT)
    results = []
    for kilobytes, goal in SIZES.items():
        ops, ratios, flat_times = operations(kilobytes), [], []
        for _ in range(ROUNDS):
            flat = await _flat(hot, counted, ops)
            ratios.append(flat / _as_json(counted, sha, ops))
            flat_times.append(flat)
        told = f"{statistics.median(flat_times):.0f} µs in Redis"
        results.append(
            Result(f"G6 flush of {kilobytes} KB / by JSON", statistics.median(ratios), goal, True, told)
        )
    await hot.close()
    counted.client.close()
    return results


async def _flat(hot: Any, counted: InRedis, ops: list[Op]) -> float:
    scope = Scope(new_id(), new_id())
    acquired = await hot.acquire(
        scope, run_id="r1", user_id="u1", token="t", lease_ms=TTL, ttl_ms=TTL, now_ms=NOW, baseline=0
    )  # fmt: skip
    turn = r.TurnRef(
        organ_id=scope.organ_id, conversation_id=scope.conversation_id, run_id="r1",
        version=acquired.version, lease_token=acquired.token,
    )  # fmt: skip
    counted.reset()
    for number in range(1, CALLS + 1):
        await hot.apply(turn, ops, ttl_ms=TTL, now_ms=NOW, sequence=number)
    return counted.microseconds()


def _as_json(counted: InRedis, sha: str, ops: list[Op]) -> float:
    """The literal reading of the specification: one JSON list, decoded by the script."""
    at = f"json:{{{new_id()}}}:"
    state, marks = at + OWN_KEYS[0], at + OWN_KEYS[2]
    counted.client.hset(state, mapping={"version": "1", "lastTraceId": "r1"})
    listed = [
        {
            "op": op.op.value,
            "key": at + op.key if op.key else "",
            "field": op.field,
            "value": msgspec.json.decode(op.value) if op.value else None,
        }
        for op in ops
    ]
    text = msgspec.json.encode(listed)
    counted.reset()
    for number in range(1, CALLS + 1):
        counted.client.evalsha(sha, 2, state, marks, "1", "r1", str(number), text, str(TTL))
    return counted.microseconds()
