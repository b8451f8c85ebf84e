"""Release: the guards that the flow chart asks for, until it decides (lifecycle document 9, 10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness_service.agent import prompts
from harness_service.agent.builtins import Finished
from harness_service.agent.model_calls import ask_structured
from harness_service.agent.node_run import NodeRun
from harness_service.agent.react import NodeEnd
from harness_service.core import draft as drafts
from harness_service.core import evidence_guard, finalise
from harness_service.core.budget import BudgetExceeded
from harness_service.core.canonical import parse_json
from harness_service.core.draft import DRAFT_SCHEMA, DiagnosisDraft
from harness_service.core.evidence_guard import Evidence, Problem
from harness_service.core.release import ReleaseDecision, ReleaseFacts, ReleaseStep, next_step
from harness_service.ports import ModelCall, ModelFailed
from harness_service.scope import TurnScope
from turnfence import records as r
from turnfence.axes import (
    CancelReason,
    ProcessingStage,
    ReleaseOutcome,
    SemanticVerdict,
    StopReason,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
)

VERDICT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["verdict", "reason"],
    "properties": {
        "verdict": {"type": "string", "enum": ["SUPPORTED", "UNSUPPORTED"]},
        "reason": {"type": "string"},
    },
}


class Release(msgspec.Struct, frozen=True):
    """``content`` is None when nothing may be shown."""

    decision: ReleaseDecision
    content: r.Content | None
    draft: DiagnosisDraft | None


async def release(run: NodeRun, end: NodeEnd | None) -> Release:
    """Decide what of a node's end may be shown. ``end`` None: the loop was cut short by the budget."""
    scope = run.scope
    draft = end.draft if isinstance(end, Finished) else None
    if scope.lifecycle.is_active:
        scope.stage(ProcessingStage.SAFETY_VALIDATING)
    guards = _Guards(run, draft, await _evidence(run))
    decision = await guards.decide()
    scope.trace(
        TraceEventType.RELEASE_DECISION,
        TracePhase.RELEASE,
        TraceEventStatus.FAILED if decision.outcome is ReleaseOutcome.FAILED else TraceEventStatus.SUCCEEDED,
        release_outcome=decision.outcome.value,
        fallback_type=decision.fallback_type.value if decision.fallback_type else "",
        stop_reason=scope.axes.stop_reason.value if scope.axes.stop_reason else "",
    )
    return Release(decision, guards.content(decision), guards.draft)


async def _evidence(run: NodeRun) -> dict[str, Evidence]:
    """Everything of this task that this run knows, with its whole payloads."""
    known: dict[str, Evidence] = {}
    for evidence_id, head in run.heads.items():
        value = await run.payload_value(evidence_id)
        known[evidence_id] = Evidence(head, result=value)
    return known


class _Guards:
    """The facts of one release as they come to be known."""

    def __init__(self, run: NodeRun, draft: DiagnosisDraft | None, evidence: Mapping[str, Evidence]) -> None:
        self._run = run
        self._scope: TurnScope = run.scope
        self._evidence = evidence
        self.draft = draft
        self._problems: Sequence[Problem] = ()
        self._facts = ReleaseFacts(termination=None, has_draft=False)
        self._refresh()

    def _refresh(self, **known: Any) -> None:
        draft = self.draft
        self._facts = msgspec.structs.replace(
            self._facts,
            termination=self._scope.lifecycle.termination,
            has_draft=draft is not None,
            has_conclusion=draft is not None and draft.has_conclusion,
            verified_facts=len(self.verified()),
            missing_info=len(draft.missing_info) if draft else 0,
            **known,
        )

    def verified(self) -> tuple[r.Fact, ...]:
        """Facts of the draft and of the progress snapshot that hold up against their evidence."""
        told = (*(drafts.to_facts(self.draft) if self.draft else ()), *self._run.collection.facts)
        good = evidence_guard.verified_facts(told, self._evidence, self._run.task_id)
        return tuple({(fact.text, *fact.evidence_ids): fact for fact in good}.values())

    async def decide(self) -> ReleaseDecision:
        if self.draft is not None and not self.draft.has_conclusion:
            self._trace(TraceEventType.EVIDENCE_GUARD_INITIAL, valid=bool(self.verified()))
        while True:
            step = next_step(self._facts)
            if isinstance(step, ReleaseDecision):
                return step
            try:
                await _STEPS[step](self)
            except BudgetExceeded:
                self._scope.lifecycle.cancel(CancelReason.BUDGET_EXHAUSTED)
                self._scope.axes.stop_reason = StopReason.BUDGET_LIMIT_REACHED
                self._refresh()

    def content(self, decision: ReleaseDecision) -> r.Content | None:
        locale = self._scope.request.locale
        if decision.outcome is ReleaseOutcome.SUCCESS and self.draft is not None:
            heads = {evidence_id: one.head for evidence_id, one in self._evidence.items()}
            return finalise.report(self.draft, heads, locale)
        if decision.fallback_type is not None:
            missing = self.draft.missing_info if self.draft else ()
            return finalise.fallback(decision.fallback_type, self.verified(), missing, locale)
        return None

    # --- the steps ---

    async def _check(self) -> None:
        self._problems = self._judge()
        self._trace(TraceEventType.EVIDENCE_GUARD_INITIAL, valid=not self._problems)
        self._refresh(evidence_valid=not self._problems)

    async def _recheck(self) -> None:
        self._problems = self._judge()
        self._trace(TraceEventType.EVIDENCE_GUARD_RECHECK, valid=not self._problems)
        self._refresh(recheck_valid=not self._problems)

    def _judge(self) -> tuple[Problem, ...]:
        assert self.draft is not None
        return evidence_guard.check(self.draft, self._evidence, self._run.task_id)

    async def _repair(self) -> None:
        """Once, with the list of what may be cited."""
        assert self.draft is not None
        citable = evidence_guard.citable(self._evidence, self._run.task_id)
        facts = {
            "draft": msgspec.to_builtins(self.draft),
            "problems": [str(problem) for problem in self._problems],
            "citable": [citation.evidence_id for citation in citable],
        }
        shown = {**facts, "evidence": [self._shown(citation.evidence_id) for citation in citable]}
        try:
            self.draft = await ask_structured(
                self._scope,
                ModelCall.EVIDENCE_REPAIR,
                prompts.repair_messages(self._scope, shown),
                prompts.briefing(self._scope, draft=facts, skill=self._run.skill.key),
                DRAFT_SCHEMA,
                drafts.parse_draft,
            )
        except ModelFailed:
            self._trace(TraceEventType.EVIDENCE_REPAIR, valid=False)
            self._refresh(repaired=False)
            return
        self._trace(TraceEventType.EVIDENCE_REPAIR, valid=True)
        self._refresh(repaired=True)

    async def _semantic(self) -> None:
        """An error or a time-out is "unavailable", never SUPPORTED."""
        assert self.draft is not None
        scope = self._scope
        started = scope.now()
        facts = {
            "conclusion": self.draft.conclusion,
            "facts": [msgspec.to_builtins(fact) for fact in self.draft.facts],
            "evidence": [self._shown(evidence_id) for evidence_id in self.draft.cited],
        }
        scope.trace(TraceEventType.SEMANTIC_GUARD_ATTEMPT, TracePhase.GUARD, TraceEventStatus.STARTED)
        try:
            verdict = await ask_structured(
                scope,
                ModelCall.SEMANTIC_VERDICT,
                prompts.semantic_messages(facts),
                prompts.briefing(scope, draft=facts, skill=self._run.skill.key),
                VERDICT_SCHEMA,
                parse_verdict,
                guard=True,
            )
        except ModelFailed:
            verdict = SemanticVerdict.UNAVAILABLE
        scope.axes.semantic_verdict = verdict
        scope.trace(
            TraceEventType.SEMANTIC_GUARD_DECISION,
            TracePhase.GUARD,
            TraceEventStatus.FAILED if verdict is SemanticVerdict.UNAVAILABLE else TraceEventStatus.SUCCEEDED,
            started_at=started,
            verdict=verdict.value,
        )
        self._refresh(verdict=verdict)

    def _shown(self, evidence_id: str) -> dict[str, Any]:
        """One evidence for a guard: its payload as data, bounded."""
        one = self._evidence[evidence_id]
        limit = self._scope.deps.settings.react.observation_max_chars
        text = msgspec.json.encode(one.result).decode()
        return {
            "evidence_id": evidence_id,
            "tool": one.head.tool_name,
            "status": one.status.value if one.status else None,
            "arguments": one.head.args_brief,
            "result": one.result if len(text) <= limit else text[:limit],
        }

    def _trace(self, kind: TraceEventType, *, valid: bool) -> None:
        self._scope.trace(
            kind,
            TracePhase.GUARD,
            TraceEventStatus.SUCCEEDED if valid else TraceEventStatus.REJECTED,
            node_id=self._run.node.node_id,
            problems=",".join(sorted({problem.code.value for problem in self._problems})),
        )


_STEPS = {
    ReleaseStep.EVIDENCE_GUARD: _Guards._check,
    ReleaseStep.EVIDENCE_REPAIR: _Guards._repair,
    ReleaseStep.EVIDENCE_RECHECK: _Guards._recheck,
    ReleaseStep.SEMANTIC_GUARD: _Guards._semantic,
}


def parse_verdict(text: str) -> SemanticVerdict:
    """SUPPORTED or UNSUPPORTED; ``ValueError`` for everything else."""
    value = parse_json(text)
    if not isinstance(value, dict) or value.get("verdict") not in ("SUPPORTED", "UNSUPPORTED"):
        raise ValueError("not a verdict")
    return SemanticVerdict(value["verdict"])
