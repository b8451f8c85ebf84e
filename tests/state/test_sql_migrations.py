"""The schema: made once, by whoever comes first, whatever was there; the same on both stores as the code
believes it to be, with the keys that make duplicates impossible."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, String, Table, Text, inspect, text
from sqlalchemy.dialects import mysql

from state_service.adapters import sql_migrate
from state_service.adapters.sql_tables import metadata
from state_service.ports import StoreUnavailable
from tests import services
from tests.conftest import Stores
from tests.servers import PrivateRedis, free_port, private_folder
from tests.state.sql_bench import SqlBench, Story, message

TABLES = metadata.sorted_tables
T = TypeVar("T")

# Decision D29 (organ_id comes first in each), and what state.md adds to it.
UNIQUE = [
    ("chat_conversation", ["conversation_id"]),
    ("chat_message", ["conversation_id", "message_id"]),
    ("task_instance", ["task_id"]),
    ("task_graph_node", ["task_id", "node_id"]),
    ("task_graph_edge", ["task_id", "from_node_id", "to_node_id"]),
    ("task_checkpoint", ["checkpoint_id"]),
    ("task_resume_record", ["resume_id"]),
    ("tool_call_record", ["call_id"]),
    ("tool_call_record", ["task_id", "live_key"]),
    ("task_node_payload", ["payload_id"]),
    ("diagnosis_run", ["run_id"]),
    ("diagnosis_run", ["message_id"]),
    ("run_trace", ["run_id", "sequence"]),
    ("turn_commit", ["run_id"]),
    ("conversation_entity", ["conversation_id", "entity_type", "entity_id"]),
]

# What the sweeper asks of all organisations at once.
ACROSS = {
    "ix_diagnosis_run_unfinished",
    "ix_chat_conversation_erasing",
    "ix_chat_conversation_age",
    "ix_task_node_payload_age",
    "ix_run_trace_age",
}


@pytest.fixture
async def empty(stores: Stores) -> AsyncIterator[SqlBench]:
    """A database without a table."""
    bench = SqlBench(stores.fresh_sql_url())
    yield bench
    await bench.cold.close()


async def on(bench: SqlBench, work: Callable[[Connection], T]) -> T:
    async with bench.engine.begin() as connection:
        return await connection.run_sync(work)


def _differences(connection: Connection) -> list[Any]:
    context = MigrationContext.configure(
        connection, opts={"compare_type": True, "compare_server_default": True}
    )
    differences: list[Any] = compare_metadata(context, metadata)
    return differences


def _tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


def _unique(connection: Connection) -> dict[str, list[list[str]]]:
    inspector = inspect(connection)
    return {
        table.name: sorted([*key["column_names"]] for key in inspector.get_unique_constraints(table.name))
        for table in TABLES
    }


async def complete(bench: SqlBench) -> None:
    """The database is what the code believes it to be."""
    assert await on(bench, _differences) == []
    assert await sql_migrate.current(bench.engine) == sql_migrate.latest()


# --- coming to be ---------------------------------------------------------------------------------


async def test_an_empty_database_becomes_what_the_code_believes_it_to_be(empty: SqlBench) -> None:
    assert await sql_migrate.current(empty.engine) is None
    await sql_migrate.upgrade(empty.engine)
    await complete(empty)


async def test_the_comparison_would_find_a_difference(empty: SqlBench) -> None:
    await sql_migrate.upgrade(empty.engine)
    await on(empty, lambda c: c.execute(text("ALTER TABLE turn_commit ADD COLUMN more INTEGER")))
    assert len(await on(empty, _differences)) == 1


async def test_migrating_again_keeps_what_is_there(empty: SqlBench) -> None:
    await sql_migrate.upgrade(empty.engine)
    story = Story(empty.cold)
    await story.begin(1)
    before = await empty.dump(story.scope.organ_id)
    await sql_migrate.upgrade(empty.engine)
    await complete(empty)
    assert await empty.dump(story.scope.organ_id) == before


async def test_many_that_migrate_at_once_all_succeed(stores: Stores) -> None:
    url = stores.fresh_sql_url()
    async with AsyncExitStack() as stack:
        benches = [SqlBench(url) for _ in range(4)]
        for bench in benches:
            stack.push_async_callback(bench.cold.close)
        await asyncio.gather(*(sql_migrate.upgrade(bench.engine) for bench in benches))
        await complete(benches[0])


async def test_C152_a_migration_that_was_cut_short_goes_on_where_it_ended(empty: SqlBench) -> None:
    await sql_migrate.upgrade(empty.engine)

    def undo_some(connection: Connection) -> None:
        connection.execute(text("DROP TABLE turn_commit"))
        where = "" if empty.is_sqlite else " ON tool_call_record"
        connection.execute(text(f"DROP INDEX ix_tool_call_record_2{where}"))
        connection.execute(text("DELETE FROM alembic_version"))

    await on(empty, undo_some)
    await sql_migrate.upgrade(empty.engine)
    await complete(empty)


async def test_down_and_up_again_is_a_round_trip(empty: SqlBench) -> None:
    await sql_migrate.upgrade(empty.engine)
    await on(empty, lambda c: command.downgrade(sql_migrate._config(c), "base"))
    assert await on(empty, _tables) == {"alembic_version"}
    assert await sql_migrate.current(empty.engine) is None
    await sql_migrate.upgrade(empty.engine)
    await complete(empty)


# --- what every table has -------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
async def test_every_table_has_the_common_columns_and_its_tenant_leads_every_index(
    bench: SqlBench, table: Table
) -> None:
    columns, indexes = await on(bench, lambda c: _columns_and_indexes(c, table.name))
    for name in ("id", "organ_id", "create_time", "update_time", "version", "delete_flag"):
        assert name in columns, name
        assert columns[name]["nullable"] is False, name
    assert f"uk_{table.name}" in indexes
    ours = {name: columns for name, columns in indexes.items() if name not in ACROSS}
    assert {columns[0] for columns in ours.values()} == {"organ_id"}, ours


def _columns_and_indexes(connection: Connection, table: str) -> tuple[dict[str, Any], dict[Any, Any]]:
    inspector = inspect(connection)
    columns = {column["name"]: column for column in inspector.get_columns(table)}
    indexes = [*inspector.get_indexes(table), *inspector.get_unique_constraints(table)]
    return columns, {index["name"]: index["column_names"] for index in indexes}


async def test_every_business_key_is_unique(bench: SqlBench) -> None:
    found = await on(bench, _unique)
    wanted: dict[str, list[list[str]]] = {table.name: [] for table in TABLES}
    for table, columns in UNIQUE:
        wanted[table].append(["organ_id", *columns])
    assert found == {name: sorted(keys) for name, keys in wanted.items()}


async def test_every_text_column_of_the_server_compares_byte_for_byte(bench: SqlBench) -> None:
    if bench.is_sqlite:
        pytest.skip("SQLite compares byte for byte unless told otherwise")

    def collations(connection: Connection) -> dict[tuple[str, str], tuple[str, str]]:
        rows = connection.execute(
            text(
                "SELECT table_name, column_name, character_set_name, collation_name"
                " FROM information_schema.columns"
                " WHERE table_schema = DATABASE() AND table_name <> 'alembic_version'"
                " AND collation_name IS NOT NULL"
            )
        )
        return {(row[0], row[1]): (row[2], row[3]) for row in rows}

    wanted = {}
    for table in TABLES:
        for column in table.columns:
            kind = column.type.dialect_impl(mysql.dialect())
            if isinstance(kind, String | Text):
                narrow = isinstance(kind, String) and kind.length == 64
                wanted[table.name, column.name] = (
                    ("ascii", "ascii_bin") if narrow else ("utf8mb4", "utf8mb4_bin")
                )
    assert await on(bench, collations) == wanted


async def test_every_table_of_the_server_is_transactional(bench: SqlBench) -> None:
    if bench.is_sqlite:
        pytest.skip("SQLite has one engine")

    def engines(connection: Connection) -> set[str]:
        rows = connection.execute(
            text("SELECT DISTINCT engine FROM information_schema.tables WHERE table_schema = DATABASE()")
        )
        return {row[0] for row in rows}

    assert await on(bench, engines) == {"InnoDB"}


@pytest.mark.parametrize(("one", "other"), [("Ab", "ab"), ("A-1", "a-1"), ("a_1", "a-1")])
async def test_ids_that_differ_in_a_byte_are_two(bench: SqlBench, one: str, other: str) -> None:
    organ_id = Story(bench.cold).scope.organ_id
    stories = [Story(bench.cold, organ_id=organ_id, conversation_id=name) for name in (one, other)]
    turns = [await story.begin(1, message_id=story.scope.conversation_id) for story in stories]
    for name in (one, other):
        assert await bench.cold.insert_message(turns[0], message(turns[0], message_id=name))
    rows = await bench.cold.load_conversation(stories[0].scope, dialogue_max=9, records_max=9)
    assert rows is not None
    assert sorted(m.message_id for m in rows.dialogue) == sorted([one, other])
    alone = await bench.cold.load_conversation(stories[1].scope, dialogue_max=9, records_max=9)
    assert alone is not None
    assert alone.dialogue == ()


# --- what is said about it ------------------------------------------------------------------------


def migrate(url: str) -> subprocess.CompletedProcess[str]:
    """The command as an operator runs it, with the default log level."""
    return subprocess.run(
        [sys.executable, "-m", "state_service", "migrate"],
        env={**os.environ, "TURNFENCE_SQL_URL": url, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=services.READY_SECONDS,
        check=False,
    )


async def test_the_command_says_one_line_and_no_more(stores: Stores) -> None:
    done = await asyncio.to_thread(migrate, stores.fresh_sql_url())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"the schema is at revision {sql_migrate.latest()}\n"


async def test_a_service_that_migrates_itself_logs_nothing_of_it(
    tmp_path: Path, valkey: PrivateRedis
) -> None:
    with private_folder() as folder:
        stores = {"TURNFENCE_REDIS_URL": valkey.url, "TURNFENCE_DATA_DIR": str(tmp_path)}
        service = services.Service("state_service", folder, stores)
        try:
            await asyncio.to_thread(service.start)
        finally:
            service.kill()
        lines = [json.loads(line) for line in service.log.read_text().splitlines()]
    assert [(line["logger"], line["event"]) for line in lines] == [("state_service.server", "serving")]


async def test_a_database_that_cannot_be_reached_is_unavailable() -> None:
    bench = SqlBench(f"mysql://root@127.0.0.1:{free_port()}/nowhere", timeout=1)
    for ask in (sql_migrate.upgrade, sql_migrate.current):
        with pytest.raises(StoreUnavailable):
            await ask(bench.engine)
    await bench.cold.close()


@pytest.mark.servers
async def test_the_command_says_in_one_line_why_it_cannot(mariadb_server: Callable[[], str]) -> None:
    url = mariadb_server()
    database = url.rpartition("/")[2].partition("?")[0]
    done = await asyncio.to_thread(migrate, url.replace(database, "nowhere"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr
