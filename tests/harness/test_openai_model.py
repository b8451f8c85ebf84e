"""OpenAiModel against a stand-in endpoint on loopback: what it sends, what it makes of every answer, and that
an endpoint's faults, however odd, come out as ``ModelFailed``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from harness_service.adapters.openai_model import OpenAiModel
from harness_service.ports import (
    Briefing,
    ChatMessage,
    ChatRequest,
    ModelCall,
    ModelFailed,
    OfferedTool,
    TokenUsage,
    ToolCallRequest,
)
from tests.model_server import Fault, ModelServer, Reply
from tests.raw_model_endpoint import RawEndpoint, http, raw_endpoint
from tests.servers import free_port

KEY = "sk-test"
PROMPT = "how full is it now?"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"mode": {"type": "string"}}}
TOOL = OfferedTool("ops__disk_usage", "How full it is.", {"type": "object", "properties": {}})


def request(call: ModelCall = ModelCall.SYSTEM_ANSWER, **more: Any) -> ChatRequest:
    return ChatRequest(call=call, messages=(ChatMessage("user", PROMPT),), briefing=Briefing(), **more)


@asynccontextmanager
async def model_at(base_url: str, **options: Any) -> AsyncIterator[OpenAiModel]:
    model = OpenAiModel(base_url=base_url, api_key=KEY, name="stand-in", **options)
    try:
        yield model
    finally:
        await model.close()


@asynccontextmanager
async def saying(**replies: list[Reply]) -> AsyncIterator[tuple[OpenAiModel, ModelServer]]:
    """A model whose endpoint says this."""
    async with ModelServer(replies) as server, model_at(server.base_url) as model:
        yield model, server


@asynccontextmanager
async def raw(answer: bytes | None) -> AsyncIterator[tuple[OpenAiModel, RawEndpoint]]:
    """A model whose endpoint answers with these bytes."""
    async with raw_endpoint(answer) as endpoint, model_at(endpoint.base_url) as model:
        yield model, endpoint


def completion(message: Any, finish: Any = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], **more}


async def failure_of(model: OpenAiModel, timeout: float = 5.0) -> ModelFailed:
    with pytest.raises(ModelFailed) as caught:
        await model.complete(request(), timeout=timeout)
    return caught.value


# --- replies --------------------------------------------------------------------------------------


async def test_a_text_reply_comes_back_as_it_was_said_with_its_usage() -> None:
    async with saying(text=["磁盘满了"]) as (model, _):
        reply = await model.complete(request(), timeout=5)
    assert (reply.text, reply.tool_calls) == ("磁盘满了", ())
    assert reply.usage == TokenUsage(10, 5, estimated=False)


async def test_tool_calls_come_back_in_order_with_their_arguments_as_text() -> None:
    async with saying(step=[[("ops__disk_usage", {"path": "/"}), ("ops__disk_usage", "{not json")]]) as (
        model,
        server,
    ):
        reply = await model.complete(request(ModelCall.NODE_STEP, tools=(TOOL,)), timeout=5)
    assert reply.tool_calls == (
        ToolCallRequest("call-1-0", "ops__disk_usage", '{"path": "/"}'),
        ToolCallRequest("call-1-1", "ops__disk_usage", "{not json"),
    )
    (body,) = server.requests
    function = {"name": TOOL.name, "description": TOOL.description, "parameters": TOOL.input_schema}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert "response_format" not in body


@pytest.mark.parametrize("call", [call for call in ModelCall if not call.value.endswith(("step", "answer"))])
async def test_a_structured_call_names_its_schema_strictly(call: ModelCall) -> None:
    decided: list[Reply] = [{"mode": "NEW_TASK"}]
    async with saying(**{call.value: decided}) as (model, server):
        reply = await model.complete(request(call, response_schema=SCHEMA), timeout=5)
    assert json.loads(reply.text) == {"mode": "NEW_TASK"}
    (body,) = server.requests
    named = {"name": call.value, "strict": True, "schema": SCHEMA}
    assert body["response_format"] == {"type": "json_schema", "json_schema": named}
    assert "tools" not in body


async def test_a_tool_exchange_is_written_as_the_endpoint_reads_it() -> None:
    asked = ToolCallRequest("c1", TOOL.name, "")
    messages = (
        ChatMessage("system", "be kind"),
        ChatMessage("assistant", "", tool_calls=(asked,)),
        ChatMessage("tool", '{"status":"ok"}', tool_call_id="c1"),
    )
    async with saying(text=["x"]) as (model, server):
        await model.complete(ChatRequest(ModelCall.NODE_STEP, messages, Briefing()), timeout=5)
    (body,) = server.requests
    assert body["model"] == "stand-in"
    call = {"id": "c1", "type": "function", "function": {"name": TOOL.name, "arguments": "{}"}}
    assert body["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"status":"ok"}', "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("asked", "configured", "sent"), [(None, None, None), (None, 7, 7), (5, None, 5), (5, 7, 5)]
)
async def test_the_length_of_a_reply_is_limited_by_the_call_else_by_the_setting(
    asked: int | None, configured: int | None, sent: int | None
) -> None:
    async with (
        ModelServer({"text": ["x"]}) as server,
        model_at(server.base_url, max_tokens=configured) as model,
    ):
        await model.complete(request(max_tokens=asked), timeout=5)
    assert server.requests[0].get("max_tokens") == sent


USAGES: Mapping[str, tuple[Any, TokenUsage]] = {
    "counted": ({"prompt_tokens": 0, "completion_tokens": 3}, TokenUsage(0, 3)),
    "none": (None, TokenUsage(5, 2, estimated=True)),
    "empty": ({}, TokenUsage(5, 2, estimated=True)),
    "no_object": (7, TokenUsage(5, 2, estimated=True)),
    "half": ({"prompt_tokens": 5}, TokenUsage(5, 2, estimated=True)),
    "negative": ({"prompt_tokens": -1, "completion_tokens": 3}, TokenUsage(5, 2, estimated=True)),
    "boolean": ({"prompt_tokens": True, "completion_tokens": 3}, TokenUsage(5, 2, estimated=True)),
    "beyond_any_counter": (
        {"prompt_tokens": 10**30, "completion_tokens": 3},
        TokenUsage(5, 2, estimated=True),
    ),
}


@pytest.mark.parametrize(("usage", "expected"), USAGES.values(), ids=USAGES.keys())
async def test_what_the_endpoint_does_not_count_is_estimated_and_marked_so(
    usage: Any, expected: TokenUsage
) -> None:
    body = json.dumps(completion({"content": "hello"}, usage=usage)).encode()
    async with raw(http(body)) as (model, _):
        assert (await model.complete(request(), timeout=5)).usage == expected


async def test_without_usage_a_tool_calls_arguments_count_as_answered() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": '"' + "x" * 398 + '"'}}
    body = json.dumps(completion({"content": None, "tool_calls": [call]}, "tool_calls")).encode()
    async with raw(http(body)) as (model, _):
        assert (await model.complete(request(), timeout=5)).usage == TokenUsage(5, 101, estimated=True)


async def test_the_stand_ins_reply_without_usage_is_estimated() -> None:
    async with saying(text=[Fault(no_usage=True, text="hello")]) as (model, _):
        reply = await model.complete(request(), timeout=5)
    assert (reply.text, reply.usage.estimated) == ("hello", True)


# --- faults ---------------------------------------------------------------------------------------

FAULTS: Mapping[str, tuple[Fault, str, bool]] = {
    **{
        f"status_{code}": (Fault(status=code), f"answered {code}", False)
        for code in (400, 401, 403, 404, 422)
    },
    **{
        f"status_{code}": (Fault(status=code), f"answered {code}", True) for code in (408, 409, 429, 500, 503)
    },
    "html": (Fault(html=True), "no chat completion", False),
    "hang": (Fault(hang=True), "timed out", True),
    "drop": (Fault(drop=True), "cannot be reached", True),
}


@pytest.mark.parametrize(("fault", "words", "retryable"), FAULTS.values(), ids=FAULTS.keys())
async def test_a_fault_is_one_request_and_a_failure_that_says_whether_to_ask_again(
    fault: Fault, words: str, retryable: bool
) -> None:
    async with saying(text=[fault]) as (model, server):
        failure = await failure_of(model, timeout=0.3 if fault.hang else 5)
        assert len(server.requests) == 1  # no hidden retries: the caller counts calls
    assert words in str(failure)
    assert failure.retryable is retryable


async def test_an_endpoint_that_is_not_there_is_worth_another_try() -> None:
    async with model_at(f"http://127.0.0.1:{free_port()}/v1") as model:
        failure = await failure_of(model)
    assert (str(failure), failure.retryable) == ("the model endpoint cannot be reached", True)


async def test_an_answer_that_breaks_off_is_worth_another_try() -> None:
    async with raw(http(b'{"choices": [', length=500)) as (model, _):
        failure = await failure_of(model)
    assert (str(failure), failure.retryable) == ("the model endpoint cannot be reached", True)


def calling(**call: Any) -> dict[str, Any]:
    return completion({"content": None, "tool_calls": [{"id": "a", **call}]}, "tool_calls")


NO_COMPLETIONS: Mapping[str, Any] = {
    "nothing": b"",
    "broken_json": b'{"choices": [',
    "no_utf8": b"\xff\xfe",
    "half_a_character": b'{"choices":[{"message":{"content":"\\ud800"},"finish_reason":"stop"}]}',
    "nested_too_deep": b'{"x": ' + b"[" * 100_000,
    "null": None,
    "number": 7,
    "text": "hello",
    "list": [1],
    "empty": {},
    "an_error_with_200": {"error": {"message": "boom"}},
    "null_choices": {"choices": None},
    "empty_choices": {"choices": []},
    "text_choices": {"choices": "abc"},
    "object_choices": {"choices": {"0": 1}},
    "null_choice": {"choices": [None]},
    "empty_choice": {"choices": [{}]},
    "null_message": completion(None),
    "text_message": completion("hello"),
    "number_content": completion({"content": 7}),
    "parts_as_content": completion({"content": [{"type": "text", "text": "a"}]}),
    "list_as_finish": completion({"content": "a"}, ["stop"]),
    "number_as_calls": completion({"tool_calls": 7}, "tool_calls"),
    "null_call": completion({"tool_calls": [None]}, "tool_calls"),
    "object_arguments": calling(function={"name": "f", "arguments": {"a": 1}}),
    "number_name": calling(function={"name": 1, "arguments": "{}"}),
}


@pytest.mark.parametrize("answer", NO_COMPLETIONS.values(), ids=NO_COMPLETIONS.keys())
async def test_what_is_no_chat_completion_is_a_failure_and_never_an_answer(answer: Any) -> None:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    async with raw(http(body)) as (model, _):
        failure = await failure_of(model)
    assert (str(failure), failure.retryable) == ("the endpoint's answer is no chat completion", False)


UNFINISHED: Mapping[str, tuple[Any, str]] = {
    "cut_at_the_limit": (completion({"content": "half an"}, "length"), "not whole: length"),
    "filtered": (completion({"content": "half"}, "content_filter"), "not whole: content_filter"),
    "broken_stream": (completion({"content": "half"}, None), "not whole: no known finish reason"),
    "unheard_of": (completion({"content": "half"}, PROMPT), "not whole: no known finish reason"),
    "refused": (completion({"content": None, "refusal": PROMPT}), "the model refused"),
}


@pytest.mark.parametrize(("answer", "words"), UNFINISHED.values(), ids=UNFINISHED.keys())
async def test_half_an_answer_and_a_refusal_are_failures(answer: Any, words: str) -> None:
    async with raw(http(json.dumps(answer).encode())) as (model, _):
        failure = await failure_of(model)
    assert str(failure).endswith(words)
    assert not failure.retryable


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"id": None, "function": {"name": "f", "arguments": "{}"}}, [("call-0", "f", "{}")]),
        ({"function": {"name": None, "arguments": None}}, [("a", "", "")]),
        ({"function": None, "type": "custom"}, []),
    ],
    ids=["no_id", "no_name", "no_function"],
)
async def test_a_tool_call_with_holes_is_left_for_the_caller_to_refuse(
    call: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    async with raw(http(json.dumps(calling(**call)).encode())) as (model, _):
        reply = await model.complete(request(), timeout=5)
    assert [(c.call_id, c.name, c.arguments_json) for c in reply.tool_calls] == expected


async def test_what_cannot_be_written_is_a_failure_before_anything_is_sent() -> None:
    async with saying(text=["x"]) as (model, server):
        odd = ChatRequest(ModelCall.SYSTEM_ANSWER, (ChatMessage("user", "\ud800"),), Briefing())
        with pytest.raises(ModelFailed):
            await model.complete(odd, timeout=5)
    assert server.requests == []


# --- time and cancellation ------------------------------------------------------------------------


async def test_an_answer_that_trickles_does_not_outlive_the_time_limit() -> None:
    """Each byte comes in time; the whole does not."""
    stopped = asyncio.Event()

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(http(b"", length=100_000))
        try:
            while not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)  # the pace of a slow endpoint
        except ConnectionError:
            pass
        finally:
            stopped.set()
            writer.close()

    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    async with model_at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1") as model:
        async with asyncio.timeout(3):
            failure = await failure_of(model, timeout=0.4)
            await stopped.wait()
    server.close()
    assert (str(failure), failure.retryable) == ("the model endpoint timed out", True)


@pytest.mark.parametrize("how", ["cancel", "time_limit"])
async def test_a_call_that_is_given_up_closes_its_connection_at_once(how: str) -> None:
    async with raw(None) as (model, endpoint):
        call = asyncio.create_task(model.complete(request(), timeout=60 if how == "cancel" else 0.3))
        async with asyncio.timeout(5):
            await endpoint.asked.wait()
            if how == "cancel":
                call.cancel()
            await asyncio.wait([call])
            await endpoint.hung_up.wait()
        assert call.cancelled() is (how == "cancel")
        if how == "time_limit":
            assert isinstance(call.exception(), ModelFailed)


async def test_closing_a_model_that_was_never_asked_is_nothing() -> None:
    await OpenAiModel(base_url="http://127.0.0.1:1/v1", api_key=KEY, name="x").close()
