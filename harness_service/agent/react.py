"""The ReAct loop of one node: flush → model → its calls, in order (state document 4).

A model reply is data. What it asks for that is not allowed is refused with "reason, next step" and
counted; the loop ends by a draft, a question, a controlled stop, or by standing still too long.
"""

from __future__ import annotations

import msgspec

from harness_service.agent import builtins, prompts, reads, writes
from harness_service.agent.builtins import DraftInvalid, Finished
from harness_service.agent.model_calls import ask
from harness_service.agent.node_run import NodeRun, Observed
from harness_service.core import collection as collections
from harness_service.core import draft as drafts
from harness_service.core.arguments import ArgumentsRefused, PreparedCall, offered_schema, prepare
from harness_service.core.catalogue import ToolContract
from harness_service.core.collection import Permission
from harness_service.ports import (
    ChatMessage,
    ChatReply,
    ChatRequest,
    ModelCall,
    OfferedTool,
    ToolCallRequest,
)
from turnfence import records as r
from turnfence.axes import TraceEventStatus, TraceEventType, TracePhase


class Stopped(msgspec.Struct, frozen=True):
    """The loop was stopped without a draft: what was learned so far is all there is."""

    why: str


NodeEnd = Finished | DraftInvalid | Stopped | r.TaskCheckpoint


async def react(run: NodeRun) -> NodeEnd:
    """Run the node's rounds until it ends. Raises what ends the whole run."""
    settings = run.scope.deps.settings.react
    messages = await prompts.node_messages(run)
    tools = await offered_tools(run)
    while run.round < settings.max_rounds:
        run.next_round()
        await run.scope.flush()
        reply = await _model_step(run, messages, tools)
        end = await _act(run, reply, messages)
        if end is not None:
            return end
        if run.no_progress > settings.max_no_progress_rounds:
            return Stopped("no progress")
    return Stopped("too many rounds")


async def offered_tools(run: NodeRun) -> tuple[OfferedTool, ...]:
    """The skill's tools that can be reached, without what the platform fills in, and the built-ins."""
    schemas = await run.scope.schemas()
    business = [
        OfferedTool(
            wire_name, schemas[tool.name].description, offered_schema(tool, schemas[tool.name].input_schema)
        )
        for wire_name, tool in run.tools.items()
        if tool.name in schemas
    ]
    return (*business, *builtins.OFFERED.values())


async def _model_step(run: NodeRun, messages: list[ChatMessage], tools: tuple[OfferedTool, ...]) -> ChatReply:
    started = run.scope.now()
    request = ChatRequest(
        call=ModelCall.NODE_STEP,
        messages=tuple(messages),
        briefing=prompts.node_briefing(run),
        tools=tools,
    )
    reply = await ask(run.scope, request, step=True)
    run.put_space(tokens=run.space.tokens + reply.usage.prompt_tokens + reply.usage.completion_tokens)
    run.scope.trace(
        TraceEventType.AGENT_MODEL_STEP,
        TracePhase.AGENT,
        started_at=started,
        node_id=run.node.node_id,
        round=str(run.round),
        tool_calls=str(len(reply.tool_calls)),
    )
    return reply


async def _act(run: NodeRun, reply: ChatReply, messages: list[ChatMessage]) -> NodeEnd | None:
    """Carry one reply out. None: the loop goes on."""
    if reply.text.strip():
        run.say(reply.text)
    if not reply.tool_calls:
        return _only_text(run, reply, messages)
    messages.append(ChatMessage("assistant", reply.text, tool_calls=reply.tool_calls))
    gate = _EvidenceGate(run)
    progressed = False
    for place, call in enumerate(reply.tool_calls):
        outcome = await _one_call(run, call, gate)
        if not isinstance(outcome, Observed):
            _defer(run, reply.tool_calls[place + 1 :])
            return outcome
        progressed = progressed or outcome.progress
        run.observe(outcome, _arguments(call))
        limit = run.scope.deps.settings.react.observation_max_chars
        messages.append(prompts.tool_message(outcome, call.call_id, limit))
    run.no_progress = 0 if progressed else run.no_progress + 1
    return None


def _only_text(run: NodeRun, reply: ChatReply, messages: list[ChatMessage]) -> NodeEnd | None:
    """Text that is a draft ends the node like a finish; other text is no progress."""
    try:
        draft = drafts.parse_draft(reply.text)
    except drafts.InvalidDraft:
        run.no_progress += 1
        messages.append(ChatMessage("assistant", reply.text))
        messages.append(ChatMessage("user", "Go on by calling a tool; end with builtin_finish."))
        return None
    finished = builtins.call_builtin(
        run, builtins.FINISH, msgspec.json.encode({"draft": msgspec.to_builtins(draft)}).decode(), ""
    )
    if isinstance(finished, Observed):
        run.no_progress += 1
        messages.append(ChatMessage("assistant", reply.text))
        messages.append(ChatMessage("user", f"{finished.reason}. {finished.next_step}"))
        return None
    return finished


def _defer(run: NodeRun, calls: tuple[ToolCallRequest, ...]) -> None:
    """Calls behind one that ended the round were not made; the history says so."""
    for call in calls:
        run.act("deferred", call.name, "", "not executed: the step waits", call.call_id)


def _arguments(call: ToolCallRequest) -> object:
    try:
        return msgspec.json.decode(call.arguments_json) if call.arguments_json else {}
    except msgspec.DecodeError:
        return {}


async def _one_call(
    run: NodeRun, call: ToolCallRequest, gate: _EvidenceGate
) -> Observed | Finished | DraftInvalid | Stopped | r.TaskCheckpoint:
    run.scope.check_active()
    if call.name in builtins.OFFERED:
        return builtins.call_builtin(run, call.name, call.arguments_json, call.call_id)
    tool = run.tools.get(call.name)
    schemas = await run.scope.schemas()
    if tool is None or tool.name not in schemas:
        return run.refuse(
            call.name[:128],
            "",
            "there is no such tool in this step" if tool is None else "this tool cannot be reached now",
            "use one of the tools you were given",
            call.call_id,
        )
    if not tool.is_write:
        barred = gate.ask(call)
        if barred is not None:
            return barred
    try:
        prepared = prepare(
            tool,
            schemas[tool.name].input_schema,
            call.arguments_json,
            await run.known_values(),
            platform_values(run),
        )
    except ArgumentsRefused as refused:
        return run.refuse(tool.name, "", refused.reason, refused.next_step, call.call_id)
    if tool.is_write:
        return await _write(run, tool, prepared, call)
    return await reads.call_read_tool(run, tool, prepared, call.call_id)


async def _write(
    run: NodeRun, tool: ToolContract, prepared: PreparedCall, call: ToolCallRequest
) -> Observed | r.TaskCheckpoint:
    outcome = await writes.request_write(run, tool, prepared, call.call_id)
    if isinstance(outcome, r.TaskCheckpoint):
        run.act("deferred", tool.name, "", "waits for the user's approval", call.call_id)
    return outcome


def platform_values(run: NodeRun) -> dict[str, str]:
    principal = run.scope.request.principal
    return {
        "user_id": principal.user_id,
        "organ_id": principal.organ_id,
        "conversation_id": run.scope.turn.conversation_id,
        "run_id": run.scope.request.run_id,
    }


class _EvidenceGate:
    """Whether this reply may ask for evidence: judged once a reply (lifecycle document 8)."""

    def __init__(self, run: NodeRun) -> None:
        self._run = run
        self._permission: Permission | None = None
        self._unrated: tuple[str, ...] = ()

    def ask(self, call: ToolCallRequest) -> Observed | Stopped | None:
        """None: go ahead."""
        if self._permission is None:
            self._judge()
        run = self._run
        if self._permission is Permission.CONTROLLED_STOP:
            return Stopped("asked for evidence after STOP_REQUIRED")
        if self._permission is Permission.STOP_REQUIRED:
            return run.refuse(
                call.name,
                "",
                "no more evidence may be collected",
                f"STOP_REQUIRED: finish now with {builtins.FINISH}",
                call.call_id,
            )
        if self._unrated:
            return run.refuse(
                call.name,
                "",
                f"the results {', '.join(self._unrated)} were not judged yet",
                f"judge them with {builtins.REPORT_PROGRESS} first",
                call.call_id,
            )
        return None

    def _judge(self) -> None:
        run = self._run
        self._unrated = run.collection.unrated
        if self._unrated:
            run.put_collection(collections.with_violation(run.collection, run.thresholds))
        step = collections.ask_for_evidence(run.collection)
        if step.collection is not run.collection:
            run.put_collection(step.collection)
        self._permission = step.permission
        if step.permission is not Permission.ALLOWED:
            run.scope.trace(
                TraceEventType.TOOL_REQUEST_REJECTED,
                TracePhase.AGENT,
                TraceEventStatus.REJECTED,
                node_id=run.node.node_id,
                permission=step.permission.value,
            )
