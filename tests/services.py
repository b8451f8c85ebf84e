"""The two services as processes of a test: started, killed, paused, and started again on the same address.

Every process listens on a unix socket in a private folder, so that a restarted one is found where its
predecessor was, and nobody else on the machine can reach it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

READY_SECONDS = 60.0
STOP_SECONDS = 40.0
# A lost turn is waited for by its lease: short ones keep crash tests short.
SHORT_LEASE = {"TURNFENCE_STATE__LEASE": "1s", "TURNFENCE_STATE__HEARTBEAT": "300ms"}
# Where a whole harness has to keep it, on a machine that may be busy.
KEPT_SECONDS = 2
KEPT_LEASE = {"TURNFENCE_STATE__LEASE": f"{KEPT_SECONDS}s", "TURNFENCE_STATE__HEARTBEAT": "400ms"}


class Service:
    """One service. ``address`` is a gRPC target; ``log`` is what it wrote to stderr, of all its lives."""

    def __init__(
        self, module: str, folder: Path, environment: Mapping[str, str], *, listen: str = ""
    ) -> None:
        self.module = module
        self.address = listen or f"unix:{folder / module}.sock"
        self.log = folder / f"{module}.log"
        self.environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start it and wait until it serves."""
        reading, writing = os.pipe()
        with FileIO(reading, "rb") as ready:
            self._process = self._spawn(writing)
            os.close(writing)
            self.address = self._bound(ready)
        return self

    def _spawn(self, ready_fd: int) -> subprocess.Popen[bytes]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TURNFENCE_")}
        root = Path(__file__).parent.parent
        paths = [str(root), str(root / "protos/gen"), str(root / "protos/contract")]
        clean["PYTHONPATH"] = os.pathsep.join(paths)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", self.module, "serve"),
                    *("--listen", self.address, "--ready-fd", str(ready_fd)),
                ],
                env={**clean, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(ready_fd,),
                start_new_session=True,
            )

    def _bound(self, ready: FileIO) -> str:
        readable, _, _ = select.select([ready], [], [], READY_SECONDS)
        line = (ready.read(4096) or b"").decode().strip() if readable else ""
        if not line:
            self.kill()
            raise AssertionError(f"{self.module} did not start:\n{self.log.read_text()[-4000:]}")
        return line

    def stop(self) -> int:
        """SIGTERM, and wait for the end: the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait for the end: what a power cut leaves behind. Its own children (tool servers, the
        embedded store) go too, as they would with their machine."""
        self._end(signal.SIGKILL)

    def kill_alone(self) -> None:
        """SIGKILL to this process only: its children live on and see their pipes close."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_SECONDS)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_SECONDS)
            raise AssertionError(f"{self.module} did not stop within {STOP_SECONDS:g} s") from None


@contextlib.contextmanager
def state_service(
    folder: Path,
    redis_url: str,
    sql_url: str,
    environment: Mapping[str, str] | None = None,
    *,
    listen: str = "",
) -> Iterator[Service]:
    """A state service over the given stores, its schema brought up to date first."""
    stores = {
        "TURNFENCE_REDIS_URL": redis_url,
        "TURNFENCE_SQL_URL": sql_url,
        "TURNFENCE_DATA_DIR": str(folder),
        **(environment or {}),
    }
    migrate(stores)
    service = Service("state_service", folder, stores, listen=listen)
    try:
        yield service.start()
    finally:
        service.kill()


def migrate(environment: Mapping[str, str]) -> None:
    """``python -m state_service migrate``; its output is the error when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "state_service", "migrate"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=READY_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def harness_service(
    folder: Path, state: str, environment: Mapping[str, str] | None = None, *, listen: str = ""
) -> Iterator[Service]:
    """A harness service that keeps its state with the service at ``state``."""
    service = Service(
        "harness_service",
        folder,
        {"TURNFENCE_STATE_TARGET": state, "TURNFENCE_DATA_DIR": str(folder), **(environment or {})},
        listen=listen,
    )
    try:
        yield service.start()
    finally:
        service.kill()


@dataclass(frozen=True)
class Pair:
    state: Service
    harness: Service


@contextlib.contextmanager
def pair(
    folder: Path,
    redis_url: str,
    sql_url: str,
    *,
    state: Mapping[str, str] | None = None,
    harness: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """Both services over the given stores."""
    with (
        state_service(folder, redis_url, sql_url, state) as below,
        harness_service(folder, below.address, harness) as above,
    ):
        yield Pair(below, above)
