"""The SQL engine and its transactions: bounded, repeated whole, and never torn by a cancelled caller.

MySQL and MariaDB run READ COMMITTED in strict mode; SQLite in WAL with BEGIN IMMEDIATE, since a plain
BEGIN loses updates (T1, T2). Driver errors stop here and are told apart by code, never by text.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from state_service.ports import StoreCorrupt, StoreUnavailable

T = TypeVar("T")

TRIES = 6  # of one transaction that lost a deadlock or waited too long for a lock
READ_ONLY = "turnfence_read_only"

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "mysql": "mysql+aiomysql", "mariadb": "mysql+aiomysql"}
_LOST = frozenset({1040, 1053, 1152, 1153, 1158, 1159, 1160, 1161, 1203, 2002, 2003, 2006, 2013, 2055})
# The server answers, but not this, not now: full disk, node not ready, user's limit, read only, interrupted.
_NOT_NOW = frozenset({1021, 1047, 1114, 1226, 1290, 1317, 1792, 1836, 1927, 1969, 3024})
_TRY_AGAIN = frozenset({1205, 1213, 1020})
_SQLITE_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


def engine_url(url: str) -> URL:
    """The URL with the driver that is used for it. ``mariadb+aiomysql`` is another dialect's name under
    which every MySQL option would be ignored: it is rewritten. ``ValueError`` for other databases."""
    parsed = make_url(url)
    backend = parsed.get_backend_name()
    if backend not in _DRIVERS:
        raise ValueError(f"{backend} is not supported: use MySQL, MariaDB or SQLite")
    return parsed.set(drivername=_DRIVERS[backend])


def create_engine(url: str, *, timeout: float, connections: int) -> AsyncEngine:
    """An engine whose pool and statements are bounded by ``timeout`` seconds."""
    parsed = engine_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed, timeout, connections)
    seconds = max(1, round(timeout))
    return create_async_engine(
        parsed.update_query_dict({"charset": "utf8mb4"}),
        isolation_level="READ COMMITTED",
        pool_size=connections,
        max_overflow=0,
        pool_timeout=timeout,
        pool_pre_ping=True,
        pool_recycle=1800,
        connect_args={
            "connect_timeout": seconds,
            "init_command": (
                "SET SESSION sql_mode = 'TRADITIONAL', time_zone = '+00:00',"
                f" innodb_lock_wait_timeout = {seconds}"
            ),
        },
    )


def _sqlite(url: URL, timeout: float, connections: int) -> AsyncEngine:
    if url.database and url.database != ":memory:":
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_async_engine(
        url, pool_size=connections, max_overflow=0, pool_timeout=timeout, connect_args={"timeout": timeout}
    )

    @event.listens_for(engine.sync_engine, "connect")
    def _configure(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # transactions are begun by us, below
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute(f"PRAGMA busy_timeout = {round(timeout * 1000)}")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        read_only = connection.get_execution_options().get(READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


class Transactions:
    """Runs work in transactions. A caller that is cancelled waits for its transaction's end: a torn one
    would leave a lock, or an answer for somebody else, behind (D31)."""

    def __init__(self, engine: AsyncEngine, *, timeout: float) -> None:
        self.engine = engine
        self._timeout = timeout
        self._running: set[asyncio.Task[Any]] = set()

    async def write(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """One transaction, repeated whole on a deadlock or lock time-out. ``IntegrityError`` passes: it
        is an answer. Raises ``StoreUnavailable`` (a commit's outcome may be unknown), ``StoreCorrupt``."""
        return await self._shielded(self._repeated(work, {}))

    async def read(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """The same, reading one consistent snapshot."""
        options: dict[str, Any] = {READ_ONLY: True}
        if self.engine.dialect.name != "sqlite":
            options = {"isolation_level": "REPEATABLE READ"}
        return await self._shielded(self._repeated(work, options))

    async def close(self) -> None:
        if self._running:
            await asyncio.wait(set(self._running))
        await self.engine.dispose()

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # retrieved: the caller that would have seen it is gone
            raise

    async def _repeated(self, work: Callable[[AsyncConnection], Awaitable[T]], options: dict[str, Any]) -> T:
        for tries_left in reversed(range(TRIES)):
            try:
                async with asyncio.timeout(self._timeout * 2):
                    return await self._once(work, options)
            except IntegrityError:
                raise
            except DBAPIError as error:
                if not tries_left or not _may_repeat(error):
                    raise _translated(error) from error
            except (PoolTimeout, TimeoutError, OSError) as error:
                raise StoreUnavailable(type(error).__name__) from error
            await asyncio.sleep(random.uniform(0.002, 0.02))  # noqa: S311  jitter
        raise AssertionError("unreachable: the last try raises")

    async def _once(self, work: Callable[[AsyncConnection], Awaitable[T]], options: dict[str, Any]) -> T:
        async with self.engine.connect() as connection:
            connection = await connection.execution_options(**options)
            async with connection.begin():
                return await work(connection)


def _code(error: DBAPIError) -> int:
    """The driver's own number; 0 when it has none."""
    original = error.orig
    cause = getattr(original, "__cause__", None)
    for candidate in (original, cause):
        number = getattr(candidate, "sqlite_errorcode", None)
        if isinstance(number, int):
            return number & 0xFF
        args = getattr(candidate, "args", ())
        if args and isinstance(args[0], int):
            return args[0]
    return 0


def _may_repeat(error: DBAPIError) -> bool:
    """The transaction was rolled back whole, or waited for a lock: nothing of it is there."""
    code = _code(error)
    return code in _TRY_AGAIN or (_is_sqlite(error) and code in _SQLITE_BUSY)


def _is_sqlite(error: DBAPIError) -> bool:
    return type(error.orig).__module__.startswith(("sqlite3", "aiosqlite", "sqlalchemy.dialects.sqlite"))


def _translated(error: DBAPIError) -> StoreUnavailable | StoreCorrupt:
    code = _code(error)
    name = type(error).__name__
    if error.connection_invalidated or code in _LOST | _NOT_NOW or _may_repeat(error):
        return StoreUnavailable(f"SQL {name} {code}")
    if _is_sqlite(error) and code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL):
        return StoreUnavailable(f"SQL {name} {code}")
    if code == 0:
        return StoreUnavailable(f"SQL {name}")
    return StoreCorrupt(f"SQL {name} {code}")


async def check_server(transactions: Transactions) -> list[str]:
    """What of the server would lose data, one sentence each (design: state.md, Limits)."""

    async def look(connection: AsyncConnection) -> list[str]:
        if connection.dialect.name == "sqlite":
            mode = (await connection.execute(text("PRAGMA journal_mode"))).scalar()
            return [] if mode in ("wal", "memory") else [f"SQLite's journal mode is {mode}, not WAL."]
        mode = (await connection.execute(text("SELECT @@SESSION.sql_mode"))).scalar() or ""
        engine = (await connection.execute(text("SELECT @@default_storage_engine"))).scalar()
        problems = []
        if "STRICT_TRANS_TABLES" not in mode:
            problems.append("SQL is not in strict mode: it would cut what does not fit.")
        if str(engine).lower() != "innodb":
            problems.append(f"The default storage engine is {engine}, not InnoDB.")
        await connection.execute(text("CREATE TEMPORARY TABLE turnfence_check (a INT PRIMARY KEY, b INT)"))
        await connection.execute(text("INSERT INTO turnfence_check VALUES (1, 1)"))
        same = await connection.execute(text("UPDATE turnfence_check SET b = 1 WHERE a = 1"))
        await connection.execute(text("DROP TEMPORARY TABLE turnfence_check"))
        if same.rowcount != 1:
            problems.append("The driver counts changed rows, not found ones: every fence would fail.")
        return problems

    return await transactions.write(look)
