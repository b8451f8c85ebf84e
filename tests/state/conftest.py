"""Rigs: a state service with stores that are nobody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from tests import proxy as proxies
from tests.conftest import Stores, or_missing
from tests.contract.turns import Talk
from tests.proxy import Proxy
from tests.servers import bundled_valkey, find_program
from tests.state import rig as rigs
from tests.state import sql_bench
from tests.state.rig import Rig


@pytest.fixture(scope="module")
def embedded_rig() -> Iterator[Rig]:
    with or_missing():
        bundled_valkey()
    with rigs.embedded() as rig:
        yield rig


@pytest.fixture(scope="module")
def servers_rig(mariadb_template: Path) -> Iterator[Rig]:
    with or_missing():
        find_program("redis-server", "valkey-server")
    with rigs.of_servers(mariadb_template) as rig:
        yield rig


@pytest.fixture(scope="module", params=["embedded", "servers"])
def any_rig(request: pytest.FixtureRequest) -> Rig:
    rig: Rig = request.getfixturevalue(f"{request.param}_rig")
    return rig


@pytest.fixture
async def rig(any_rig: Rig) -> AsyncIterator[Rig]:
    """Both pairs of stores, one after the other; the service runs and is reached."""
    await any_rig.reconnect()
    yield any_rig
    await any_rig.client.close()


@pytest.fixture
async def frail(servers_rig: Rig) -> AsyncIterator[Rig]:
    """Stores that can be stopped while their service goes on."""
    await servers_rig.reconnect()
    yield servers_rig
    await servers_rig.client.close()


@pytest.fixture
def talk(rig: Rig) -> Talk:
    return Talk(rig.client)


@pytest.fixture(scope="module")
async def bench(stores: Stores) -> AsyncIterator[sql_bench.SqlBench]:
    """Both cold stores, one after the other, reached straight through the port; tests use fresh ids."""
    async with sql_bench.opened(stores.fresh_sql_url()) as opened:
        yield opened


@pytest.fixture
def story(bench: sql_bench.SqlBench) -> sql_bench.Story:
    """A conversation that nobody else knows."""
    return sql_bench.Story(bench.cold)


# --- a MariaDB over a network that fails ----------------------------------------------------------


@pytest.fixture(scope="module")
async def sound(mariadb_server: Callable[[], str]) -> AsyncIterator[sql_bench.SqlBench]:
    """The database itself."""
    async with sql_bench.opened(mariadb_server()) as opened:
        yield opened


@pytest.fixture
async def network(sound: sql_bench.SqlBench) -> AsyncIterator[Proxy]:
    url = make_url(sound.url)
    assert url.host is not None
    assert url.port is not None
    async with proxies.running(url.host, url.port) as proxy:
        yield proxy


@pytest.fixture
async def shaky(sound: sql_bench.SqlBench, network: Proxy) -> AsyncIterator[sql_bench.SqlBench]:
    """The same database, over that network. One second is given to an answer, and one to a lock."""
    url = make_url(sound.url).set(port=network.port).render_as_string(hide_password=False)
    bench = sql_bench.SqlBench(url, timeout=1.0, connections=4)
    yield bench
    network.forget()
    await bench.cold.close()
