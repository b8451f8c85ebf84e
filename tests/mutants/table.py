"""The mutants: what a naive implementation would do, one property at a time (reliability.md 5.5).

Each takes one property out of the real code, by replacing one piece of text that must occur exactly once, and
names the tests of which at least one must fail then. One mutant of that list is equivalent here: unknown
fields may be kept in the message, since the codec reads the known ones alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # pytest node ids or paths
    only: str = ""  # pytest -k


MUTANTS = (
    Mutant(
        "no version compare in flush",
        "state_service/adapters/lua/ops.lua",
        "state.deleted ~= '' or state.version ~= version or state.lastTraceId ~= run",
        "state.deleted ~= '' or false",
        ("tests/contract/test_state_flush.py",),
        "embedded-unary",
    ),
    Mutant(
        "compare the version alone, not the run",
        "state_service/adapters/lua/ops.lua",
        "state.version ~= version or state.lastTraceId ~= run then return 0 end\n  if not state.stamped",
        "state.version ~= version then return 0 end\n  if not state.stamped",
        ("tests/contract/test_state_flush.py",),
        "embedded-unary",
    ),
    Mutant(
        "persist without compare-and-set in SQL",
        "state_service/adapters/sql_claim.py",
        'if row is None or (row["fence_version"], row["fence_trace"]) != (turn.version, turn.run_id):',
        "if row is None:",
        ("tests/state/test_sql_cold.py", "tests/state/test_sql_claim.py", "tests/state/test_sql_calls.py"),
        "embedded",
    ),
    Mutant(
        "no claim in SQL at begin",
        "state_service/adapters/sql_claim.py",
        ".values(fence_version=version, fence_trace=start.run_id, update_time=now_ms)",
        ".values(update_time=now_ms)",
        ("tests/state/test_sql_claim.py", "tests/contract/test_state_begin.py"),
        "embedded",
    ),
    Mutant(
        "no commit token",
        "state_service/adapters/sql_persist.py",
        "    await sql_runs.commit(connection, scope, counted, batch.persist_seq, now_ms)\n",
        "",
        ("tests/contract/test_state_persist.py",),
        "embedded-unary",
    ),
    Mutant(
        "skip the S2 SQL insert",
        "state_service/conversation/writes.py",
        "    cold = await _register_cold(stores, request)\n",
        "    cold = S2Result(S2.INSERTED, head)\n",
        ("tests/state/test_state_outage.py", "tests/contract/test_state_writes.py"),
        "embedded",
    ),
    Mutant(
        "S2 insert not fenced",
        "state_service/adapters/sql_groups.py",
        "if fences[w.scope] == (w.asked.turn.version, w.asked.turn.run_id)]",
        "]",
        ("tests/state/test_sql_claim.py",),
        "embedded",
    ),
    Mutant(
        "UNKNOWN treated as retryable",
        "state_service/core/changes.py",
        "UNRESOLVED = frozenset({",
        "UNRESOLVED = frozenset() and frozenset({",
        ("tests/contract/test_state_writes.py", "tests/contract/test_state_settle.py"),
        "embedded-unary",
    ),
    Mutant(
        "renew without identity",
        "state_service/adapters/lua/renew.lua",
        "local repeated = mine and version > baseline",
        "local repeated = false",
        ("tests/contract/test_state_begin.py",),
        "embedded-unary",
    ),
    Mutant(
        "no stale detection",
        "state_service/conversation/recover.py",
        "        if view.conversation.stamp < known:\n",
        "        if known < (0, 0):\n",
        ("tests/state/test_state_outage.py",),
        "embedded",
    ),
    Mutant(
        "no per-turn flush sequence",
        "state_service/adapters/lua/flush.lua",
        "  if sequence ~= last + 1 then return { -2, state.seq } end\n",
        "",
        ("tests/contract/test_state_flush.py",),
        "embedded-unary",
    ),
    Mutant(
        "a repeated flush is applied again",
        "state_service/adapters/lua/flush.lua",
        "  if sequence == last and state.flushHash == hash then return { 2, state.seq } end\n"
        "  if sequence ~= last + 1",
        "  if sequence ~= last + 1 and sequence ~= last",
        ("tests/contract/test_state_flush.py",),
        "embedded-unary",
    ),
    Mutant(
        "unlock without compare",
        "state_service/adapters/lua/lease.lua",
        "if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return { 0, '' } end\n",
        "",
        ("tests/contract/test_state_flush.py", "tests/contract/test_state_persist.py"),
        "embedded-unary",
    ),
    Mutant(
        "no drain of an unfinished predecessor",
        "state_service/conversation/recover.py",
        "        if view.conversation.dirty:\n",
        "        if not rehydrated and rehydrated:\n",
        ("tests/state/test_state_process.py", "tests/contract/test_state_persist.py"),
        "embedded",
    ),
    Mutant(
        "what S1 left in SQL is not merged back",
        "state_service/conversation/recover.py",
        "return [m for m in claim.messages if m.message_id not in known and (m.version, m.idx) > oldest]",
        "return [m for m in claim.messages if m.message_id not in known and (m.version, m.idx) < oldest]",
        ("tests/contract/test_state_begin.py", "tests/state/test_state_outage.py"),
        "embedded",
    ),
    Mutant(
        "an older batch overwrites a newer one",
        "state_service/adapters/sql_persist.py",
        "if (batch.data_version, batch.persist_seq) < known:",
        "if known < (0, 0):",
        ("tests/state/test_sql_cold.py",),
        "embedded",
    ),
    Mutant(
        "a barred turn does not look for its own end",
        "state_service/conversation/persist.py",
        "        if ended is None:\n            raise\n",
        "        raise\n",
        ("tests/contract/test_state_persist.py", "tests/state/test_sql_unknown_outcome.py"),
        "embedded-unary or never_fenced",
    ),
    Mutant(
        "a late begin mends what its turn has changed since",
        "state_service/adapters/lua/flush.lua",
        "if phase ~= '' and state.flushSeq ~= '' and state.flushSeq > 0 then",
        "if phase == 'LATER' then",
        ("tests/state/test_redis_hot.py",),
        "phase",
    ),
    Mutant(
        "a dead turn's STARTED write is not normalised",
        "state_service/conversation/recover.py",
        "        changed = normalise.head(head, turn.run_id)\n",
        "        changed = None\n",
        ("tests/state/test_state_process.py", "tests/state/test_state_outage.py"),
        "embedded",
    ),
    Mutant(
        "a run row that is never closed",
        "state_service/conversation/recover.py",
        "    if not await stores.cold.interrupt(turn, ends):\n",
        "    if not ends:\n",
        ("tests/state/test_state_process.py", "tests/state/test_sweeper.py"),
        "embedded",
    ),
    Mutant(
        "keys without a TTL",
        "state_service/adapters/lua/ops.lua",
        "redis.call('PEXPIRE', key, text_of(ms))",
        "local _ = ms",
        ("tests/state/test_state_process.py",),
        "embedded",
    ),
    Mutant(
        "the organisation is left out of every condition",
        "state_service/adapters/sql_statements.py",
        "    tenant = table.c.organ_id == organ_id\n",
        '    tenant = table.c.organ_id != ""\n',
        ("tests/contract/test_state_begin.py", "tests/contract/test_state_history.py"),
        "embedded-unary",
    ),
    Mutant(
        "a deletion that does not move the fence",
        "state_service/adapters/sql_upkeep.py",
        '                "delete_flag": 1,\n',
        "",
        ("tests/contract/test_state_history.py",),
        "embedded-unary",
    ),
    Mutant(
        "no lease check before a write is called",
        "harness_service/agent/writes.py",
        "    try:\n        scope.check_lease()\n    except RunAborted:",
        "    try:\n        pass\n    except RunAborted:",
        ("tests/pair/test_zombie.py",),
        "embedded",
    ),
    Mutant(
        "evidence is not looked at before a conclusion is published",
        "harness_service/agent/releasing.py",
        "        self._refresh(evidence_valid=not self._problems)\n",
        "        self._refresh(evidence_valid=True)\n",
        ("tests/pair/test_release.py",),
        "embedded",
    ),
    Mutant(
        "a session serves the calls of one run in any order",
        "state_service/session.py",
        "self._last_of_run.get(run_id) if queued else None",
        "None",
        ("tests/harness/test_state_client.py",),
    ),
)
