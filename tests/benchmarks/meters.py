"""What the servers and processes say that work has cost: CPU, log bytes, statements, script time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import redis

from tests import servers


@dataclass(frozen=True)
class Result:
    """One line of the report: what was measured, against what, and what is wanted."""

    name: str
    ratio: float
    goal: float
    at_most: bool
    details: str = ""

    @property
    def good(self) -> bool:
        return self.ratio <= self.goal if self.at_most else self.ratio >= self.goal

    def __str__(self) -> str:
        sign, mark = "≤" if self.at_most else "≥", "ok  " if self.good else "MISS"
        return f"{mark} {self.name:<44} {self.ratio:6.2f} × (goal {sign} {self.goal:g})  {self.details}"


class CpuMeter:
    """CPU seconds of these processes since it was made."""

    def __init__(self, pids: Iterable[int | None]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids if pid is not None]
        self._start = self._now()

    def _now(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def seconds(self) -> float:
        return self._now() - self._start


class LogMeter:
    """Bytes that the stores have written to their logs."""

    def __init__(self, hot: servers.PrivateRedis, cold: servers.PrivateMariaDB) -> None:
        self._redis: Any = redis.Redis.from_url(hot.url)
        self._cold = cold
        self._start = self._now()

    def _now(self) -> int:
        aof = int(self._redis.info("persistence")["aof_current_size"])
        (row,) = self._cold.execute("SHOW GLOBAL STATUS LIKE 'Innodb_os_log_written'")
        return aof + int(str(row[1]))

    def bytes(self) -> int:
        return self._now() - self._start

    def close(self) -> None:
        self._redis.close()


class Stopwatch:
    """Seconds of each lap."""

    def __init__(self) -> None:
        self.laps: list[float] = []
        self._start = time.perf_counter()

    def start(self) -> None:
        self._start = time.perf_counter()

    def lap(self) -> None:
        self.laps.append(time.perf_counter() - self._start)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
