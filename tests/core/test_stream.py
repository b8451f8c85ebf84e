"""Lifecycle document 11: the order of the public events."""

from typing import Any

import pytest

from harness_service.core.stream import (
    STREAM_STATE,
    TRANSITIONS,
    Position,
    Signal,
    StreamRefused,
    StreamSession,
    transition,
)
from turnfence.axes import FailureReason, ProcessingStage, ReleaseOutcome, StreamState, TurnStatus
from turnfence.records import (
    ChatReply,
    Content,
    Done,
    Failure,
    Gap,
    Metadata,
    Progress,
    Status,
    TurnEvent,
)

METADATA = Metadata("r", "c", "m")
STATUS = Status(ProcessingStage.ROUTING)
CONTENT = Content(ChatReply("hi"), "hi")
FAILURE = Failure(FailureReason.INTERNAL, "sorry")


def done(outcome: Any) -> Any:
    return Done(outcome, TurnStatus.DONE)


def session(*kinds: Any) -> Any:
    stream = StreamSession("r", "c")
    for kind in kinds:
        stream.emit(kind)
    return stream


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("position", Position)
def test_lifecycle_11_every_cell(position: Any, signal: Any) -> None:
    if (position, signal) in TRANSITIONS:
        assert transition(position, signal) is TRANSITIONS[position, signal]
    else:
        with pytest.raises(StreamRefused):
            transition(position, signal)


def test_the_table_reads_as_the_document() -> None:
    """metadata (status | progress)* (content | failure) done; the four outer states."""
    outer: dict[tuple[StreamState, Signal], set[StreamState]] = {}
    for (position, signal), to in TRANSITIONS.items():
        outer.setdefault((STREAM_STATE[position], signal), set()).add(STREAM_STATE[to])
    assert outer[StreamState.NEW, Signal.METADATA] == {StreamState.OPEN}
    assert outer[StreamState.NEW, Signal.DISCONNECT] == {StreamState.DISCONNECTED}
    assert outer[StreamState.OPEN, Signal.STATUS] == {StreamState.OPEN}
    assert outer[StreamState.OPEN, Signal.DONE] == {StreamState.TERMINAL}
    assert outer[StreamState.OPEN, Signal.DISCONNECT] == {StreamState.DISCONNECTED}
    assert not [
        signal
        for (state, signal) in outer
        if state in (StreamState.TERMINAL, StreamState.DISCONNECTED) and signal is not Signal.DISCONNECT
    ]


@pytest.mark.parametrize(
    "kinds",
    [
        (METADATA, STATUS, Progress(text="x"), STATUS, CONTENT, done(ReleaseOutcome.SUCCESS)),
        (METADATA, CONTENT, done(ReleaseOutcome.FALLBACK)),
        (METADATA, FAILURE, done(ReleaseOutcome.FAILED)),
    ],
)
def test_whole_streams_are_gapless(kinds: Any) -> None:
    stream = StreamSession("r", "c")
    events = [stream.emit(kind, 5) for kind in kinds]
    assert [event.sequence for event in events] == list(range(1, len(kinds) + 1))
    assert {(e.run_id, e.conversation_id, e.time) for e in events} == {("r", "c", 5)}
    assert stream.state is StreamState.TERMINAL


@pytest.mark.parametrize(
    ("before", "late"),
    [
        pytest.param((), STATUS, id="lifecycle-11-metadata-first"),
        pytest.param((METADATA,), METADATA, id="lifecycle-11-metadata-once"),
        pytest.param((METADATA, CONTENT), CONTENT, id="lifecycle-16-2-content-once"),
        pytest.param((METADATA, CONTENT), FAILURE, id="lifecycle-16-2-not-both"),
        pytest.param((METADATA, CONTENT), STATUS, id="lifecycle-11-status-after-content"),
        pytest.param((METADATA,), done(ReleaseOutcome.SUCCESS), id="lifecycle-11-done-needs-an-answer"),
        pytest.param((METADATA, CONTENT), done(ReleaseOutcome.FAILED), id="done-fits-content"),
        pytest.param((METADATA, FAILURE), done(ReleaseOutcome.SUCCESS), id="done-fits-failure"),
        pytest.param((METADATA, CONTENT), done(ReleaseOutcome.CANCELLED), id="lifecycle-11-never-cancelled"),
        pytest.param((METADATA,), Gap(1, 2), id="gap-only-for-readers"),
        pytest.param((), Metadata("other", "c", "m"), id="lifecycle-11-identity-run"),
        pytest.param((), Metadata("r", "other", "m"), id="lifecycle-11-identity-conversation"),
        pytest.param(
            (METADATA, CONTENT, done(ReleaseOutcome.SUCCESS)), CONTENT, id="lifecycle-11-late-content"
        ),
    ],
)
def test_refused_and_unchanged(before: Any, late: Any) -> None:
    stream = session(*before)
    position, sequence = stream.position, stream.last_sequence
    with pytest.raises(StreamRefused):
        stream.emit(late)
    assert (stream.position, stream.last_sequence) == (position, sequence)


@pytest.mark.parametrize("before", [(), (METADATA,), (METADATA, CONTENT)])
def test_after_a_disconnect_nothing_is_sent(before: Any) -> None:
    stream = session(*before)
    stream.disconnect()
    assert stream.state is StreamState.DISCONNECTED
    for kind in (METADATA, STATUS, CONTENT, FAILURE, done(ReleaseOutcome.SUCCESS)):
        with pytest.raises(StreamRefused):
            stream.emit(kind)


def test_hanging_up_after_the_end_changes_nothing() -> None:
    stream = session(METADATA, CONTENT, done(ReleaseOutcome.SUCCESS))
    stream.disconnect()
    assert stream.state is StreamState.TERMINAL


def test_a_user_cancel_ends_without_done() -> None:
    stream = session(METADATA, STATUS)
    stream.end_cancelled()
    assert stream.state is StreamState.TERMINAL
    with pytest.raises(StreamRefused):
        stream.emit(CONTENT)


def event(sequence: Any, kind: Any, run_id: Any = "r") -> Any:
    return TurnEvent(sequence, run_id, "c", kind)


def test_a_reader_may_miss_events_but_never_goes_back() -> None:
    reader = StreamSession("r", "c")
    reader.pass_on(event(1, METADATA))
    reader.pass_on(event(4, STATUS))
    with pytest.raises(StreamRefused, match="sequence 3 after 4"):
        reader.pass_on(event(3, STATUS))
    with pytest.raises(StreamRefused, match="another run"):
        reader.pass_on(event(5, STATUS, run_id="x"))
    reader.pass_on(event(6, CONTENT))
    reader.pass_on(event(7, done(ReleaseOutcome.SUCCESS)))
    assert reader.state is StreamState.TERMINAL


def test_a_reader_that_comes_late_gets_a_gap() -> None:
    reader = StreamSession("r", "c", after_sequence=3)
    reader.pass_on(event(5, Gap(4, 5)))
    reader.pass_on(event(6, CONTENT))
    reader.pass_on(event(7, done(ReleaseOutcome.SUCCESS)))
    assert reader.last_sequence == 7
