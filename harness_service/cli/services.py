"""Both services as child processes of a command: started, waited for, stopped, never left behind.

A child tells its address through a pipe (``--ready-fd``), so nothing here polls or sleeps. It gets a process
group of its own, so that Ctrl-C reaches this process alone and the order of stopping is kept: the harness
first, because its turns persist through the state service. On Linux the kernel ends the children when
this process dies, even by SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

READY_SECONDS = 60.0  # the first start imports everything cold and makes its databases
STOP_SECONDS = 30.0  # more than both services' drains
_LOG_LINES = 20
_PR_SET_PDEATHSIG = 1


class ServiceDown(Exception):
    """A service did not come up, or has ended; the text says which, and the end of its log."""


@dataclass(frozen=True)
class Child:
    """A running service: ``address`` is where it listens."""

    name: str
    process: subprocess.Popen[bytes]
    address: str


@dataclass(frozen=True)
class Pair:
    """The two services; ``harness.address`` is the target for callers."""

    state: Child
    harness: Child


@contextmanager
def both_services(*, state_listen: str, harness_listen: str, show_logs: bool) -> Iterator[Pair]:
    """Both services, listening, for the time of this context. Addresses as in the settings: ``host:0`` takes
    any free port, empty leaves it to the settings. Raises ``ServiceDown``."""
    with ExitStack() as stack:
        log = None if show_logs else stack.enter_context(tempfile.TemporaryFile())
        state = stack.enter_context(_service("state_service", state_listen, {}, log))
        target = {"TURNFENCE_STATE_TARGET": state.address}
        harness = stack.enter_context(_service("harness_service", harness_listen, target, log))
        yield Pair(state, harness)


@contextmanager
def on_private_sockets() -> Iterator[tuple[str, str]]:
    """Addresses for the two services that nobody else on this machine can reach."""
    # Short, because a socket's path must fit 107 bytes; a project's own folder may not be.
    with tempfile.TemporaryDirectory(prefix="turnfence-") as folder:
        yield f"unix:{Path(folder, 'state.sock')}", f"unix:{Path(folder, 'harness.sock')}"


def wait_for_an_end(pair: Pair) -> None:
    """Return when one of the services has ended; raise ``KeyboardInterrupt`` or ``SystemExit`` when this
    process is told to stop."""
    watched = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
    # Blocked before looking, so that a child that ends in between is still reported by sigwait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        while all(child.process.poll() is None for child in (pair.state, pair.harness)):
            if signal.sigwait(watched) in (signal.SIGINT, signal.SIGTERM):
                raise KeyboardInterrupt
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _service(
    module: str, listen: str, environment: Mapping[str, str], log: IO[bytes] | None
) -> Iterator[Child]:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", module, "serve", "--ready-fd", str(writing)]
    if listen:
        command += ["--listen", listen]
    with os.fdopen(reading, "rb", buffering=0) as ready:
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(writing,),
                process_group=0,
                preexec_fn=_die_with_parent(),  # noqa: PLW1509  (before any thread of this process exists)
            )
        finally:
            os.close(writing)
        try:
            yield Child(module, process, _address(module, process, ready, log))
        finally:
            _stop(process)


def _address(module: str, process: subprocess.Popen[bytes], ready: IO[bytes], log: IO[bytes] | None) -> str:
    """What the child wrote when it was ready. A pipe that ends empty is a child that has died."""
    deadline = time.monotonic() + READY_SECONDS
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([ready], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise ServiceDown(f"{module} was not ready within {READY_SECONDS:g} s{_end_of(log)}")
        part = ready.read(4096)
        if not part:
            process.wait(STOP_SECONDS)
            raise ServiceDown(f"{module} ended with exit code {process.returncode}{_end_of(log)}")
        line += part
    return line.decode().strip()


def _end_of(log: IO[bytes] | None) -> str:
    if log is None:
        return ""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
    return "".join(f"\n  {line}" for line in lines)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _die_with_parent() -> Callable[[], None] | None:
    """What a child runs between fork and exec; None where the kernel offers nothing like it."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return in_child
