"""Something that the pair needs is down: the caller is told in time, in words, and can try again."""

from __future__ import annotations

import time

import pytest

from tests.model_server import Fault
from tests.pair.rig import Rig, concludes, finish, read_fact
from turnfence import records as r
from turnfence.axes import FailureReason, FallbackType, ReleaseOutcome, TurnStatus
from turnfence.errors import Reason

TRACES = ("Traceback", 'File "', "Error(")


@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_without_the_state_service_a_turn_is_refused_before_its_deadline(rig: Rig, how: str) -> None:
    """Killed: nobody listens. Paused: somebody listens and never answers."""
    state = rig.pair.state
    if how == "killed":
        state.kill()
    else:
        state.pause()
    started = time.monotonic()
    try:
        heard = await rig.caller.run(rig.talk().request("hello"), timeout=20)
    finally:
        if how == "paused":
            state.resume()
    assert heard.error is not None
    assert heard.error.reason is Reason.STATE_UNAVAILABLE
    assert heard.events == []
    assert time.monotonic() - started < 15
    assert not any(trace in str(heard.error) for trace in TRACES)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500),
        Fault(status=401),
        Fault(drop=True),
        Fault(html=True),
        Fault(hang=True),
        Fault(text="{"),
    ],
    ids=["500", "401", "cut", "html", "hang", "no json"],
)
async def test_a_model_that_does_not_serve_fails_the_turn_in_words(rig: Rig, fault: Fault) -> None:
    rig.says("turn_decision", fault)
    talk = rig.talk()
    heard = await talk.say()
    assert heard.failure is FailureReason.MODEL_FAILED
    assert heard.status is TurnStatus.FAILED
    (failure,) = heard.of(r.Failure)
    assert not any(trace in failure.message for trace in TRACES)
    rig.task_turn("reader", read_fact(), concludes())
    assert (await talk.say("again")).release is ReleaseOutcome.SUCCESS


async def test_a_model_that_fails_after_facts_were_found_leaves_them(rig: Rig) -> None:
    rig.task_turn("reader", read_fact(), lambda body: [concludes()(body)[0]], Fault(status=500))  # type: ignore[operator]
    heard = await rig.talk().say()
    assert heard.fallback is FallbackType.INSUFFICIENT_EVIDENCE
    assert "42 percent" in heard.content.text


@pytest.mark.parametrize("mode", ["die", "hang"])
async def test_a_tool_server_that_dies_or_hangs_is_a_transport_failure_and_no_fact(
    rig: Rig, mode: str
) -> None:
    rig.tools.tell("read_fact", mode=mode)
    rig.task_turn("reader", read_fact(), lambda body: [finish(body, missing=("the load",))])
    heard = await rig.talk().say()
    assert heard.fallback in (FallbackType.MISSING_REQUIRED_CONTEXT, FallbackType.INSUFFICIENT_EVIDENCE)
    body = heard.content.body
    assert isinstance(body, r.Fallback)
    assert body.verified_facts == []
    told = str(rig.model.requests[-1]["messages"])
    assert "failed" in told


async def test_a_conclusion_upon_a_failed_call_is_not_published(rig: Rig) -> None:
    rig.tools.tell("read_fact", mode="die")
    rig.task_turn("reader", read_fact(), concludes())
    heard = await rig.talk().say()
    assert heard.release is not ReleaseOutcome.SUCCESS
    assert "42" not in "".join(content.text for content in heard.of(r.Content))
