"""Options and stores for every test. Stores are real and private: see ``tests/servers.py``."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import hypothesis
import pytest

from tests import cluster, servers

hypothesis.settings.register_profile(
    "turnfence",
    deadline=None,  # the machine's mood is no property of the code
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("turnfence")

REQUIRE_SERVERS = "TURNFENCE_REQUIRE_SERVERS"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("turnfence", "a deployment to run the contract tests against")
    group.addoption("--target", metavar="ADDRESS", help="of a deployed harness_service, any gRPC target")
    group.addoption("--state-target", metavar="ADDRESS", help="of a deployed state_service, any gRPC target")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> str | None:
    """The deployed harness to test, or None: then the tests start their own."""
    value: str | None = request.config.getoption("--target")
    return value


@pytest.fixture(scope="session")
def state_target(request: pytest.FixtureRequest) -> str | None:
    """The deployed state service to test, or None: then the tests start their own."""
    value: str | None = request.config.getoption("--state-target")
    return value


def missing(what: str) -> NoReturn:
    """Skips for want of a program, or fails where all of them are required."""
    if os.environ.get(REQUIRE_SERVERS) == "1":
        pytest.fail(f"{REQUIRE_SERVERS}=1, but {what}", pytrace=False)
    pytest.skip(f"{what} (make servers)")


@contextlib.contextmanager
def or_missing() -> Iterator[None]:
    """Turns ServerMissing into a skip, or into a failure where servers are required."""
    try:
        yield
    except servers.ServerMissing as error:
        missing(str(error))


# --- servers: one of each for the whole run; a test that kills one starts its own -----------------


@pytest.fixture(scope="session")
def valkey() -> Iterator[servers.PrivateRedis]:
    """The embedded default's server. Shared: never kill it, never FLUSHALL."""
    with or_missing():
        program = servers.bundled_valkey()
    with servers.private_redis(program) as server:
        yield server


@pytest.fixture(scope="session")
def redis_private() -> Iterator[servers.PrivateRedis]:
    """A redis-server from PATH. Shared: never kill it, never FLUSHALL."""
    with or_missing():
        program = servers.find_program("redis-server", "valkey-server")
    with servers.private_redis(program) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_template() -> Iterator[Path]:
    """A fresh data folder, made once per run; ``servers.private_mariadb(template)`` copies it."""
    with or_missing():
        servers.find_program("mariadbd", "mysqld")
        servers.find_program("mariadb-install-db")
    with servers.mariadb_template() as template:
        yield template


@pytest.fixture(scope="session")
def mariadb_private(mariadb_template: Path) -> Iterator[servers.PrivateMariaDB]:
    """A MariaDB. Shared: never kill it."""
    with servers.private_mariadb(mariadb_template) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(redis_private: servers.PrivateRedis) -> str:
    """URL of a real redis-server."""
    return redis_private.url


@pytest.fixture(scope="session")
def mariadb_server(mariadb_private: servers.PrivateMariaDB) -> Callable[[], str]:
    """Makes the SQLAlchemy URL of a new, empty MariaDB database at each call."""
    return mariadb_private.fresh_url


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[cluster.PrivateCluster]:
    """Three primaries with a replica each. Shared: never kill one, never FLUSHALL."""
    with or_missing():
        servers.find_program("redis-server", "valkey-server")
    with cluster.private_cluster() as running:
        yield running


@pytest.fixture(scope="session")
def node() -> Path:
    """The node program, with the packages of tests/node in place."""
    program = shutil.which("node")
    if program is None:
        missing("node is not installed")
    if not (Path(__file__).parent / "node" / "node_modules").is_dir():
        missing("the packages of tests/node are not installed")
    return Path(program)


# --- pairs of stores: what the state service stands on --------------------------------------------


@dataclass(frozen=True)
class Stores:
    """One pair of a hot and a cold store."""

    name: str
    redis_url: str
    sql_url: str
    """An empty database, made with the pair; the tests that share the pair share it."""
    fresh_sql_url: Callable[[], str] = field(repr=False)
    """Another empty database on the same server (or another file) at each call."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every pair of stores, one after the other; a deployment has its own, unknown to the tests. Tests of
    the state service's contract run on a cluster too."""
    if "stores" in metafunc.fixturenames:
        deployed = metafunc.config.getoption("--target") or metafunc.config.getoption("--state-target")
        names = ["deployed"] if deployed else ["embedded", "servers"]
        if "transport" not in metafunc.fixturenames:
            metafunc.parametrize("stores", names, indirect=True, scope="session")
            return
        by_call = names if deployed else [*names, "cluster"]
        pairs = [*((name, "unary") for name in by_call), (names[0], "session")]
        ids = ["-".join(pair) for pair in pairs]
        metafunc.parametrize(("stores", "transport"), pairs, ids=ids, indirect=True, scope="session")


@pytest.fixture(scope="session")
def transport(request: pytest.FixtureRequest) -> str:
    """How the write path travels: ``unary`` calls, or one ``session``."""
    value: str = request.param
    return value


@pytest.fixture(scope="session")
def stores(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stores:
    """{bundled Valkey, SQLite}, {redis-server, MariaDB} or {Redis Cluster, MariaDB}."""
    if request.param == "deployed":
        return Stores("deployed", "", "", lambda: "")
    if request.param == "embedded":
        valkey: servers.PrivateRedis = request.getfixturevalue("valkey")
        folder = tmp_path_factory.mktemp("sqlite")
        numbers = itertools.count(1)

        def fresh_sqlite() -> str:
            return f"sqlite+aiosqlite:///{folder / f'turnfence_{next(numbers)}.db'}"

        return Stores("embedded", valkey.url, fresh_sqlite(), fresh_sqlite)
    fresh_mariadb: Callable[[], str] = request.getfixturevalue("mariadb_server")
    if request.param == "cluster":
        running: cluster.PrivateCluster = request.getfixturevalue("redis_cluster")
        return Stores("cluster", running.url, fresh_mariadb(), fresh_mariadb)
    redis_url: str = request.getfixturevalue("redis_server")
    return Stores("servers", redis_url, fresh_mariadb(), fresh_mariadb)
