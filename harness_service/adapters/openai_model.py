"""Any OpenAI-compatible chat endpoint, by the official SDK. No hidden retries: the caller counts calls.

Nothing of a prompt, a reply or the key gets into an error's text or a log.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from harness_service.ports import (
    ChatMessage,
    ChatReply,
    ChatRequest,
    ModelFailed,
    TokenUsage,
    ToolCallRequest,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CHARS_PER_TOKEN = 4  # for estimating, where an endpoint does not count
_RETRYABLE = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_WHOLE = frozenset({"stop", "tool_calls", "function_call"})
_CUT = frozenset({"length", "content_filter"})


class OpenAiModel:
    """``ChatModel`` over ``base_url``; ``name`` is the model's name there. ValueError: a key that no HTTP
    header can carry; the HTTP library would quote it in its error."""

    def __init__(self, *, base_url: str, api_key: str, name: str, max_tokens: int | None = None) -> None:
        api_key = api_key.strip()  # a key read from a file ends in a line's end
        if not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the model's API key has characters that cannot be sent in a header")
        self._base_url = base_url
        self._api_key = api_key
        self._name = name
        self._max_tokens = max_tokens
        self._made: AsyncOpenAI | None = None

    def _client(self) -> AsyncOpenAI:
        if self._made is None:
            from openai import AsyncOpenAI  # 1.8 s to import: not before it is needed

            self._made = AsyncOpenAI(base_url=self._base_url, api_key=self._api_key or "none", max_retries=0)
        return self._made

    async def complete(self, request: ChatRequest, *, timeout: float) -> ChatReply:
        import openai

        # ``from None``: what these errors say of the request and the answer must not reach a log.
        try:
            async with asyncio.timeout(timeout):
                answer = await self._client().chat.completions.with_raw_response.create(
                    **self._body(request), timeout=timeout
                )
        except (TimeoutError, openai.APITimeoutError):
            raise ModelFailed("the model endpoint timed out", retryable=True) from None
        except openai.APIStatusError as error:
            raise ModelFailed(
                f"the model endpoint answered {error.status_code}",
                retryable=error.status_code in _RETRYABLE,
            ) from None
        except openai.APIConnectionError:
            raise ModelFailed("the model endpoint cannot be reached", retryable=True) from None
        except (openai.OpenAIError, ValueError) as error:
            raise ModelFailed(f"the model call failed: {type(error).__name__}") from None
        return reply_of(answer.content, request)

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._name,
            "messages": [_message(message) for message in request.messages],
        }
        if request.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.input_schema,
                    },
                }
                for tool in request.tools
            ]
        if request.response_schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {
                    "name": request.call.value,
                    "strict": True,
                    "schema": request.response_schema,
                },
            }
        limit = request.max_tokens or self._max_tokens
        if limit is not None:
            body["max_tokens"] = limit
        return body

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()


def _message(message: ChatMessage) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json or "{}"},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body


# --- what an endpoint answers, as far as it is used; the SDK checks no types -----------------------


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: msgspec.Raw = msgspec.Raw(b"null")


_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens
    completion_tokens: _Tokens


def reply_of(body: bytes, request: ChatRequest) -> ChatReply:
    """A whole chat completion, or ``ModelFailed``: also for an HTML page, for a refusal, and for a broken
    stream, which has no finish reason."""
    try:
        completion = msgspec.json.decode(body, type=_Completion)
    except (ValueError, RecursionError):
        raise ModelFailed("the endpoint's answer is no chat completion") from None
    choice = completion.choices[0]
    if choice.finish_reason not in _WHOLE:
        reason = choice.finish_reason if choice.finish_reason in _CUT else "no known finish reason"
        raise ModelFailed(f"the completion is not whole: {reason}")
    text = choice.message.content or ""
    calls = tuple(
        ToolCallRequest(call.id or f"call-{place}", call.function.name or "", call.function.arguments or "")
        for place, call in enumerate(choice.message.tool_calls or ())
        if call.function is not None
    )
    if choice.message.refusal and not text and not calls:
        raise ModelFailed("the model refused")
    return ChatReply(text, calls, _usage(completion.usage, request, text, calls))


def _usage(
    usage: msgspec.Raw, request: ChatRequest, text: str, calls: tuple[ToolCallRequest, ...]
) -> TokenUsage:
    """As counted by the endpoint, else estimated and marked so."""
    try:
        counted = msgspec.json.decode(usage, type=_Usage)
    except ValueError:
        said = sum(len(message.content) for message in request.messages)
        answered = len(text) + sum(len(call.arguments_json) for call in calls)
        return TokenUsage(said // CHARS_PER_TOKEN + 1, answered // CHARS_PER_TOKEN + 1, estimated=True)
    return TokenUsage(counted.prompt_tokens, counted.completion_tokens)
