"""EvidenceGuard: each rule of the harness design's "Release"; C107, lifecycle invariants 3 to 5."""

from typing import Any

import pytest

from harness_service.core.draft import DiagnosisDraft, DraftFact
from harness_service.core.evidence_guard import (
    Evidence,
    Problem,
    ProblemCode,
    check,
    check_fact,
    citable,
    verified_facts,
)
from turnfence.axes import CallStatus, EvidenceStatus, SideEffect
from turnfence.records import EvidenceHead, Fact

P = ProblemCode


def evidence(
    evidence_id: Any,
    *,
    task: Any = "t",
    status: Any = CallStatus.SUCCESS,
    ok: Any = True,
    empty: Any = False,
    result: Any = None,
    **head: Any,
) -> Any:
    return Evidence(
        EvidenceHead(
            evidence_id,
            task,
            "n",
            "ops.disk",
            SideEffect.NONE,
            status,
            business_ok=ok,
            empty=empty,
            result_brief="brief 7",
            **head,
        ),
        result=result,
        arguments={"path": "/var"},
    )


KNOWN = {
    "found": evidence("found", result={"used_percent": 93, "host": "web-01"}, extract_counts={"rows": 4}),
    "none": evidence("none", empty=True, result={"items": []}),
    "brief": evidence("brief"),
    "foreign": evidence("foreign", task="other"),
    "failed": evidence("failed", status=CallStatus.FAILED, ok=None),
    "unknown": evidence("unknown", status=CallStatus.UNKNOWN, ok=None),
    "started": evidence("started", status=CallStatus.STARTED, ok=None),
    "business": evidence("business", ok=False),
}


def codes(text: Any, *ids: Any) -> Any:
    return [problem.code for problem in check_fact(Fact(text, list(ids)), KNOWN, "t")]


@pytest.mark.parametrize(
    ("text", "ids", "problems"),
    [
        pytest.param("/var on web-01 is 93% full", ["found"], [], id="good"),
        pytest.param("4 rows", ["found"], [], id="extract-counts-count"),
        pytest.param("brief 7", ["brief"], [], id="brief-where-no-payload"),
        pytest.param("it is 93% full", [], [P.FACT_WITHOUT_EVIDENCE], id="cites-nothing"),
        pytest.param("x", ["nowhere"], [P.UNKNOWN_EVIDENCE], id="C107-unknown"),
        pytest.param("x", ["foreign"], [P.FOREIGN_EVIDENCE], id="C107-other-task"),
        pytest.param("x", ["failed"], [P.NOT_READY], id="C107-error"),
        pytest.param("x", ["business"], [P.NOT_READY], id="C107-business-error"),
        pytest.param("x", ["unknown"], [P.NOT_READY], id="C107-unknown-outcome"),
        pytest.param("x", ["started"], [P.NOT_READY], id="C107-projecting"),
        pytest.param("x", ["found", "nowhere"], [P.UNKNOWN_EVIDENCE], id="one-bad-of-two"),
        pytest.param("it is 94% full", ["found"], [P.LITERAL_NOT_IN_EVIDENCE], id="invented-number"),
        pytest.param("web-02 is full", ["found"], [P.LITERAL_NOT_IN_EVIDENCE], id="invented-host"),
        pytest.param("/etc is full", ["found"], [P.LITERAL_NOT_IN_EVIDENCE], id="invented-path"),
        pytest.param("says 'broken'", ["found"], [P.LITERAL_NOT_IN_EVIDENCE], id="invented-quote"),
        pytest.param("No errors were found in /var", ["none"], [], id="scoped-negative"),
        pytest.param("The search returned no results", ["none"], [], id="scoped-negative-2"),
        pytest.param("在 /var 中未找到错误", ["none"], [], id="scoped-negative-zh"),
        pytest.param("The disk is broken", ["none"], [P.NO_EVIDENCE_AS_FINDING], id="finding-from-nothing"),
        pytest.param("The host is healthy", ["none"], [P.NO_EVIDENCE_AS_FINDING], id="healthy-from-nothing"),
        pytest.param("Errors were never found", ["none"], [P.GENERAL_NEGATIVE], id="lifecycle-16-5-never"),
        pytest.param("该错误不存在", ["none"], [P.GENERAL_NEGATIVE], id="lifecycle-16-5-zh"),
        pytest.param(
            "All systems are healthy, nothing found", ["none"], [P.GENERAL_NEGATIVE], id="all-is-well"
        ),
        pytest.param("The disk is full", ["none", "found"], [], id="a-finding-beside-nothing"),
    ],
)
def test_facts(text: Any, ids: Any, problems: Any) -> None:
    assert codes(text, *ids) == problems


def draft(conclusion: Any, *facts: Any) -> Any:
    return DiagnosisDraft(conclusion, tuple(DraftFact(text, tuple(ids)) for text, ids in facts))


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        pytest.param(draft("full", ("93% full", ["found"])), [], id="valid"),
        pytest.param(draft("full"), [P.CONCLUSION_WITHOUT_EVIDENCE], id="no-facts"),
        pytest.param(
            draft("fine", ("nothing found", ["none"])), [P.CONCLUSION_WITHOUT_EVIDENCE], id="only-no-evidence"
        ),
        pytest.param(
            draft("full", ("x", ["failed"])),
            [P.CONCLUSION_WITHOUT_EVIDENCE, P.NOT_READY],
            id="only-bad-evidence",
        ),
        pytest.param(
            draft("such errors do not exist", ("93% full", ["found"]), ("no errors found", ["none"])),
            [P.GENERAL_NEGATIVE],
            id="lifecycle-16-5-conclusion",
        ),
        pytest.param(draft(None, ("93% full", ["found"])), [], id="no-conclusion-valid"),
        pytest.param(
            draft(None, ("94% full", ["found"])), [P.LITERAL_NOT_IN_EVIDENCE], id="no-conclusion-invalid"
        ),
        pytest.param(DiagnosisDraft(None, (), ("which host?",)), [], id="asks-only"),
    ],
)
def test_drafts(given: Any, problems: Any) -> None:
    assert [problem.code for problem in check(given, KNOWN, "t")] == problems


def test_a_problem_says_where_and_what() -> None:
    (problem,) = check(draft(None, ("fine", ["found"]), ("94% full", ["found"])), KNOWN, "t")
    assert problem == Problem(P.LITERAL_NOT_IN_EVIDENCE, "facts[1]", "94")
    assert str(problem) == "facts[1]: “94” does not occur in what it cites"


@pytest.mark.parametrize("code", P)
def test_every_problem_can_be_said(code: Any) -> None:
    assert str(Problem(code, "conclusion", "w")).startswith("conclusion: ")


def test_only_verified_facts_are_shown() -> None:
    facts = [Fact("93% full", ["found"]), Fact("94% full", ["found"]), Fact("x", ["failed"])]
    assert verified_facts(facts, KNOWN, "t") == (facts[0],)


def test_what_a_repair_may_cite() -> None:
    listed = citable(KNOWN, "t")
    assert [(c.evidence_id, c.status) for c in listed] == [
        ("found", EvidenceStatus.EVIDENCE_FOUND),
        ("none", EvidenceStatus.NO_EVIDENCE),
        ("brief", EvidenceStatus.EVIDENCE_FOUND),
    ]
