"""Every statement is one organisation's: nothing is read, changed or written without its id, nothing of
another is ever seen, and every statement finds its rows by an index."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from sqlalchemy import Table, event, insert, text
from sqlalchemy.sql import dml, operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList
from sqlalchemy.sql.selectable import Select

from state_service import ports
from state_service.adapters.sql_history import SqlHistory
from state_service.adapters.sql_tables import metadata
from state_service.adapters.sql_upkeep import SqlUpkeep
from state_service.ports import ColdCall, Commit, Page, RunStart
from tests.contract.turns import NOW, new_id
from tests.state.sql_bench import SqlBench, Story, message, write_head
from tests.state.sql_records import checkpoint, trace, whole
from turnfence import records as r
from turnfence.axes import CallStatus, StreamState
from turnfence.serving.process import SystemClock

ROWS = 300  # of each table, so that an index is worth more than a scan

# Drivers and SQLite's transactions; everything else is built in one place.
NOT_OURS = ("BEGIN", "BEGIN IMMEDIATE", "SELECT 1")


@dataclass(frozen=True)
class Sent:
    """One statement as it went to the driver."""

    sql: str
    parameters: Any
    built: Any
    values: list[dict[str, Any]] = field(repr=False)

    @property
    def table(self) -> Table:
        if isinstance(self.built, Select):
            (table,) = self.built.get_final_froms()
        else:
            table = self.built.table
        assert isinstance(table, Table)
        return table

    def conditions(self) -> dict[str, Any]:
        """Column → the value that it must be equal to, of what is not inside an OR."""
        where = self.built.whereclause
        parts = where.clauses if isinstance(where, BooleanClauseList) else [where]
        assert not isinstance(where, BooleanClauseList) or where.operator is operators.and_
        equal = [p for p in _flat(parts) if isinstance(p, BinaryExpression) and p.operator is operators.eq]
        return {
            str(part.left.key): part.right.effective_value
            for part in equal
            if isinstance(part.right, BindParameter)
        }

    def organisations(self) -> set[Any]:
        """Of the rows that an INSERT writes."""
        return {value for row in self.values for name, value in row.items() if name.startswith("organ_id")}


def _flat(parts: Any) -> Iterator[Any]:
    for part in parts:
        if isinstance(part, BooleanClauseList) and part.operator is operators.and_:
            yield from _flat(part.clauses)
        else:
            yield part


@contextlib.contextmanager
def recorded(bench: SqlBench) -> Iterator[list[Sent]]:
    """Everything that the engine sends meanwhile."""
    sent: list[Sent] = []

    def note(connection: Any, cursor: Any, sql: str, parameters: Any, context: Any, many: bool) -> None:
        if context.compiled is None:
            assert sql in NOT_OURS, f"not built where statements are built: {sql}"
            return
        sent.append(Sent(sql, parameters, context.invoked_statement, context.compiled_parameters))

    event.listen(bench.engine.sync_engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(bench.engine.sync_engine, "before_cursor_execute", note)


# --- every method of the ports --------------------------------------------------------------------

Calls = dict[str, Callable[[], Awaitable[Any]]]


@dataclass
class Desk:
    """A conversation in whose middle every method has something to do."""

    bench: SqlBench
    story: Story
    turn: r.TurnRef
    start: RunStart
    given: ports.PersistBatch

    def cold(self) -> Calls:
        cold, scope, turn, given = self.bench.cold, self.story.scope, self.turn, self.given
        organ_id, head = scope.organ_id, given.calls[0]
        taken = msgspec.structs.replace(given.calls[0], evidence_id=new_id(), status=CallStatus.SUCCESS)
        calls = [ColdCall(one, "{}", "[1]") for one in (head, taken)]
        fuller = msgspec.structs.replace(
            given,
            checkpoints={"t1": checkpoint()},
            checkpoints_gone=("c1",),
            entities={**given.entities, "host:gone": None},
        )
        return {
            "conversation": lambda: cold.conversation(scope),
            "claim": self._claims,
            "load_conversation": lambda: cold.load_conversation(scope, dialogue_max=9, records_max=9),
            "load_task": lambda: cold.load_task(scope, "t1"),
            "insert_message": lambda: cold.insert_message(turn, message(turn)),
            "register_call": lambda: cold.register_call(turn, write_head(turn), "{}"),
            "settle_calls": lambda: cold.settle_calls(turn, calls),
            "put_payload": lambda: cold.put_payload(turn, payload_id="p2", payload_type="OUTPUT", data="{}"),
            "persist": lambda: cold.persist(turn, fuller, now_ms=NOW),
            "committed": lambda: cold.committed(organ_id, turn.run_id),
            "interrupt": lambda: cold.interrupt(turn, given.run_ends),
            "give_up": lambda: cold.give_up(scope, given.run_ends[0]),
            "calls": lambda: cold.calls(scope, [call.evidence_id for call in given.calls]),
            "append_late_trace": lambda: cold.append_late_trace(scope, turn.run_id, trace(99)),
            "run": lambda: cold.run(organ_id, self.story.user_id, turn.run_id),
            "run_by_message": lambda: cold.run_by_message(organ_id, self.start.message_id),
            "closing_events": lambda: cold.closing_events(organ_id, turn.run_id),
            "previous_turn": lambda: cold.previous_turn(scope),
            "node_dialogue": lambda: cold.node_dialogue(scope, "t1", "n1"),
            "call_requests": lambda: cold.call_requests(scope, [head.evidence_id]),
            "call_payload": lambda: cold.call_payload(scope, "t1", head.evidence_id),
            "payload": lambda: cold.payload(scope, "p1"),
        }

    async def _claims(self) -> None:
        """A repeat, and the first one of another conversation."""
        await self.story.claim(1, self.start)
        await Story(self.bench.cold, organ_id=self.story.scope.organ_id).claim(1)

    def history(self) -> Calls:
        reader, scope = SqlHistory(self.bench.transactions, SystemClock()), self.story.scope
        organ_id, user_id, page = scope.organ_id, self.story.user_id, Page(size=2)
        return {
            "conversations": lambda: reader.conversations(organ_id, user_id, page),
            "messages": lambda: reader.messages(scope, page),
            "tasks": lambda: reader.tasks(scope, page),
            "runs": lambda: reader.runs(organ_id, user_id, scope.conversation_id, page),
            "trace": lambda: reader.trace(organ_id, self.turn.run_id, page),
            "evidence": lambda: reader.evidence(organ_id, self.turn.run_id, page),
            "record_stream_end": lambda: reader.record_stream_end(
                organ_id, self.turn.run_id, StreamState.TERMINAL, 4
            ),
        }

    def erasure(self) -> Calls:
        """What looks after one conversation: it goes last."""
        upkeep, scope = SqlUpkeep(self.bench.transactions), self.story.scope
        return {
            "bury": lambda: upkeep.bury(scope, self.story.user_id, NOW),
            "recent_runs": lambda: upkeep.recent_runs(scope, 0),
            "erase_some": lambda: upkeep.erase_some(scope, 5),
            "erased": lambda: upkeep.erased(scope),
        }

    def all(self) -> Calls:
        return {**self.cold(), **self.history(), **self.erasure()}


async def desk(bench: SqlBench, story: Story) -> Desk:
    start = story.start()
    await story.claim(1, start)
    turn = story.turn(1, start.run_id)
    given = whole(story, turn)
    await bench.cold.put_payload(turn, payload_id="p1", payload_type="OUTPUT", data="{}")
    still_running = msgspec.structs.replace(given, run_ends=())
    assert await bench.cold.persist(turn, still_running, now_ms=NOW) is Commit.DONE
    return Desk(bench, story, turn, start, given)


def methods_of(port: type) -> set[str]:
    return {name for name in vars(port) if not name.startswith("_")} - {"close"}


ACROSS = {"unfinished", "aged", "half_erased", "drop_payloads", "drop_traces"}  # the sweeper's


async def test_these_tests_call_every_method_of_the_ports(bench: SqlBench, story: Story) -> None:
    at = await desk(bench, story)
    assert set(at.cold()) == methods_of(ports.ColdStore)
    assert set(at.history()) == methods_of(ports.HistoryStore)
    assert set(at.erasure()) == methods_of(ports.UpkeepStore) - ACROSS


async def test_every_statement_names_the_organisation(bench: SqlBench, story: Story) -> None:
    at = await desk(bench, story)
    organ_id = story.scope.organ_id
    kinds: dict[str, set[str]] = {}
    for name, call in at.all().items():
        with recorded(bench) as sent:
            await call()
        assert sent, f"{name} sends nothing"
        for one in sent:
            kinds.setdefault(type(one.built).__name__, set()).add(one.table.name)
            if isinstance(one.built, dml.Insert):
                assert one.organisations() == {organ_id}, (name, one.sql)
                continue
            assert one.conditions().get("organ_id") == organ_id, (name, one.sql)
            _sees_only_what_is_there(name, one)
    assert kinds["Insert"] == {table.name for table in metadata.sorted_tables}
    assert {"Select", "Update", "Delete"} <= set(kinds)


def _sees_only_what_is_there(name: str, one: Sent) -> None:
    """Rows marked as deleted are seen by the question whose the conversation is, and by erasure."""
    if name in ("bury", "recent_runs", "erase_some", "erased") or isinstance(one.built, dml.Delete):
        return
    if one.conditions().get("delete_flag") != 0:
        assert isinstance(one.built, Select), (name, one.sql)
        assert one.table.name == "chat_conversation", (name, one.sql)


async def test_the_sweeper_alone_looks_across_and_says_whose_each_row_is(
    bench: SqlBench, story: Story
) -> None:
    await desk(bench, story)
    upkeep = SqlUpkeep(bench.transactions)
    calls: Calls = {
        "unfinished": lambda: upkeep.unfinished(NOW + 1, 9),
        "aged": lambda: upkeep.aged(NOW + 1, 9),
        "half_erased": lambda: upkeep.half_erased(9),
        "drop_payloads": lambda: upkeep.drop_payloads(0, 9),
        "drop_traces": lambda: upkeep.drop_traces(0, 9),
    }
    assert set(calls) == ACROSS
    for name, call in calls.items():
        with recorded(bench) as sent:
            await call()
        first, *others = sent
        assert "organ_id" in {column.name for column in first.built.selected_columns}, name
        assert all("organ_id" in one.conditions() for one in others), name


READS = [
    *("conversation", "load_conversation", "load_task", "committed", "run", "run_by_message"),
    *("closing_events", "previous_turn", "node_dialogue", "call_requests", "call_payload", "payload"),
]


async def test_the_same_ids_of_two_organisations_never_meet(bench: SqlBench, story: Story) -> None:
    """With every id in common: what one organisation does, the other neither sees nor feels."""
    mine = await desk(bench, story)
    before = await bench.dump(story.scope.organ_id)
    theirs = Story(bench.cold, conversation_id=story.scope.conversation_id)
    theirs.user_id = story.user_id
    turn = theirs.turn(1, mine.turn.run_id)
    at = Desk(bench, theirs, turn, mine.start, mine.given)
    for name in READS:
        assert not await at.cold()[name](), name
    for name, call in at.history().items():
        assert await call() in (([], ()), False), name
    await theirs.claim(1, mine.start)
    for call in at.all().values():
        await call()
    assert await bench.dump(theirs.scope.organ_id) != {}
    assert await bench.dump(story.scope.organ_id) == before


# --- plans ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def busy(bench: SqlBench) -> Desk:
    """A conversation among hundreds of the same organisation."""
    at = await desk(bench, Story(bench.cold))
    await bench.cold.persist(at.turn, at.given, now_ms=NOW)
    rows = await bench.dump(at.story.scope.organ_id)
    async with bench.engine.begin() as connection:
        for table in metadata.sorted_tables:
            copies = [_copy(row, number) for number in range(ROWS) for row in rows[table.name]]
            await connection.execute(insert(table), copies)
    async with bench.engine.begin() as connection:
        names = ", ".join(table.name for table in metadata.sorted_tables)
        await connection.execute(text("ANALYZE" if bench.is_sqlite else f"ANALYZE TABLE {names}"))
    return at


def _copy(row: dict[str, Any], number: int) -> dict[str, Any]:
    """The same of another conversation."""
    copy = {**row, "create_time": NOW, "update_time": NOW}
    for name, value in row.items():
        if value and name != "organ_id" and (name.endswith("_id") or name == "live_key"):
            copy[name] = f"{number}-{value}"[:64]
    return copy


async def plan(bench: SqlBench, one: Sent) -> list[dict[str, Any]]:
    explain = "EXPLAIN QUERY PLAN " if bench.is_sqlite else "EXPLAIN "
    async with bench.engine.connect() as connection:
        found = await connection.exec_driver_sql(explain + one.sql, one.parameters)
        return [dict(row) for row in found.mappings()]


def scans(step: dict[str, Any], *, is_sqlite: bool) -> bool:
    """Whether a step of a plan reads a whole table, or a whole index."""
    if is_sqlite:
        return bool(step["detail"].startswith("SCAN"))
    if step["type"] is None:
        return "const table" not in step["Extra"]  # looked up by a unique key, and not there
    return step["type"] in ("ALL", "index") or step["key"] is None


async def test_no_statement_scans_a_table(bench: SqlBench, busy: Desk) -> None:
    for name, call in busy.all().items():
        with recorded(bench) as sent:
            await call()
        for one in sent:
            if isinstance(one.built, dml.Insert):
                continue
            steps = await plan(bench, one)
            found = [step for step in steps if scans(step, is_sqlite=bench.is_sqlite)]
            assert not found, (name, one.sql, found)


async def test_a_scan_would_be_noticed(bench: SqlBench, busy: Desk) -> None:
    sql = "SELECT * FROM chat_message WHERE content = 'x'"
    steps = await plan(bench, Sent(sql, (), None, []))
    assert any(scans(step, is_sqlite=bench.is_sqlite) for step in steps)
