"""What the harness needs from outside, as small interfaces. The contract is written here.

Every call is bounded by ``timeout`` seconds (monotonic) and may be cancelled by its task at any
await; an adapter never lets a driver's exception out: it raises the error named in the docstring.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from harness_service.core.catalogue import ToolContract
from harness_service.core.tool_failure import ToolFailure
from turnfence import records as r


class Clock(Protocol):
    """Two clocks that are never mixed: ``now_ms`` decorates, ``monotonic`` measures and limits."""

    def now_ms(self) -> int:
        """Epoch milliseconds; may step, so it orders nothing."""
        ...

    def monotonic(self) -> float:
        """Seconds; never steps back."""
        ...


# --- the model ------------------------------------------------------------------------------------


class ModelCall(StrEnum):
    """The calls to the model (catalogue.md); a structured call's value names its json_schema."""

    TURN_DECISION = "turn_decision"
    TASK_PLAN = "task_plan"
    NODE_STEP = "node_step"
    DIAGNOSIS_DRAFT = "diagnosis_draft"
    SYSTEM_ANSWER = "system_answer"
    KNOWLEDGE_ANSWER = "knowledge_answer"
    EVIDENCE_REPAIR = "evidence_repair"
    SEMANTIC_VERDICT = "semantic_verdict"


class OfferedTool(msgspec.Struct, frozen=True):
    """A tool as the model sees it: wire name (``ops__disk_usage``) and its JSON Schema."""

    name: str
    description: str
    input_schema: dict[str, Any]


class ToolCallRequest(msgspec.Struct, frozen=True):
    """A call the model asks for; the arguments are untrusted text, perhaps not even JSON."""

    call_id: str
    name: str
    arguments_json: str


class ChatMessage(msgspec.Struct, frozen=True):
    role: str  # system | user | assistant | tool
    content: str
    tool_calls: tuple[ToolCallRequest, ...] = ()
    tool_call_id: str = ""


class Observation(msgspec.Struct, frozen=True):
    """One tool result of this node, as structured data for a model that follows rules."""

    evidence_id: str  # empty for built-ins and refusals
    tool: str  # catalogue name, or a built-in's name
    status: str  # ok | empty | refused | failed | unknown | reused
    arguments: Any
    result: Any  # parsed JSON, None when there is none
    reason: str = ""
    round: int = 0


class Briefing(msgspec.Struct, frozen=True):
    """The same facts as the messages carry, structured: what a rule-following model reads."""

    locale: str = "en"
    agent_id: str = ""
    skill: str = ""
    text: str = ""  # the user's text of this turn
    request: str = ""  # the text that opened the task
    node_title: str = ""
    has_task: bool = False
    has_checkpoint: bool = False
    round: int = 0
    observations: tuple[Observation, ...] = ()
    user_replies: tuple[str, ...] = ()  # the user's messages inside this node, oldest first
    previous_result: str = ""  # published result of the previous turn, as text
    inputs: Mapping[str, Any] = {}
    passages: tuple[Passage, ...] = ()
    agents: tuple[str, ...] = ()
    stop_required: bool = False
    draft: Any = None  # draft under repair or judgement, as parsed JSON


class ChatRequest(msgspec.Struct, frozen=True):
    call: ModelCall
    messages: tuple[ChatMessage, ...]
    briefing: Briefing
    tools: tuple[OfferedTool, ...] = ()
    response_schema: dict[str, Any] | None = None  # strict json_schema, named ``call``
    max_tokens: int | None = None


class TokenUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    estimated: bool = False


class ChatReply(msgspec.Struct, frozen=True):
    text: str
    tool_calls: tuple[ToolCallRequest, ...] = ()
    usage: TokenUsage = TokenUsage(0, 0, True)


class ModelFailed(Exception):
    """The provider failed, timed out, refused or answered what is no chat completion.

    ``retryable``: asking again may help (5xx, 429, connection); nothing was charged for certain.
    The text is for logs, never for the user.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class ChatModel(Protocol):
    """One chat completion per call; no hidden retries (the caller counts every call)."""

    async def complete(self, request: ChatRequest, *, timeout: float) -> ChatReply:
        """Raise ``ModelFailed`` for anything but a completion."""
        ...

    async def close(self) -> None: ...


# --- the tools ------------------------------------------------------------------------------------


class ToolOutcome(msgspec.Struct, frozen=True):
    """What came back. ``result_json``: the structured content, else ``{"text": …}``."""

    result_json: str = ""
    failure: ToolFailure | None = None
    message: str = ""  # the tool's own words; untrusted, bounded
    duration_ms: int = 0


class ToolProvider(Protocol):
    """MCP servers behind one interface."""

    async def schemas(self) -> Mapping[str, OfferedTool]:
        """Catalogue tool name → description and input schema of every tool that can be reached."""
        ...

    async def call(
        self, tool: ToolContract, arguments_json: str, *, idempotency_key: str, timeout: float
    ) -> ToolOutcome:
        """Never raises but ``CancelledError``; the key travels in ``_meta`` as
        ``turnfence/idempotency-key`` (and in ``pass_key_as``, which the caller has put into the
        arguments already)."""
        ...

    async def close(self) -> None: ...


# --- the knowledge --------------------------------------------------------------------------------


class Passage(msgspec.Struct, frozen=True):
    title: str
    location: str
    excerpt: str


class KnowledgeUnavailable(Exception):
    """The knowledge base could not be searched."""


class KnowledgeBase(Protocol):
    async def search(self, query: str, *, limit: int, timeout: float) -> Sequence[Passage]:
        """Best first; empty when nothing matches. Raises ``KnowledgeUnavailable``."""
        ...

    async def close(self) -> None: ...


# --- the state service ----------------------------------------------------------------------------


class StateStore(Protocol):
    """The state service as one turn sees it. Every method raises ``turnfence.errors.TurnfenceError``
    with the reason the service gave (STATE_FENCED is caught as itself), STATE_UNAVAILABLE when it
    cannot be reached within ``timeout`` seconds. All are safe to repeat with the same identity."""

    async def begin_turn(self, request: r.BeginTurnRequest, *, timeout: float) -> r.BeginTurnResponse: ...

    async def open_node(self, request: r.OpenNodeRequest, *, timeout: float) -> r.OpenNodeResponse: ...

    async def flush(self, request: r.FlushRequest, *, timeout: float) -> r.FlushResponse: ...

    async def register_write(
        self, request: r.RegisterWriteRequest, *, timeout: float
    ) -> r.RegisterWriteResponse: ...

    async def settle_calls(
        self, request: r.SettleCallsRequest, *, timeout: float
    ) -> r.SettleCallsResponse: ...

    async def read_payload(self, request: r.ReadPayloadRequest, *, timeout: float) -> bytes: ...

    async def persist_turn(
        self, request: r.PersistTurnRequest, *, timeout: float
    ) -> r.PersistTurnResponse: ...

    async def renew_lease(self, request: r.RenewLeaseRequest, *, timeout: float) -> r.RenewLeaseResponse: ...

    async def abandon_turn(
        self, request: r.AbandonTurnRequest, *, timeout: float
    ) -> r.AbandonTurnResponse: ...

    async def get_run(self, request: r.GetRunRequest, *, timeout: float) -> r.Run: ...

    def watch_events(
        self, request: r.WatchEventsRequest, *, timeout: float
    ) -> AsyncIterator[r.TurnEvent | r.Run]:
        """Events in order, then the ended ``Run`` as the last item."""
        ...
