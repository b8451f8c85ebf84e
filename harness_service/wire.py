"""Requests of HarnessService ↔ native types. Everything a caller sends is checked here, once, before any
store is touched; all bad fields of a request are named together (wire.md, Errors)."""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from harness_service.core.catalogue import Agent, Catalogue, Skill, ToolContract
from harness_service.ports import OfferedTool
from harness_service.turn_types import TurnRequest
from turnfence import records as r
from turnfence.axes import ResumeAction, SideEffect
from turnfence.codec import to_message
from turnfence.common.v1 import axes_pb2, events_pb2, run_pb2
from turnfence.errors import FieldViolation, Reason, TurnfenceError, invalid
from turnfence.harness.v1 import harness_pb2 as pb

TEXT_MAX_BYTES = 64 * 1024
PAGE_DEFAULT, PAGE_MAX = 50, 200
DEADLINE_MAX_SECONDS = 366 * 86_400
_COUNT_MAX = 2**62  # a limit above it overflows when something is added

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LOCALE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*")
_LOCALE_MAX_CHARS = 35
_ALLOWED_CONTROLS = "\n\t"

_ACTIONS: dict[int, ResumeAction | None] = {
    axes_pb2.RESUME_ACTION_UNSPECIFIED: None,
    axes_pb2.RESUME_ACTION_REPLY: ResumeAction.REPLY,
    axes_pb2.RESUME_ACTION_CONFIRM: ResumeAction.CONFIRM,
    axes_pb2.RESUME_ACTION_REJECT: ResumeAction.REJECT,
    axes_pb2.RESUME_ACTION_CANCEL: ResumeAction.CANCEL,
}
_SIDE_EFFECTS = {
    SideEffect.NONE: axes_pb2.SIDE_EFFECT_NONE,
    SideEffect.WRITE: axes_pb2.SIDE_EFFECT_WRITE,
}
# (field, value) that a caller may send but this version does not serve.
_NOT_SERVED = (
    ("on_disconnect", axes_pb2.ON_DISCONNECT_CONTINUE, "CONTINUE"),
    ("busy_policy", axes_pb2.BUSY_POLICY_WAIT, "WAIT"),
)
_KNOWN_POLICIES: dict[str, set[int]] = {
    "on_disconnect": set(map(int, axes_pb2.OnDisconnect.values())),
    "busy_policy": set(map(int, axes_pb2.BusyPolicy.values())),
}


class Admission(msgspec.Struct, frozen=True):
    """A valid RunTurn, and what its native form no longer tells: did the caller name the conversation?"""

    turn: TurnRequest
    names_conversation: bool


def new_id() -> str:
    """128 random bits in hex."""
    return secrets.token_hex(16)


# --- requests → native ----------------------------------------------------------------------------


def admit(
    request: pb.RunTurnRequest, *, agents: Collection[str], call_deadline: float | None = None
) -> Admission:
    """The turn that a caller asks for, with ids made where it left them empty.

    ``agents``: the catalogue's keys. ``call_deadline``: seconds left of the gRPC deadline. Raises
    INVALID_REQUEST with every bad field, or NOT_SERVED naming a field that is valid but not served.
    """
    action = _ACTIONS.get(request.action)
    faults = [
        *_principal_faults(request.principal),
        *_id_faults("conversation_id", request.conversation_id),
        *_id_faults("agent_id", request.agent_id),
        *_agent_faults(request.agent_id, agents),
        *_id_faults("message_id", request.message_id),
        *_text_faults(request.text, may_be_empty=action is not None),
        *_action_faults(request.action, request.checkpoint_id),
        *_id_faults("checkpoint_id", request.checkpoint_id),
        *_budget_faults(request.budget),
        *_policy_faults(request),
        *_locale_faults(request.locale),
    ]
    _refuse(faults)
    _refuse_unserved(request)
    turn = TurnRequest(
        principal=_principal(request.principal),
        run_id=new_id(),
        conversation_id=request.conversation_id or new_id(),
        message_id=request.message_id or new_id(),
        text=request.text,
        agent_id=request.agent_id,
        action=action,
        checkpoint_id=request.checkpoint_id,
        budget=_budget(request.budget),
        call_deadline=call_deadline,
        locale=request.locale or "en",
    )
    return Admission(turn, names_conversation=bool(request.conversation_id))


def run_named(request: pb.GetRunRequest) -> r.GetRunRequest:
    """Raises INVALID_REQUEST with every bad field."""
    _refuse([*_principal_faults(request.principal), *_id_faults("run_id", request.run_id, required=True)])
    return r.GetRunRequest(
        organ_id=request.principal.organ_id, user_id=request.principal.user_id, run_id=request.run_id
    )


def _principal(message: run_pb2.Principal) -> r.Principal:
    return r.Principal(organ_id=message.organ_id, user_id=message.user_id)


def _budget(message: run_pb2.Budget) -> r.Budget:
    return r.Budget(
        model_calls=message.model_calls,
        tool_calls=message.tool_calls,
        tokens=message.tokens,
        payload_bytes=message.payload_bytes,
        deadline=message.deadline.ToMilliseconds() if message.HasField("deadline") else None,
    )


# --- the checks: each yields what is wrong with one part ------------------------------------------

Faults = Iterable[FieldViolation]


def _refuse(faults: Sequence[FieldViolation]) -> None:
    if faults:
        raise TurnfenceError(Reason.INVALID_REQUEST, violations=faults)


def _principal_faults(principal: run_pb2.Principal) -> Faults:
    yield from _id_faults("principal.organ_id", principal.organ_id, required=True)
    yield from _id_faults("principal.user_id", principal.user_id, required=True)


def _id_faults(field: str, value: str, *, required: bool = False) -> Faults:
    # Ids become Redis keys and hash tags: a brace, colon, space or `|` must never get in.
    if not value:
        if required:
            yield FieldViolation(field, "is required")
    elif not _ID.fullmatch(value):
        yield FieldViolation(field, "must be 1 to 64 characters of A-Z a-z 0-9 _ . -")


def _agent_faults(agent_id: str, agents: Collection[str]) -> Faults:
    if _ID.fullmatch(agent_id) and agent_id not in agents:
        yield FieldViolation("agent_id", "is not an agent of this deployment; ListAgents lists them")


def _text_faults(text: str, *, may_be_empty: bool) -> Faults:
    if not may_be_empty and not text.strip():
        yield FieldViolation("text", "must not be empty unless action is set")
    if len(text.encode()) > TEXT_MAX_BYTES:
        yield FieldViolation("text", f"must be at most {TEXT_MAX_BYTES} bytes of UTF-8")
    elif any(unicodedata.category(char) == "Cc" and char not in _ALLOWED_CONTROLS for char in text):
        yield FieldViolation("text", "must hold no control characters but line feed and tab")


def _action_faults(action: int, checkpoint_id: str) -> Faults:
    if action not in _ACTIONS:
        yield FieldViolation("action", f"has the unknown value {action}")
    elif _ACTIONS[action] in (ResumeAction.CONFIRM, ResumeAction.REJECT) and not checkpoint_id:
        yield FieldViolation("checkpoint_id", "is required with CONFIRM and REJECT")


def _budget_faults(budget: run_pb2.Budget) -> Faults:
    for name in ("model_calls", "tool_calls", "tokens", "payload_bytes"):
        value = getattr(budget, name)
        if not 0 <= value <= _COUNT_MAX:
            yield FieldViolation(f"budget.{name}", "must not be negative, nor overflow")
    if budget.HasField("deadline"):
        yield from _deadline_faults(budget.deadline.seconds, budget.deadline.nanos)


def _deadline_faults(seconds: int, nanos: int) -> Faults:
    if not 0 <= nanos < 1_000_000_000 or not 0 <= seconds <= DEADLINE_MAX_SECONDS:
        yield FieldViolation("budget.deadline", "must be a span between 1 ms and one year")
    elif seconds == 0 and nanos < 1_000_000:
        yield FieldViolation("budget.deadline", "must be at least 1 ms")


def _policy_faults(request: pb.RunTurnRequest) -> Faults:
    for field, known in _KNOWN_POLICIES.items():
        value = getattr(request, field)
        if value not in known:
            yield FieldViolation(field, f"has the unknown value {value}")


def _locale_faults(locale: str) -> Faults:
    if locale and (len(locale) > _LOCALE_MAX_CHARS or not _LOCALE.fullmatch(locale)):
        yield FieldViolation("locale", "must be a BCP 47 tag such as en or zh-CN")


def _refuse_unserved(request: pb.RunTurnRequest) -> None:
    for field, value, name in _NOT_SERVED:
        if getattr(request, field) == value:
            raise TurnfenceError(
                Reason.NOT_SERVED,
                message=f"{field} {name} is not served by this version.",
                metadata={"field": field},
            )


# --- native → responses ---------------------------------------------------------------------------


def events_response(events: Sequence[r.TurnEvent]) -> pb.RunTurnResponse:
    return pb.RunTurnResponse(events=[to_message(event, events_pb2.TurnEvent) for event in events])


def run_response(run: r.Run) -> pb.GetRunResponse:
    return pb.GetRunResponse(run=to_message(run, run_pb2.Run))


def agents_response(
    catalogue: Catalogue, reachable: Mapping[str, OfferedTool], request: pb.ListAgentsRequest
) -> pb.ListAgentsResponse:
    """One page of the catalogue, in its order. ``reachable``: by catalogue name, the tools whose server
    answers. Raises INVALID_REQUEST for a bad page size or token."""
    start, size = _page(request.page_size, request.page_token, len(catalogue.agents))
    agents = list(catalogue.agents.values())[start : start + size]
    skills = [catalogue.skills[key] for key in _unique(key for agent in agents for key in agent.skills)]
    tools = [catalogue.tools[name] for name in _unique(name for skill in skills for name in skill.tools)]
    following = start + size
    return pb.ListAgentsResponse(
        agents=[_agent_info(agent) for agent in agents],
        skills=[_skill_info(skill) for skill in skills],
        tools=[_tool_info(tool, reachable.get(tool.name)) for tool in tools],
        next_page_token=str(following) if following < len(catalogue.agents) else "",
    )


def _page(size: int, token: str, total: int) -> tuple[int, int]:
    """Where a page starts, and how many it holds at most."""
    if not 0 <= size <= PAGE_MAX:
        raise invalid("page_size", f"must be 1 to {PAGE_MAX}, or 0 for {PAGE_DEFAULT}")
    if token and not (token.isascii() and token.isdigit() and len(token) < 9 and 0 < int(token) < total):
        raise invalid("page_token", "is not a next_page_token of this list")
    return int(token or 0), size or PAGE_DEFAULT


def _unique(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))


def _agent_info(agent: Agent) -> pb.AgentInfo:
    return pb.AgentInfo(
        agent_id=agent.key, title=agent.title, description=agent.description, skill_keys=agent.skills
    )


def _skill_info(skill: Skill) -> pb.SkillInfo:
    return pb.SkillInfo(
        skill_key=skill.key,
        title=skill.title,
        objective=skill.objective,
        tool_names=skill.tools,
        target=skill.target,
        delegatable=skill.delegatable,
    )


def _tool_info(tool: ToolContract, offered: OfferedTool | None) -> pb.ToolInfo:
    return pb.ToolInfo(
        tool_name=tool.name,
        description=offered.description if offered else "",
        side_effect=_SIDE_EFFECTS[tool.side_effect],
        confirm=tool.is_write and tool.confirm,
        verify_tool_name=tool.verify.tool if tool.verify else "",
        available=offered is not None,
    )
