"""A harness that was asleep, as it wakes: before it calls a write, it looks at its lease once more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests import services
from tests.conftest import Stores
from tests.model_server import ModelServer
from tests.pair.caller import Caller, new_id
from tests.pair.conftest import HARNESS
from tests.pair.rig import Rig, concludes, write, write_catalogue
from tests.proxy import Proxy, Then, running
from tests.servers import private_folder
from tests.tool_sim import Sim
from turnfence import records as r
from turnfence.axes import ReleaseOutcome, ResumeAction


@pytest.fixture
async def held(stores: Stores, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Rig, Proxy]]:
    """A pair of its own whose services talk through a proxy."""
    sim = Sim(tmp_path_factory.mktemp("tools"))
    with private_folder() as folder:
        write_catalogue(folder / "catalogue", sim)
        state = services.state_service(
            folder, stores.redis_url, stores.fresh_sql_url(), services.KEPT_LEASE, listen="127.0.0.1:0"
        )
        async with ModelServer({}) as model:
            with state as below:
                async with running("127.0.0.1", int(below.address.rpartition(":")[2])) as proxy:
                    environment = HARNESS | {
                        "TURNFENCE_MODEL__BASE_URL": model.base_url,
                        "TURNFENCE_CATALOGUE": str(folder / "catalogue"),
                    }
                    with services.harness_service(folder, f"127.0.0.1:{proxy.port}", environment) as above:
                        caller = Caller(above.address)
                        rig = Rig(services.Pair(below, above), model, sim, caller)
                        await rig.reset()
                        yield rig, proxy
                        await caller.close()


async def test_a_write_whose_registration_is_heard_of_after_the_lease_is_not_called(
    held: tuple[Rig, Proxy],
) -> None:
    rig, proxy = held
    title = new_id()
    rig.task_turn("writer", write("write_plain", title), concludes("It was created.", "status is created"))
    talk = rig.talk("writer")
    asked = await talk.say(f"write {title}")
    rule = proxy.when(title.encode(), Then.HOLD, armed_by=title.encode(), in_answers=True)
    confirming = asyncio.create_task(talk.act(ResumeAction.CONFIRM, asked.done.checkpoint_id))
    async with asyncio.timeout(10):
        await rule.met.wait()
    await asyncio.sleep(
        services.KEPT_SECONDS + 0.2
    )  # the rule is about time: the holder may not be sure any more
    rule.release()
    late = await confirming
    assert rig.tools.events("write_plain") == []
    assert late.of(r.Content) == []
    if late.error is None:
        assert late.release is ReleaseOutcome.FAILED
