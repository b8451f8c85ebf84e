"""A serving process: the machine's two clocks, and waiting to be told to stop."""

from __future__ import annotations

import asyncio
import signal
import time


class SystemClock:
    """The machine's two clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()


async def told_to_stop() -> None:
    """Wait for SIGTERM or SIGINT. Call it in the main thread; from then on neither ends the process."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    await told.wait()
