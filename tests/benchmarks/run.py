"""``python -m tests.benchmarks.run``: what the state path costs, each figure against a floor of the same run.

Never part of the tests: what a machine has time for is no property of the code. Ends with 1 when a goal is
missed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence

from tests import servers, services
from tests.benchmarks.groups import group_commits
from tests.benchmarks.growth import log_bytes, steps, turns
from tests.benchmarks.meters import Result
from tests.benchmarks.scripts import flush_scripts
from tests.contract.turns import StateClient

Benchmark = Callable[[], Awaitable[Sequence[Result]]]


async def measure(hot: servers.PrivateRedis, cold: servers.PrivateMariaDB, target: str, sql_url: str) -> bool:
    client = StateClient(target)
    benchmarks: dict[str, Benchmark] = {
        "scripts": lambda: flush_scripts(hot.url),
        "groups": lambda: group_commits(cold),
        "steps": lambda: steps(client),
        "bytes": lambda: log_bytes(client, hot, cold, sql_url),
        "turns": lambda: turns(client),
    }
    wanted = sys.argv[1:] or list(benchmarks)
    results: list[Result] = []
    for name in wanted:
        for result in await benchmarks[name]():
            print(result, flush=True)
            results.append(result)
    await client.close()
    return all(result.good for result in results)


def main() -> int:
    with (
        servers.private_redis() as hot,
        servers.mariadb_template() as template,
        servers.private_mariadb(template) as cold,
        servers.private_folder() as folder,
    ):
        sql_url = cold.fresh_url()
        with services.state_service(folder, hot.url, sql_url) as service:
            good = asyncio.run(measure(hot, cold, service.address, sql_url))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
