"""OpenAiModel keeps the API key and the prompt to itself: whatever the endpoint says back, they are in no
error, no traceback and no line of the service's log."""

from __future__ import annotations

import io
import json
import logging
import traceback
from collections.abc import Iterator, Mapping

import pytest
import structlog

from harness_service.adapters.openai_model import OpenAiModel
from harness_service.ports import Briefing, ChatMessage, ChatRequest, ModelCall, ModelFailed
from tests.raw_model_endpoint import http, raw_endpoint
from turnfence.serving import logs

KEY = "sk-canary-51c7"
PROMPT = "prompt-canary-9d02"
REQUEST = ChatRequest(ModelCall.SYSTEM_ANSWER, (ChatMessage("user", PROMPT),), Briefing())
ANSWER = {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}
ECHO = json.dumps({"error": {"message": f"no key {KEY} for {PROMPT}", "code": KEY}}).encode()


@pytest.fixture
def service_log() -> Iterator[io.StringIO]:
    """What the service logs at its most talkative level."""
    root, before = logging.getLogger(), structlog.get_config()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in logs.OURS}
    level = root.level
    stream = io.StringIO()
    logs.configure("debug", "json", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)
    structlog.configure(**before)


ECHOES: Mapping[str, bytes] = {
    "401": http(ECHO, status=401),
    "500": http(ECHO, status=500),
    "html": http(ECHO, kind="text/html"),
    "no_completion": http(ECHO),
    "broken_off": http(ECHO, length=5000),
}
# Answers that an HTTP library quotes in its own debug lines.
QUOTED: Mapping[str, bytes] = {
    "no_http": f"{KEY} {PROMPT}\r\n\r\n".encode(),
    "header": f"HTTP/1.1 401 X\r\nX-Echo: {KEY} {PROMPT}\r\nContent-Length: 0\r\n\r\n".encode(),
}


async def failure_at(answer: bytes) -> ModelFailed:
    async with raw_endpoint(answer) as endpoint:
        model = OpenAiModel(base_url=endpoint.base_url, api_key=KEY, name="x")
        with pytest.raises(ModelFailed) as caught:
            await model.complete(REQUEST, timeout=5)
        await model.close()
    # Both were sent: else their absence elsewhere would say nothing.
    assert f"authorization: bearer {KEY}".encode() in endpoint.received.lower()
    assert PROMPT.encode() in endpoint.received
    return caught.value


def secrets_in(text: str) -> list[str]:
    return [secret for secret in (KEY, PROMPT) if secret in text]


@pytest.mark.parametrize("answer", [*ECHOES.values(), *QUOTED.values()], ids=[*ECHOES, *QUOTED])
async def test_neither_the_key_nor_the_prompt_gets_into_an_error_or_its_traceback(answer: bytes) -> None:
    failure = await failure_at(answer)
    assert secrets_in(f"{failure!r} {failure}" + "".join(traceback.format_exception(failure))) == []


@pytest.mark.parametrize("answer", ECHOES.values(), ids=ECHOES.keys())
async def test_neither_the_key_nor_the_prompt_gets_into_the_log(
    answer: bytes, service_log: io.StringIO
) -> None:
    failure = await failure_at(answer)
    logs.get_logger("test").error("model failed", detail=str(failure), exc_info=failure)
    assert "model failed" in service_log.getvalue()
    assert secrets_in(service_log.getvalue()) == []


@pytest.mark.parametrize("answer", QUOTED.values(), ids=QUOTED.keys())
async def test_what_the_http_library_quotes_does_not_get_into_the_log(
    answer: bytes, service_log: io.StringIO
) -> None:
    await failure_at(answer)
    assert secrets_in(service_log.getvalue()) == []


@pytest.mark.parametrize(
    "key", [f"{KEY}\x00x", f"{KEY}\nx", f"{KEY}密钥"], ids=["zero", "newline", "chinese"]
)
def test_a_key_that_no_header_can_carry_is_refused_without_being_quoted(key: str) -> None:
    with pytest.raises(ValueError, match="API key") as caught:
        OpenAiModel(base_url="http://127.0.0.1:1/v1", api_key=key, name="x")
    assert secrets_in("".join(traceback.format_exception_only(caught.value))) == []


@pytest.mark.parametrize(("key", "sent"), [(f"{KEY}\n", KEY), ("", "none")], ids=["from_a_file", "no_key"])
async def test_a_keys_surrounding_space_is_not_sent_and_no_key_is_needed(key: str, sent: str) -> None:
    async with raw_endpoint(http(json.dumps(ANSWER).encode())) as endpoint:
        model = OpenAiModel(base_url=endpoint.base_url, api_key=key, name="x")
        assert (await model.complete(REQUEST, timeout=5)).text == "x"
        await model.close()
    assert f"authorization: bearer {sent}\r\n".encode() in endpoint.received.lower()
