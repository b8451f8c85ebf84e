"""State document 3.3: a node's history across turns."""

from typing import Any

import pytest

from harness_service.core.history import (
    ActionKind,
    Call,
    ModelSaid,
    Returned,
    UserActed,
    UserSaid,
    node_history,
    returned_status,
    returned_text,
)
from turnfence.axes import CallStatus, DialogueRole, MessageType, SideEffect
from turnfence.records import DialogueMessage, EvidenceHead, NodeAction

C = CallStatus


def message(number: Any, role: Any, text: Any) -> Any:
    return DialogueMessage(f"m{number}{role}", role, MessageType.USER_TEXT, text, "r", round=number)


def head(evidence_id: Any, number: Any, status: Any = C.SUCCESS, ok: Any = True, **more: Any) -> Any:
    return EvidenceHead(
        evidence_id,
        "t",
        "n",
        "ops.disk",
        SideEffect.NONE,
        status,
        business_ok=ok,
        round=number,
        args_brief="{}",
        **more,
    )


def test_each_round_reads_user_model_returns() -> None:
    history = node_history(
        [
            message(1, DialogueRole.AGENT, "let me look"),
            message(1, DialogueRole.USER, "is it full?"),
            message(2, DialogueRole.AGENT, "done"),
        ],
        [head("late", 1, started_at=9, call_id="c2"), head("early", 1, started_at=3, call_id="c1")],
        [
            NodeAction(1, ActionKind.REFUSED, "ops.write", "{}", "no. Next step: x", call_id="c3"),
            NodeAction(2, ActionKind.USER, "CONFIRM", "", "The user confirmed."),
        ],
        {"early": '{"full":true}'},
    )
    assert history == [
        UserSaid(1, "is it full?"),
        ModelSaid(
            1,
            "let me look",
            (Call("c1", "ops.disk", "{}"), Call("c2", "ops.disk", "{}"), Call("c3", "ops.write", "{}")),
        ),
        Returned(1, "c1", "ops.disk", "ok", '{"full":true}', "early"),
        Returned(1, "c2", "ops.disk", "ok", "", "late"),
        Returned(1, "c3", "ops.write", "refused", "no. Next step: x"),
        UserActed(2, "CONFIRM", "The user confirmed."),
        ModelSaid(2, "done", ()),
    ]


def test_rounds_are_in_order_whatever_came_first() -> None:
    history = node_history(
        [message(3, DialogueRole.USER, "c")], [head("e", 1)], [NodeAction(2, "builtin", "x")], {}
    )
    assert [entry.round for entry in history] == [1, 1, 2, 2, 3]


def test_an_approved_write_gets_a_call_of_its_own() -> None:
    history = node_history(
        [],
        [head("e1", 2, call_id="c1")],
        [
            NodeAction(1, ActionKind.DEFERRED, "ops.write", call_id="c1"),
            NodeAction(2, ActionKind.USER, "CONFIRM"),
        ],
        {},
    )
    calls = [call.call_id for entry in history if isinstance(entry, ModelSaid) for call in entry.calls]
    returns = [entry.call_id for entry in history if isinstance(entry, Returned)]
    assert calls == returns == ["c1", "e1"]
    confirmed = [isinstance(entry, UserActed) for entry in history if entry.round == 2]
    assert confirmed == [True, False, False], "the confirmation comes before what it allowed"


@pytest.mark.parametrize(
    ("evidence", "payload", "text"),
    [
        pytest.param(head("e", 1, result_brief="b"), "whole", "whole", id="state-3.3-payload"),
        pytest.param(head("e", 1, result_brief="b"), None, "b", id="state-3.3-brief"),
        pytest.param(head("e", 1, ok=False, detail="why"), "whole", "why", id="state-3.3-business-failure"),
        pytest.param(head("e", 1, C.FAILED, None, detail="why"), None, "why", id="state-3.3-failure"),
        pytest.param(head("e", 1, C.FAILED, None, result_brief="b"), None, "b", id="state-3.3-nothing-else"),
    ],
)
def test_what_a_call_returned(evidence: Any, payload: Any, text: Any) -> None:
    assert returned_text(evidence, payload) == text


@pytest.mark.parametrize(
    ("status", "ok", "empty", "word"),
    [
        (C.SUCCESS, True, False, "ok"),
        (C.SUCCESS, True, True, "empty"),
        (C.SUCCESS, False, False, "failed"),
        (C.FAILED, None, None, "failed"),
        (C.TIMEOUT, None, None, "failed"),
        (C.CANCELLED, None, None, "failed"),
        (C.UNKNOWN, None, None, "unknown"),
        (C.UNKNOWN_PRE_CALL, None, None, "unknown"),
        (C.STARTED, None, None, "unknown"),
    ],
)
def test_status_words(status: Any, ok: Any, empty: Any, word: Any) -> None:
    assert returned_status(head("e", 1, status, ok, empty=empty)) == word
