"""Lifecycle document 3 and 4: one end, the first one."""

import threading
from typing import Any

import pytest

from harness_service.core.run import (
    CANCEL_TO_RUN_STATE,
    REASONS_OF_STATE,
    RunAborted,
    RunLifecycle,
    Termination,
    effective_deadline,
)
from turnfence.axes import CancelReason, RunState, TerminationReason

PAIRS = [(state, reason) for state, reasons in REASONS_OF_STATE.items() for reason in sorted(reasons)]


@pytest.mark.parametrize(("state", "reason"), PAIRS, ids=[f"lifecycle-3-{s}-{r}" for s, r in PAIRS])
@pytest.mark.parametrize(("late_state", "late_reason"), PAIRS)
def test_the_first_terminal_wins(state: Any, reason: Any, late_state: Any, late_reason: Any) -> None:
    run = RunLifecycle()
    assert run.finish(state, reason)
    assert not run.finish(late_state, late_reason)
    assert run.termination == Termination(state, reason)


@pytest.mark.parametrize("state", RunState)
@pytest.mark.parametrize("reason", TerminationReason)
def test_only_pairs_that_can_be(state: Any, reason: Any) -> None:
    run = RunLifecycle()
    if reason in REASONS_OF_STATE[state]:
        assert run.finish(state, reason)
    else:
        with pytest.raises(ValueError, match="cannot have the reason"):
            run.finish(state, reason)
        assert run.is_active


def test_every_reason_belongs_to_exactly_one_state() -> None:
    assert sorted(reason for _, reason in PAIRS) == sorted(TerminationReason)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        pytest.param(CancelReason.CLIENT_DISCONNECTED, RunState.CANCELLED, id="lifecycle-4-1"),
        pytest.param(CancelReason.USER_REQUESTED, RunState.CANCELLED, id="lifecycle-4-2"),
        pytest.param(CancelReason.DEADLINE_EXCEEDED, RunState.TIMED_OUT, id="lifecycle-4-3"),
        pytest.param(CancelReason.BUDGET_EXHAUSTED, RunState.BUDGET_EXHAUSTED, id="lifecycle-4-4"),
        pytest.param(CancelReason.INTERNAL_FAILURE, RunState.FAILED, id="lifecycle-4-5"),
        pytest.param(CancelReason.FENCED, RunState.FAILED, id="system-fenced"),
        pytest.param(CancelReason.SHUTDOWN, RunState.FAILED, id="D70"),
        pytest.param(CancelReason.STATE_UNAVAILABLE, RunState.FAILED, id="state-storage-lost"),
    ],
)
def test_cancel_reasons(reason: Any, state: Any) -> None:
    run = RunLifecycle()
    assert run.cancel(reason)
    assert run.termination == Termination(state, TerminationReason(reason.value))
    assert not run.succeed()


def test_every_cancel_reason_is_mapped() -> None:
    assert set(CANCEL_TO_RUN_STATE) == set(CancelReason)


def test_check_active_raises_after_the_end_and_at_the_deadline() -> None:
    run = RunLifecycle(deadline=10.0)
    run.check_active(9.9)
    with pytest.raises(RunAborted) as aborted:
        run.check_active(10.0)
    assert aborted.value.termination == Termination(RunState.TIMED_OUT, TerminationReason.DEADLINE_EXCEEDED)
    assert run.state is RunState.TIMED_OUT

    cancelled = RunLifecycle(deadline=10.0)
    cancelled.cancel(CancelReason.USER_REQUESTED)
    with pytest.raises(RunAborted) as aborted:
        cancelled.check_active(11.0)
    assert aborted.value.termination.state is RunState.CANCELLED, "the deadline does not overwrite the cancel"


def test_listeners_hear_the_end_once_and_late_ones_at_once() -> None:
    run = RunLifecycle()
    heard: list[Termination] = []
    run.on_end(heard.append)
    run.cancel(CancelReason.SHUTDOWN)
    run.fail()
    run.on_end(heard.append)
    assert heard == [Termination(RunState.FAILED, TerminationReason.SHUTDOWN)] * 2


def test_a_listener_can_be_taken_away() -> None:
    run = RunLifecycle()
    heard: list[Termination] = []
    forget = run.on_end(heard.append)
    forget()
    forget()
    run.fail()
    run.on_end(heard.append)()
    assert len(heard) == 1, "only the late one"


def test_of_many_threads_one_wins() -> None:
    run = RunLifecycle()
    start = threading.Barrier(8)
    wins: list[int] = []

    def race(index: Any) -> None:
        start.wait()
        if run.cancel(list(CancelReason)[index % len(CancelReason)]):
            wins.append(index)

    threads = [threading.Thread(target=race, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1


@pytest.mark.parametrize(
    ("grpc", "request_s", "server", "seconds"),
    [
        pytest.param(None, None, 600.0, 600.0, id="server-only"),
        pytest.param(10.0, None, 600.0, 9.0, id="reserve-of-ten-percent"),
        pytest.param(60.0, None, 600.0, 58.0, id="reserve-of-two-seconds"),
        pytest.param(60.0, 30.0, 600.0, 30.0, id="request-earliest"),
        pytest.param(60.0, 30.0, 20.0, 20.0, id="server-earliest"),
        pytest.param(None, 0.0, 600.0, 600.0, id="request-sets-none"),
        pytest.param(-3.0, None, 600.0, 0.0, id="already-expired"),
        pytest.param(315360000.0, None, 600.0, 600.0, id="ten-years"),
    ],
)
def test_effective_deadline(grpc: Any, request_s: Any, server: Any, seconds: Any) -> None:
    assert effective_deadline(grpc, request_s, server) == pytest.approx(seconds)


def test_remaining() -> None:
    assert RunLifecycle().remaining(5.0) is None
    assert RunLifecycle(deadline=7.0).remaining(5.0) == 2.0
    assert RunLifecycle(deadline=7.0).remaining(9.0) == 0.0


@pytest.mark.parametrize("reason", list(TerminationReason))
def test_every_reason_ends_a_run_in_the_one_state_that_may_have_it(reason: TerminationReason) -> None:
    run = RunLifecycle()
    assert run.end(reason)
    assert run.termination is not None
    assert reason in REASONS_OF_STATE[run.state]
    assert not run.end(TerminationReason.COMPLETED)
