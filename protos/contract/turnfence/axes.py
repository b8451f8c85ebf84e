"""Every state axis of the contract as a native enum: one enum per axis, one axis per question.

Never merge two axes: a run that was SUCCESS may have released a FALLBACK, and a task that was
CANCELED may belong to a run that was SUCCESS. Each enum mirrors the proto enum of the same name in
``turnfence.common.v1`` (``RunState.RUNNING`` is ``RUN_STATE_RUNNING``); the zero value
``..._UNSPECIFIED`` is ``None`` here. ``tests/core/test_contract.py`` holds the two together.
"""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """Lifecycle document 3.2: how the run ended in memory."""

    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"


class TerminationReason(StrEnum):
    """Why a run reached its terminal state; set together with it, in one step (D58)."""

    COMPLETED = "COMPLETED"
    CLIENT_DISCONNECTED = "CLIENT_DISCONNECTED"
    USER_REQUESTED = "USER_REQUESTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    INTERNAL_FAILURE = "INTERNAL_FAILURE"
    MODEL_FAILED = "MODEL_FAILED"
    INVALID_DRAFT = "INVALID_DRAFT"
    FENCED = "FENCED"
    INTERRUPTED = "INTERRUPTED"
    SHUTDOWN = "SHUTDOWN"
    STATE_UNAVAILABLE = "STATE_UNAVAILABLE"


class CancelReason(StrEnum):
    """Why somebody asked a run to stop; the first reason wins (lifecycle document 4)."""

    CLIENT_DISCONNECTED = "CLIENT_DISCONNECTED"
    USER_REQUESTED = "USER_REQUESTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    INTERNAL_FAILURE = "INTERNAL_FAILURE"
    FENCED = "FENCED"
    SHUTDOWN = "SHUTDOWN"
    STATE_UNAVAILABLE = "STATE_UNAVAILABLE"


class ReleaseOutcome(StrEnum):
    """Lifecycle document 10: what was published."""

    SUCCESS = "SUCCESS"
    FALLBACK = "FALLBACK"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class FallbackType(StrEnum):
    """Why a fallback was published instead of a conclusion."""

    MISSING_REQUIRED_CONTEXT = "MISSING_REQUIRED_CONTEXT"
    INSUFFICIENT_EVIDENCE = "INSUFFICIENT_EVIDENCE"
    EVIDENCE_VALIDATION_FAILED = "EVIDENCE_VALIDATION_FAILED"
    SEMANTIC_UNSUPPORTED = "SEMANTIC_UNSUPPORTED"
    SEMANTIC_UNAVAILABLE = "SEMANTIC_UNAVAILABLE"


class StopReason(StrEnum):
    """The lifecycle document's DiagnosisStopReason: why evidence collection was stopped."""

    INFORMATION_SATURATED = "INFORMATION_SATURATED"
    PROGRESS_PROTOCOL_VIOLATED = "PROGRESS_PROTOCOL_VIOLATED"
    BUDGET_LIMIT_REACHED = "BUDGET_LIMIT_REACHED"


class CollectionState(StrEnum):
    """Whether more evidence may be collected (lifecycle document 8.1)."""

    COLLECTING = "COLLECTING"
    SATURATED = "SATURATED"


class InformationGain(StrEnum):
    """Whether a tool result brought something new (lifecycle document 8.2)."""

    GAINED = "GAINED"
    NO_GAIN = "NO_GAIN"


class InvocationStatus(StrEnum):
    """Canonical record of one tool invocation (lifecycle document 7)."""

    PROJECTING = "PROJECTING"
    READY = "READY"
    ERROR = "ERROR"


class EvidenceStatus(StrEnum):
    """What a tool objectively found (lifecycle document 7.2)."""

    EVIDENCE_FOUND = "EVIDENCE_FOUND"
    NO_EVIDENCE = "NO_EVIDENCE"
    ERROR = "ERROR"


class CallStatus(StrEnum):
    """The state document's evidence status: how far one call of a business tool came."""

    STARTED = "STARTED"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    UNKNOWN_PRE_CALL = "UNKNOWN_PRE_CALL"


class FailureKind(StrEnum):
    """State document 3.3: class of a failed call."""

    NONE = "NONE"
    AUTH_FAILURE = "AUTH_FAILURE"
    PARAMETER_FAILURE = "PARAMETER_FAILURE"
    BUSINESS_FAILURE = "BUSINESS_FAILURE"
    TRANSPORT_FAILURE = "TRANSPORT_FAILURE"
    RATE_LIMIT = "RATE_LIMIT"
    TIMEOUT = "TIMEOUT"
    UNKNOWN = "UNKNOWN"


class SideEffect(StrEnum):
    """Whether a tool only reads (NONE) or changes the world (WRITE)."""

    NONE = "NONE"
    WRITE = "WRITE"


class SemanticVerdict(StrEnum):
    """Whether the cited evidence supports the conclusion; UNAVAILABLE is never SUPPORTED."""

    SUPPORTED = "SUPPORTED"
    UNSUPPORTED = "UNSUPPORTED"
    UNAVAILABLE = "UNAVAILABLE"


class StreamState(StrEnum):
    """State machine of one event stream (lifecycle document 11)."""

    NEW = "NEW"
    OPEN = "OPEN"
    TERMINAL = "TERMINAL"
    DISCONNECTED = "DISCONNECTED"


class ProcessingStage(StrEnum):
    """The lifecycle document's ChatApplicationStatus: a stage shown to the user, not a state."""

    ROUTING = "ROUTING"
    SYSTEM_RESPONDING = "SYSTEM_RESPONDING"
    KNOWLEDGE_SEARCHING = "KNOWLEDGE_SEARCHING"
    KNOWLEDGE_ANSWERING = "KNOWLEDGE_ANSWERING"
    DIAGNOSIS_RUNNING = "DIAGNOSIS_RUNNING"
    SAFETY_VALIDATING = "SAFETY_VALIDATING"


class IntentType(StrEnum):
    """What the user wants (lifecycle document 2)."""

    SYSTEM_CHAT = "SYSTEM_CHAT"
    KNOWLEDGE_QUERY = "KNOWLEDGE_QUERY"
    DIAGNOSIS = "DIAGNOSIS"


class TurnMode(StrEnum):
    """What this turn does with the conversation's task (state document 4)."""

    START_FRESH = "START_FRESH"
    START_WITH_CONTEXT = "START_WITH_CONTEXT"
    CONTINUE_TASK = "CONTINUE_TASK"
    REPLACE_TASK = "REPLACE_TASK"
    SWITCH_AGENT = "SWITCH_AGENT"
    CANCEL_TASK = "CANCEL_TASK"
    REPLY_ONLY = "REPLY_ONLY"
    UNCERTAIN = "UNCERTAIN"


class TurnStatus(StrEnum):
    """The one task state a client sees (state document 3.4)."""

    DONE = "DONE"
    WAITING = "WAITING"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class TaskStatus(StrEnum):
    """State document 3.2; spelled CANCELED there and here."""

    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"


class NodeStatus(StrEnum):
    """State document 3.2."""

    PENDING = "PENDING"
    READY = "READY"
    RUNNING = "RUNNING"
    WAITING_DELEGATE = "WAITING_DELEGATE"
    SUSPENDED = "SUSPENDED"
    DONE = "DONE"
    SKIPPED = "SKIPPED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class EdgeType(StrEnum):
    """NORMAL: downstream waits for DONE or SKIPPED. DELEGATE: the initiator waits for any end."""

    NORMAL = "NORMAL"
    DELEGATE = "DELEGATE"


class CheckpointType(StrEnum):
    """What a suspended task waits for (state document 3.2)."""

    FOLLOW_UP = "FOLLOW_UP"
    APPROVAL = "APPROVAL"
    VERIFY = "VERIFY"


class ResumeAction(StrEnum):
    """How the user answers a checkpoint."""

    REPLY = "REPLY"
    CONFIRM = "CONFIRM"
    REJECT = "REJECT"
    CANCEL = "CANCEL"


class DialogueRole(StrEnum):
    """Who speaks in a dialogue message."""

    USER = "USER"
    AGENT = "AGENT"


class MessageType(StrEnum):
    """Kind of a dialogue message."""

    USER_TEXT = "USER_TEXT"
    AGENT_REPLY = "AGENT_REPLY"


class SourceType(StrEnum):
    """Where a value came from (state document 3.1)."""

    USER = "USER"
    EVIDENCE = "EVIDENCE"
    NODE_OUTPUT = "NODE_OUTPUT"
    SHARED = "SHARED"
    SESSION = "SESSION"
    PRIOR_TASK = "PRIOR_TASK"
    MODEL = "MODEL"
    CONTRACT = "CONTRACT"
    PLATFORM = "PLATFORM"


class Durability(StrEnum):
    """PERSISTED exactly when the turn's ``turn_commit`` row exists in SQL."""

    PERSISTED = "PERSISTED"
    PENDING = "PENDING"


class FailureReason(StrEnum):
    """Public reason of a ``failure`` event."""

    TIMED_OUT = "TIMED_OUT"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    FENCED = "FENCED"
    UNAVAILABLE = "UNAVAILABLE"
    MODEL_FAILED = "MODEL_FAILED"
    INVALID_DRAFT = "INVALID_DRAFT"
    INTERRUPTED = "INTERRUPTED"
    INTERNAL = "INTERNAL"


class WriteDecision(StrEnum):
    """Answer of RegisterWrite (state document 5.4: Proceed, Reused, Blocked)."""

    PROCEED = "PROCEED"
    REUSED = "REUSED"
    BLOCKED = "BLOCKED"


class OnDisconnect(StrEnum):
    """What a vanished caller does to its run."""

    CANCEL = "CANCEL"
    CONTINUE = "CONTINUE"


class BusyPolicy(StrEnum):
    """What RunTurn does when another turn holds the conversation."""

    REJECT = "REJECT"
    WAIT = "WAIT"


class TraceEventType(StrEnum):
    """Names of the lifecycle document's section 13, and what this pair adds to them."""

    RUN_STARTED = "RUN_STARTED"
    ENTRY_GUARD = "ENTRY_GUARD"
    ROUTING_ATTEMPT = "ROUTING_ATTEMPT"
    ROUTING_DECISION = "ROUTING_DECISION"
    TASK_OPENED = "TASK_OPENED"
    TASK_CLOSED = "TASK_CLOSED"
    PLAN_DECISION = "PLAN_DECISION"
    NODE_TRANSITION = "NODE_TRANSITION"
    AGENT_MODEL_STEP = "AGENT_MODEL_STEP"
    TOOL_INVOCATION = "TOOL_INVOCATION"
    TOOL_PROGRESS = "TOOL_PROGRESS"
    TOOL_REQUEST_REJECTED = "TOOL_REQUEST_REJECTED"
    WRITE_REGISTERED = "WRITE_REGISTERED"
    WRITE_SETTLED = "WRITE_SETTLED"
    WRITE_SETTLED_LATE = "WRITE_SETTLED_LATE"
    APPROVAL_BYPASSED = "APPROVAL_BYPASSED"
    CHECKPOINT_OPENED = "CHECKPOINT_OPENED"
    CHECKPOINT_CONSUMED = "CHECKPOINT_CONSUMED"
    KNOWLEDGE_SEARCH = "KNOWLEDGE_SEARCH"
    COLLECTION_STOP = "COLLECTION_STOP"
    EVIDENCE_GUARD_INITIAL = "EVIDENCE_GUARD_INITIAL"
    EVIDENCE_REPAIR = "EVIDENCE_REPAIR"
    EVIDENCE_GUARD_RECHECK = "EVIDENCE_GUARD_RECHECK"
    SEMANTIC_GUARD_ATTEMPT = "SEMANTIC_GUARD_ATTEMPT"
    SEMANTIC_GUARD_DECISION = "SEMANTIC_GUARD_DECISION"
    RELEASE_DECISION = "RELEASE_DECISION"
    RUN_FINISHED = "RUN_FINISHED"


class TracePhase(StrEnum):
    """Which part of the turn a trace event belongs to."""

    ADMISSION = "ADMISSION"
    ROUTING = "ROUTING"
    TASK = "TASK"
    AGENT = "AGENT"
    TOOL = "TOOL"
    GUARD = "GUARD"
    RELEASE = "RELEASE"
    RUN = "RUN"


class TraceEventStatus(StrEnum):
    """How the thing that a trace event describes went."""

    STARTED = "STARTED"
    SUCCEEDED = "SUCCEEDED"
    REJECTED = "REJECTED"
    FAILED = "FAILED"
