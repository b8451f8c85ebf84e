"""EvidenceGuard: does the evidence that a draft cites exist, may it be used, does it say that?

Rules of the harness design's "Release", each a named problem. NO_EVIDENCE supports only "not found
in the scope searched", never a general negative (lifecycle invariant 5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from harness_service.core.draft import DiagnosisDraft, to_facts
from harness_service.core.invocation import classify_head
from harness_service.core.literals import Corpus, corpus_of, missing
from turnfence.axes import EvidenceStatus, InvocationStatus
from turnfence.records import EvidenceCitation, EvidenceHead, Fact


class ProblemCode(StrEnum):
    UNKNOWN_EVIDENCE = "UNKNOWN_EVIDENCE"
    FOREIGN_EVIDENCE = "FOREIGN_EVIDENCE"
    NOT_READY = "NOT_READY"
    FACT_WITHOUT_EVIDENCE = "FACT_WITHOUT_EVIDENCE"
    CONCLUSION_WITHOUT_EVIDENCE = "CONCLUSION_WITHOUT_EVIDENCE"
    LITERAL_NOT_IN_EVIDENCE = "LITERAL_NOT_IN_EVIDENCE"
    NO_EVIDENCE_AS_FINDING = "NO_EVIDENCE_AS_FINDING"
    GENERAL_NEGATIVE = "GENERAL_NEGATIVE"


class Problem(msgspec.Struct, frozen=True):
    """``where``: ``conclusion`` or ``facts[i]``; ``what``: an evidence id, a literal or a wording."""

    code: ProblemCode
    where: str
    what: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {_SENTENCES[self.code].format(what=self.what)}"


class Evidence(msgspec.Struct, frozen=True):
    """One evidence as the guard reads it: head, parsed result, and what was asked for.

    ``result`` is the whole payload where it is at hand, else None (then the brief speaks for it).
    """

    head: EvidenceHead
    result: Any = None
    arguments: Any = None

    @property
    def status(self) -> EvidenceStatus | None:
        return classify_head(self.head).evidence

    @property
    def is_ready(self) -> bool:
        return classify_head(self.head).invocation is InvocationStatus.READY


_SENTENCES: Mapping[ProblemCode, str] = {
    ProblemCode.UNKNOWN_EVIDENCE: "there is no evidence {what}",
    ProblemCode.FOREIGN_EVIDENCE: "evidence {what} belongs to another task",
    ProblemCode.NOT_READY: "evidence {what} did not succeed and cannot be cited",
    ProblemCode.FACT_WITHOUT_EVIDENCE: "it cites no evidence",
    ProblemCode.CONCLUSION_WITHOUT_EVIDENCE: "it rests on no evidence that found something",
    ProblemCode.LITERAL_NOT_IN_EVIDENCE: "“{what}” does not occur in what it cites",
    ProblemCode.NO_EVIDENCE_AS_FINDING: (
        "what it cites found nothing, so it can only say that nothing was found in the scope searched"
    ),
    ProblemCode.GENERAL_NEGATIVE: "“{what}” says more than “not found in the scope searched”",
}

_FINDING = "found|returned|matched|matching|reported|recorded|listed|shown|seen"
_THING = "results?|entries|records?|hits?|match(?:es)?"
_FOUND_ZH = "(?:找到|发现|查到|查询到|检索到|搜索到|返回|匹配)"

#: Wordings of "not found in the scope searched".
_NOT_FOUND = re.compile(
    rf"\bnot? (?:\w+[ -]){{0,5}}?(?:{_FINDING}|{_THING})\b"
    r"|\b(?:found|returned|shows?|showed|lists?|listed|reports?|reported|matched)"
    r" (?:no|nothing|none|zero|0)\b"
    r"|\b(?:did|does|do|could) not (?:find|return|show|list|match|report)\b"
    r"|\b(?:nothing|none) (?:was |were )?(?:found|returned|matched)\b"
    r"|\bwithout (?:any )?(?:results?|matches)\b|\bempty\b"
    rf"|未(?:能)?{_FOUND_ZH}|没有?(?:{_FOUND_ZH}|结果|记录)|无(?:匹配|结果|记录|返回)|为空",
    re.IGNORECASE,
)

#: Wordings that deny more than a search can.
_GENERAL = re.compile(
    r"\b(?:never|nowhere|anywhere|at all|impossible|cannot exist|(?:does|do|did) not exist|no such)\b"
    r"|\b(?:all|every|entire|whole) (?:\w+ ){0,2}?(?:are|is|was|were) (?:fine|healthy|ok|okay|normal|safe)\b"
    r"|从未|从来没有|绝对没有|完全没有|根本没有|任何地方|不存在|不可能|一切正常|全部正常|所有.{0,6}正常",
    re.IGNORECASE,
)


def check(draft: DiagnosisDraft, evidence: Mapping[str, Evidence], task_id: str) -> tuple[Problem, ...]:
    """Every problem of a draft, its conclusion first; none: the evidence is valid.

    Without a conclusion only the facts' references are checked.
    """
    problems: list[Problem] = []
    for index, fact in enumerate(to_facts(draft)):
        problems += check_fact(fact, evidence, task_id, where=f"facts[{index}]")
    if draft.conclusion:
        problems = [*_check_conclusion(draft.conclusion, draft.cited, evidence, task_id), *problems]
    return tuple(problems)


def check_fact(
    fact: Fact, evidence: Mapping[str, Evidence], task_id: str, *, where: str = "fact"
) -> list[Problem]:
    """The problems of one fact; its wording is judged only when all it cites may be used."""
    if not fact.evidence_ids:
        return [Problem(ProblemCode.FACT_WITHOUT_EVIDENCE, where)]
    bad = [
        Problem(code, where, evidence_id)
        for evidence_id in fact.evidence_ids
        if (code := _reference_problem(evidence.get(evidence_id), task_id)) is not None
    ]
    if bad:
        return bad
    cited = [evidence[evidence_id] for evidence_id in fact.evidence_ids]
    absent = [
        Problem(ProblemCode.LITERAL_NOT_IN_EVIDENCE, where, literal.text)
        for literal in missing(fact.text, _corpus(cited))
    ]
    return absent + _check_negative(fact.text, cited, where)


def verified_facts(facts: Iterable[Fact], evidence: Mapping[str, Evidence], task_id: str) -> tuple[Fact, ...]:
    """The facts without a problem: what a fallback may show (of a draft, or of a progress snapshot)."""
    return tuple(fact for fact in facts if not check_fact(fact, evidence, task_id))


def citable(evidence: Mapping[str, Evidence], task_id: str) -> tuple[EvidenceCitation, ...]:
    """What a repair may cite: the READY evidence of this task, in the mapping's order."""
    return tuple(citation(one.head) for one in evidence.values() if _reference_problem(one, task_id) is None)


def citation(head: EvidenceHead) -> EvidenceCitation:
    return EvidenceCitation(
        evidence_id=head.evidence_id,
        tool_name=head.tool_name,
        status=classify_head(head).evidence,
        brief=head.result_brief,
        observed_at=head.finished_at,
    )


def _check_conclusion(
    conclusion: str, cited: Iterable[str], evidence: Mapping[str, Evidence], task_id: str
) -> list[Problem]:
    usable = [evidence[one] for one in cited if _reference_problem(evidence.get(one), task_id) is None]
    if not any(one.status is EvidenceStatus.EVIDENCE_FOUND for one in usable):
        return [Problem(ProblemCode.CONCLUSION_WITHOUT_EVIDENCE, "conclusion")]
    general = _GENERAL.search(conclusion)
    if general and any(one.status is EvidenceStatus.NO_EVIDENCE for one in usable):
        return [Problem(ProblemCode.GENERAL_NEGATIVE, "conclusion", general.group())]
    return []


def _reference_problem(one: Evidence | None, task_id: str) -> ProblemCode | None:
    if one is None:
        return ProblemCode.UNKNOWN_EVIDENCE
    if one.head.task_id != task_id:
        return ProblemCode.FOREIGN_EVIDENCE
    return None if one.is_ready else ProblemCode.NOT_READY


def _check_negative(text: str, cited: Iterable[Evidence], where: str) -> list[Problem]:
    """A fact that rests on searches without a result alone may only say so."""
    if any(one.status is EvidenceStatus.EVIDENCE_FOUND for one in cited):
        return []
    if general := _GENERAL.search(text):
        return [Problem(ProblemCode.GENERAL_NEGATIVE, where, general.group())]
    return [] if _NOT_FOUND.search(text) else [Problem(ProblemCode.NO_EVIDENCE_AS_FINDING, where)]


def _corpus(cited: Iterable[Evidence]) -> Corpus:
    return corpus_of(
        part
        for one in cited
        for part in (
            one.head.result_brief if one.result is None else one.result,
            one.head.args_brief if one.arguments is None else one.arguments,
            one.head.extract_counts,
            one.head.tool_name,
            one.head.evidence_id,
        )
    )
