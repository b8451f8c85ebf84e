"""The contract's records as native, immutable types; storage JSON is their camelCase form.

Field names are those of the proto messages of the same name (``turnfence.codec`` converts by name)
and, in camelCase, those of the specification's tables. Instants are integer epoch milliseconds
(``*_at``), spans are integer milliseconds (proto ``Duration``); ``..._json`` fields hold one
RFC 8259 document as text. A proto oneof is a union of tagged structs: the tag is the oneof's field.
"""

from __future__ import annotations

from typing import Any, TypeVar, dataclass_transform

import msgspec

from turnfence.axes import (
    CallStatus,
    CancelReason,
    CheckpointType,
    CollectionState,
    DialogueRole,
    Durability,
    EdgeType,
    EvidenceStatus,
    FailureKind,
    FailureReason,
    FallbackType,
    IntentType,
    MessageType,
    NodeStatus,
    ProcessingStage,
    ReleaseOutcome,
    ResumeAction,
    RunState,
    SemanticVerdict,
    SideEffect,
    SourceType,
    StopReason,
    StreamState,
    TaskStatus,
    TerminationReason,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
    TurnMode,
    TurnStatus,
    WriteDecision,
)


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Base of all records: frozen, camelCase in JSON, defaults left out."""


# --- identity -------------------------------------------------------------------------------------


class Principal(Record):
    organ_id: str
    user_id: str


class TurnRef(Record):
    """What every write of a turn carries; ``seen_seq`` is the largest data sequence it was told."""

    organ_id: str
    conversation_id: str
    run_id: str
    version: int
    lease_token: str
    seen_seq: int = 0


# --- values with a source (state document 3.1) ----------------------------------------------------


class Source(Record):
    type: SourceType
    ref: str = ""
    path: str = ""


class Sourced(Record):
    value_json: str
    source: Source


# --- conversation layer ---------------------------------------------------------------------------


class Conversation(Record):
    """The specification's ConversationFence, with the title."""

    conversation_id: str
    user_id: str
    active_task_id: str = ""
    version: int = 0
    last_trace_id: str = ""
    title: str = ""
    updated_at: int | None = None


class DialogueMessage(Record):
    message_id: str
    role: DialogueRole
    type: MessageType
    text: str
    trace_id: str
    task_id: str = ""
    node_id: str = ""
    round: int = 0
    created_at: int | None = None
    version: int = 0
    idx: int = 0
    release_outcome: ReleaseOutcome | None = None


class EntityEntry(Record):
    display_name: str = ""
    attrs_json: str = "{}"
    task_id: str = ""
    evidence_id: str = ""
    seen_at: int | None = None
    mentions: int = 0


class ArtifactRef(Record):
    evidence_id: str
    name: str
    bytes: int


class TaskRecord(Record):
    task_id: str
    agent_id: str
    status: TaskStatus
    goal: str = ""
    summary: str = ""
    entities: dict[str, EntityEntry] = {}
    artifacts: list[ArtifactRef] = []
    closed_at: int | None = None


# --- task layer (state document 3.2) --------------------------------------------------------------


class TaskMetadata(Record):
    task_id: str
    status: TaskStatus
    current_node_id: str = ""
    agent_id: str = ""
    goal_summary: str = ""
    request: str = ""
    final_message: str = ""
    suspended_at: int | None = None
    started_at: int | None = None
    finished_at: int | None = None
    trace_id: str = ""
    source_message_id: str = ""


class TaskNode(Record):
    node_id: str
    title: str = ""
    objective: str = ""
    skill_key: str = ""
    target: str = ""
    target_claimed: bool = False
    result: str = ""
    status: NodeStatus = NodeStatus.PENDING
    depends_on: list[str] = []
    error_code: str = ""
    error_message: str = ""
    delegate_depth: int = 0
    started_at: int | None = None
    finished_at: int | None = None


class TaskEdge(Record):
    from_node_id: str
    to_node_id: str
    type: EdgeType


class PendingAction(Record):
    """A write waiting for approval: ``args_json`` are the exact canonical bytes that were hashed."""

    tool_name: str
    args_json: str
    args_hash: str


class ShownField(Record):
    """One line of an approval question: label, masked value."""

    label: str
    value: str
    path: str = ""


class TaskCheckpoint(Record):
    checkpoint_id: str
    type: CheckpointType
    node_id: str
    question: str = ""
    allowed_actions: list[ResumeAction] = []
    suggestions: list[str] = []
    expected_fields: list[str] = []
    pending_action: PendingAction | None = None
    fields: list[ShownField] = []
    evidence_id: str = ""
    created_at: int | None = None
    expires_at: int | None = None


class ResumeRecord(Record):
    resume_id: str
    checkpoint_id: str
    message_id: str
    action: ResumeAction
    task_id: str = ""
    acted_at: int | None = None
    user_id: str = ""


class Prior(Record):
    tasks: list[TaskRecord] = []
    entities: dict[str, EntityEntry] = {}
    artifacts: list[ArtifactRef] = []
    reason: str = ""


class WriteIndexEntry(Record):
    """Value of the ``writes`` hash; its field is ``toolName|idempotencyKey``."""

    evidence_id: str
    status: CallStatus
    business_ok: bool | None = None
    not_before: int | None = None


# --- node layer (state document 3.3) --------------------------------------------------------------


class NodeAction(Record):
    """Something that happened without business evidence: built-in call, refusal, user's answer."""

    round: int
    kind: str
    name: str
    arguments_brief: str = ""
    result_brief: str = ""
    at: int | None = None
    call_id: str = ""


class NodeSpace(Record):
    inputs: dict[str, Sourced] = {}
    outputs: dict[str, Sourced] = {}
    state: dict[str, str] = {}
    rounds: int = 0
    tokens: int = 0
    actions: list[NodeAction] = []


class EvidenceHead(Record):
    """State document 3.3; ``not_before`` bars a re-issue after a "not effective" verdict (D35)."""

    evidence_id: str
    task_id: str
    node_id: str
    tool_name: str
    side_effect: SideEffect
    status: CallStatus
    business_ok: bool | None = None
    empty: bool | None = None
    extract_counts: dict[str, int] = {}
    failure_kind: FailureKind = FailureKind.NONE
    idempotency_key: str = ""
    args_hash: str = ""
    args_brief: str = ""
    result_brief: str = ""
    error_code: str = ""
    entities: str = ""
    payload_id: str = ""
    payload_bytes: int = 0
    round: int = 0
    trace_id: str = ""
    detail: str = ""
    artifact: bool = False
    started_at: int | None = None
    finished_at: int | None = None
    duration: int | None = None
    not_before: int | None = None
    call_id: str = ""


# --- run ------------------------------------------------------------------------------------------


class Budget(Record):
    """Limits of one run; 0 or None: not limited by this budget."""

    model_calls: int = 0
    tool_calls: int = 0
    tokens: int = 0
    payload_bytes: int = 0
    deadline: int | None = None


class Usage(Record):
    model_calls: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_estimated: bool = False
    payload_bytes: int = 0
    agent_steps: int = 0
    duration: int | None = None


class Fact(Record):
    text: str
    evidence_ids: list[str] = []


class EvidenceCitation(Record):
    evidence_id: str
    tool_name: str
    status: EvidenceStatus | None = None
    brief: str = ""
    observed_at: int | None = None


class KnowledgeSource(Record):
    title: str
    location: str
    excerpt: str


class ChatReply(Record, tag_field="body", tag="chat"):
    text: str


class KnowledgeAnswer(Record, tag_field="body", tag="knowledge"):
    text: str
    sources: list[KnowledgeSource] = []


class DiagnosisReport(Record, tag_field="body", tag="report"):
    conclusion: str
    facts: list[Fact] = []
    evidence: list[EvidenceCitation] = []
    recommendations: list[str] = []


class Fallback(Record, tag_field="body", tag="fallback"):
    type: FallbackType
    verified_facts: list[Fact] = []
    missing_info: list[str] = []
    explanation: str = ""


class CheckpointPrompt(Record, tag_field="body", tag="checkpoint"):
    """What the caller sees of a checkpoint: its pending action is masked, its arguments absent."""

    checkpoint: TaskCheckpoint


class Notice(Record, tag_field="body", tag="notice"):
    code: str
    text: str


ContentBody = ChatReply | KnowledgeAnswer | DiagnosisReport | Fallback | CheckpointPrompt | Notice


class Content(Record, tag_field="kind", tag="content"):
    body: ContentBody
    text: str


class Metadata(Record, tag_field="kind", tag="metadata"):
    run_id: str
    conversation_id: str
    message_id: str
    agent_id: str = ""
    truncated: bool = False


class Status(Record, tag_field="kind", tag="status"):
    stage: ProcessingStage


class Progress(Record, tag_field="kind", tag="progress"):
    node_id: str = ""
    node_title: str = ""
    text: str = ""
    tool_name: str = ""


class Failure(Record, tag_field="kind", tag="failure"):
    reason: FailureReason
    message: str


class Done(Record, tag_field="kind", tag="done"):
    release_outcome: ReleaseOutcome
    turn_status: TurnStatus
    durability: Durability | None = None
    usage: Usage = Usage()
    checkpoint_id: str = ""


class Gap(Record, tag_field="kind", tag="gap"):
    from_sequence: int
    to_sequence: int


EventKind = Metadata | Status | Progress | Content | Failure | Done | Gap


class TurnEvent(Record):
    sequence: int
    run_id: str
    conversation_id: str
    kind: EventKind
    time: int | None = None


class Run(Record):
    """Every state axis of one run, side by side; unset axes are None."""

    run_id: str
    conversation_id: str = ""
    message_id: str = ""
    agent_id: str = ""
    task_id: str = ""
    version: int = 0
    query_cut: bool = False
    intent: IntentType | None = None
    turn_mode: TurnMode | None = None
    run_state: RunState | None = None
    termination_reason: TerminationReason | None = None
    error_code: str = ""
    release_outcome: ReleaseOutcome | None = None
    fallback_type: FallbackType | None = None
    stop_reason: StopReason | None = None
    collection_state: CollectionState | None = None
    semantic_verdict: SemanticVerdict | None = None
    stream_state: StreamState | None = None
    turn_status: TurnStatus | None = None
    durability: Durability | None = None
    limits: Budget = Budget()
    usage: Usage = Usage()
    started_at: int | None = None
    finished_at: int | None = None
    answer: Content | None = None


class TraceEvent(Record):
    sequence: int
    type: TraceEventType
    phase: TracePhase
    status: TraceEventStatus
    started_at: int | None = None
    duration: int | None = None
    node_id: str = ""
    evidence_id: str = ""
    attributes: dict[str, str] = {}


class PreviousTurn(Record):
    run_id: str
    query: str
    published_result: str
    finished_at: int | None = None


# --- write path of one turn (turnfence.state.v1) --------------------------------------------------


class TurnInput(Record):
    message_id: str
    text: str = ""
    action: ResumeAction | None = None
    checkpoint_id: str = ""


class BeginTurnRequest(Record):
    organ_id: str
    user_id: str
    conversation_id: str
    run_id: str
    input: TurnInput
    input_hash: str
    agent_id: str = ""
    lease: int | None = None


class TaskState(Record):
    """One task's group as BeginTurn hands it over; the fields of the proto message Task."""

    metadata: TaskMetadata
    nodes: list[TaskNode] = []
    edges: list[TaskEdge] = []
    checkpoint: TaskCheckpoint | None = None
    shared: dict[str, Sourced] = {}
    prior: Prior | None = None
    writes: dict[str, WriteIndexEntry] = {}


class Snapshot(Record):
    conversation: Conversation
    dialogue: list[DialogueMessage] = []
    records: list[TaskRecord] = []
    entities: dict[str, EntityEntry] = {}
    shared: dict[str, Sourced] = {}
    task: TaskState | None = None
    unresolved_writes: list[EvidenceHead] = []
    unresolved_requests: dict[str, str] = {}


class Recovery(Record):
    ended_runs: list[str] = []
    nodes_reset: list[str] = []
    evidence_unknown: list[str] = []
    evidence_cancelled: list[str] = []
    rehydrated: list[str] = []
    recovered_changes: int = 0


class BeginTurnResponse(Record):
    """Either ``existing_run`` alone, or a begun turn."""

    existing_run: Run | None = None
    turn: TurnRef | None = None
    snapshot: Snapshot | None = None
    user_message: DialogueMessage | None = None
    truncated: bool = False
    recovery: Recovery = Recovery()
    previous_turn: PreviousTurn | None = None


class OpenNodeRequest(Record):
    turn: TurnRef
    task_id: str
    node_id: str


class OpenNodeResponse(Record):
    space: NodeSpace
    evidence: list[EvidenceHead] = []
    dialogue: list[DialogueMessage] = []


class PutConversation(Record, tag_field="change", tag="put_conversation"):
    """A field left None stays as it is; an empty ``active_task_id`` clears it."""

    title: str | None = None
    active_task_id: str | None = None


class AppendMessage(Record, tag_field="change", tag="append_message"):
    message: DialogueMessage


class PutSessionShared(Record, tag_field="change", tag="put_session_shared"):
    name: str
    value: Sourced


class PutTask(Record, tag_field="change", tag="put_task"):
    task: TaskMetadata


class PutNode(Record, tag_field="change", tag="put_node"):
    task_id: str
    node: TaskNode


class PutEdge(Record, tag_field="change", tag="put_edge"):
    task_id: str
    edge: TaskEdge


class PutCheckpoint(Record, tag_field="change", tag="put_checkpoint"):
    task_id: str
    checkpoint: TaskCheckpoint


class ConsumeCheckpoint(Record, tag_field="change", tag="consume_checkpoint"):
    task_id: str
    checkpoint_id: str
    message_id: str
    action: ResumeAction
    acted_at: int | None = None
    user_id: str = ""


class PutTaskShared(Record, tag_field="change", tag="put_task_shared"):
    task_id: str
    name: str
    value: Sourced


class PutPrior(Record, tag_field="change", tag="put_prior"):
    task_id: str
    prior: Prior


class PutNodeSpace(Record, tag_field="change", tag="put_node_space"):
    """Only what changed: entries are merged, ``rounds``/``tokens`` replace, actions are appended."""

    task_id: str
    node_id: str
    inputs: dict[str, Sourced] = {}
    outputs: dict[str, Sourced] = {}
    state: dict[str, str] = {}
    rounds: int | None = None
    tokens: int | None = None
    actions: list[NodeAction] = []


class PutEntity(Record, tag_field="change", tag="put_entity"):
    """``entity_type:entity_id`` is the index key; ``entry`` None removes it."""

    entity_type: str
    entity_id: str
    entry: EntityEntry | None = None


class CloseTask(Record, tag_field="change", tag="close_task"):
    task_id: str
    status: TaskStatus
    record: TaskRecord
    final_message: str = ""
    closed_at: int | None = None


class AppendEvent(Record, tag_field="change", tag="append_event"):
    event: TurnEvent


class AppendTrace(Record, tag_field="change", tag="append_trace"):
    trace: TraceEvent


class PutRun(Record, tag_field="change", tag="put_run"):
    run: Run


StateChange = (
    AppendMessage
    | PutConversation
    | PutSessionShared
    | PutTask
    | PutNode
    | PutEdge
    | PutCheckpoint
    | ConsumeCheckpoint
    | PutTaskShared
    | PutPrior
    | PutNodeSpace
    | PutEntity
    | CloseTask
    | AppendEvent
    | AppendTrace
    | PutRun
)


class FlushRequest(Record):
    turn: TurnRef
    sequence: int
    changes: list[StateChange] = []


class FlushResponse(Record):
    data_seq: int


class RegisterWriteRequest(Record):
    turn: TurnRef
    task_id: str
    node_id: str
    evidence: EvidenceHead
    request_json: str
    consume_checkpoint: ConsumeCheckpoint | None = None


class RegisterWriteResponse(Record):
    decision: WriteDecision
    evidence: EvidenceHead
    code: str = ""
    data_seq: int = 0


class Settlement(Record):
    task_id: str
    node_id: str
    evidence: EvidenceHead
    payload_json: str = ""
    request_json: str = ""


class SettleCallsRequest(Record):
    turn: TurnRef
    settlements: list[Settlement] = []


class SettleCallsResponse(Record):
    """The heads as stored: with ``payload_id`` where the payload went to a table of its own."""

    evidence: list[EvidenceHead] = []
    data_seq: int = 0


class ReadPayloadRequest(Record):
    turn: TurnRef
    task_id: str
    evidence_id: str


class PersistTurnRequest(Record):
    turn: TurnRef
    sequence: int
    outcome: Run
    changes: list[StateChange] = []
    closing_events: list[TurnEvent] = []


class PersistTurnResponse(Record):
    durability: Durability
    closed: list[TaskRecord] = []
    already_persisted: bool = False
    data_seq: int = 0


class RenewLeaseRequest(Record):
    turn: TurnRef


class RenewLeaseResponse(Record):
    lease_until: int | None = None
    cancel: CancelReason | None = None


class AbandonTurnRequest(Record):
    organ_id: str
    conversation_id: str
    run_id: str
    outcome: Run
    closing_events: list[TurnEvent] = []


class AbandonTurnResponse(Record):
    """``released`` is false when the run did not hold the conversation any more."""

    released: bool = False


class GetRunRequest(Record):
    organ_id: str
    user_id: str
    run_id: str


class GetRunResponse(Record):
    run: Run


class WatchEventsRequest(Record):
    organ_id: str
    user_id: str
    run_id: str
    after_sequence: int = 0


R = TypeVar("R")
_ENCODER = msgspec.json.Encoder()


def to_json(record: Any) -> str:
    """One line of storage JSON (UTF-8 text, keys in declaration order)."""
    return _ENCODER.encode(record).decode()


def from_json(text: str | bytes, kind: type[R]) -> R:
    """Read storage JSON; raises ``msgspec.ValidationError`` on anything of another shape."""
    return msgspec.json.decode(text, type=kind)


class RequestCancelRequest(Record):
    organ_id: str
    user_id: str
    run_id: str
    reason: CancelReason | None = None


class RequestCancelResponse(Record):
    run: Run


class RecordStreamEndRequest(Record):
    organ_id: str
    user_id: str
    run_id: str
    stream_state: StreamState | None = None
    last_sequence: int = 0


class RecordStreamEndResponse(Record):
    recorded: bool


class ListRunsRequest(Record):
    organ_id: str
    user_id: str
    conversation_id: str = ""
    page_size: int = 0
    page_token: str = ""


class ListRunsResponse(Record):
    runs: list[Run]
    next_page_token: str = ""


class ListTraceEventsRequest(Record):
    organ_id: str
    user_id: str
    run_id: str
    page_size: int = 0
    page_token: str = ""


class ListTraceEventsResponse(Record):
    events: list[TraceEvent]
    next_page_token: str = ""


class ListEvidenceRequest(Record):
    organ_id: str
    user_id: str
    run_id: str
    page_size: int = 0
    page_token: str = ""


class ListEvidenceResponse(Record):
    evidence: list[EvidenceHead]
    next_page_token: str = ""


# --- HistoryService -------------------------------------------------------------------------------


class GetConversationRequest(Record):
    organ_id: str
    user_id: str
    conversation_id: str


class GetConversationResponse(Record):
    conversation: Conversation


class ListConversationsRequest(Record):
    organ_id: str
    user_id: str
    page_size: int = 0
    page_token: str = ""


class ListConversationsResponse(Record):
    conversations: list[Conversation]
    next_page_token: str = ""


class ListMessagesRequest(Record):
    organ_id: str
    user_id: str
    conversation_id: str
    page_size: int = 0
    page_token: str = ""


class ListMessagesResponse(Record):
    messages: list[DialogueMessage]
    next_page_token: str = ""


class GetTaskRequest(Record):
    organ_id: str
    user_id: str
    conversation_id: str
    task_id: str


class GetTaskResponse(Record):
    task: TaskState


class ListTasksRequest(Record):
    organ_id: str
    user_id: str
    conversation_id: str
    page_size: int = 0
    page_token: str = ""


class ListTasksResponse(Record):
    tasks: list[TaskMetadata]
    next_page_token: str = ""


class DeleteConversationRequest(Record):
    organ_id: str
    user_id: str
    conversation_id: str


class DeleteConversationResponse(Record):
    pass
