"""Any OpenAI-compatible chat endpoint, by the official SDK. No hidden retries: the caller counts calls.

Nothing of a prompt, a reply or the key gets into an error's text or a log.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

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


class OpenAiModel:
    """``ChatModel`` over ``base_url``; ``name`` is the model's name there."""

    def __init__(self, *, base_url: str, api_key: str, name: str, max_tokens: int | None = None) -> None:
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

        try:
            async with asyncio.timeout(timeout):
                completion = await self._client().chat.completions.create(
                    **self._body(request), timeout=timeout
                )
        except (TimeoutError, openai.APITimeoutError) as error:
            raise ModelFailed("the model endpoint timed out", retryable=True) from error
        except openai.APIStatusError as error:
            raise ModelFailed(
                f"the model endpoint answered {error.status_code}",
                retryable=error.status_code in _RETRYABLE,
            ) from error
        except openai.APIConnectionError as error:
            raise ModelFailed("the model endpoint cannot be reached", retryable=True) from error
        except (openai.OpenAIError, ValueError) as error:
            raise ModelFailed(f"the model call failed: {type(error).__name__}") from error
        return reply_of(completion, request)

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


def reply_of(completion: Any, request: ChatRequest) -> ChatReply:
    """A whole chat completion, or ``ModelFailed``: an HTML page arrives as text, a broken stream without
    a finish reason."""
    choices = getattr(completion, "choices", None)
    if not choices:
        raise ModelFailed("the endpoint's answer is no chat completion")
    choice = choices[0]
    message = choice.message
    if message is None or choice.finish_reason not in _WHOLE:
        raise ModelFailed(f"the completion is not whole: {choice.finish_reason}")
    text = message.content or ""
    calls = tuple(
        ToolCallRequest(call.id or f"call-{place}", call.function.name or "", call.function.arguments or "")
        for place, call in enumerate(message.tool_calls or ())
        if getattr(call, "function", None) is not None
    )
    return ChatReply(text, calls, _usage(completion, request, text, calls))


def _usage(
    completion: Any, request: ChatRequest, text: str, calls: tuple[ToolCallRequest, ...]
) -> TokenUsage:
    """As counted by the endpoint, else estimated and marked so."""
    usage = getattr(completion, "usage", None)
    prompt = getattr(usage, "prompt_tokens", None)
    completed = getattr(usage, "completion_tokens", None)
    if isinstance(prompt, int) and isinstance(completed, int) and prompt >= 0 and completed >= 0:
        return TokenUsage(prompt, completed)
    said = sum(len(message.content) for message in request.messages)
    answered = len(text) + sum(len(call.arguments_json) for call in calls)
    return TokenUsage(said // CHARS_PER_TOKEN + 1, answered // CHARS_PER_TOKEN + 1, estimated=True)
