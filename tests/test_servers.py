"""The private stores do what the other tests rely on: they answer, die, and come back with their data."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import aiomysql
import pymysql
import pytest
import redis
import redis.asyncio
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from tests import servers
from tests.conftest import Stores, or_missing


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_both_stores_of_a_pair_answer(stores: Stores) -> None:
    client = redis.asyncio.Redis.from_url(stores.redis_url)
    engine = create_async_engine(stores.sql_url)
    try:
        assert await client.ping()
        async with engine.connect() as connection:
            assert await connection.scalar(sqlalchemy.text("SELECT 1")) == 1
    finally:
        await client.aclose()
        await engine.dispose()


def test_each_fresh_database_is_another_one(stores: Stores) -> None:
    urls = {stores.sql_url, stores.fresh_sql_url(), stores.fresh_sql_url()}
    assert len(urls) == 3


async def test_mariadb_compares_ids_byte_by_byte(mariadb_server: Callable[[], str]) -> None:
    url = sqlalchemy.make_url(mariadb_server())
    connection = await aiomysql.connect(
        host=url.host, port=url.port, user=url.username, db=url.database, charset="utf8mb4"
    )
    try:
        async with connection.cursor() as cursor:
            await cursor.execute("CREATE TABLE t (id varchar(10))")
            await cursor.execute("INSERT INTO t VALUES ('Abc'), ('ABC')")
            await cursor.execute("SELECT count(*) FROM t WHERE id = 'ABC'")
            assert await cursor.fetchone() == (1,)
    finally:
        connection.close()


@pytest.mark.crash
@pytest.mark.parametrize("find", [servers.bundled_valkey, lambda: servers.find_program("redis-server")])
def test_redis_keeps_its_data_over_kill_and_restart(find: Callable[[], Path]) -> None:
    with or_missing():
        program = find()
    with servers.private_redis(program) as server, redis.Redis.from_url(server.url) as client:
        client.config_set("appendfsync", "always")
        client.set("k", "v")
        first = server.pid()
        assert first is not None
        server.kill()
        assert server.pid() is None
        assert gone(first)
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.start()
        assert client.get("k") == b"v"
        assert server.pid() not in {None, first}
    assert not server.folder.exists()
    assert server.pid() is None


@pytest.mark.crash
def test_mariadb_keeps_its_data_over_kill_and_restart(mariadb_template: Path) -> None:
    with servers.private_mariadb(mariadb_template) as server:
        database = sqlalchemy.make_url(server.fresh_url()).database
        server.execute("CREATE TABLE t (id int) ENGINE=InnoDB", database)
        server.execute("INSERT INTO t VALUES (7)", database)
        first = server.pid()
        assert first is not None
        server.kill()
        assert gone(first)
        with pytest.raises(pymysql.OperationalError):
            server.execute("SELECT 1")
        server.start()
        assert server.execute("SELECT id FROM t", database) == ((7,),)
    assert not server.folder.exists()


def test_a_paused_server_keeps_the_connection_and_says_nothing() -> None:
    with servers.private_valkey() as server, redis.Redis.from_url(server.url, socket_timeout=0.2) as client:
        client.ping()
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.get("k")
        server.resume()
        assert client.ping()


def refused() -> None:
    raise ConnectionRefusedError


def test_a_server_that_cannot_start_says_why() -> None:
    with servers.private_folder() as folder:
        command = ["/bin/sh", "-c", "echo no such luck; exit 3"]
        with pytest.raises(servers.ServerFailed, match=r"ended with 3[\s\S]*no such luck"):
            servers.PrivateServer("false", folder, command, refused).start()


def test_a_missing_program_is_named() -> None:
    with pytest.raises(servers.ServerMissing, match="no-such-server"):
        servers.find_program("no-such-server")


def test_missing_servers_fail_the_run_where_they_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNFENCE_REQUIRE_SERVERS", "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-server"), or_missing():
        servers.find_program("no-such-server")
    monkeypatch.delenv("TURNFENCE_REQUIRE_SERVERS")
    with pytest.raises(pytest.skip.Exception, match="no-such-server"), or_missing():
        servers.find_program("no-such-server")
