"""Logging: one JSON object a line on stderr (or readable lines on a terminal), without users' words.

What a user, a model or a tool said never gets into a log: values under the keys of ``WITHHELD`` are
replaced by their size, and a traceback shows where it went wrong, but not the exception's text, which may
quote a value (level ``debug`` shows it too). Context that is bound by ``structlog.contextvars``
(``rpc``, ``request_id``, ``run_id``, ``organ_id``) is on every line of the task that bound it.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any, TextIO

import structlog

# Keys whose values may be a user's, a model's or a tool's words, or a secret.
WITHHELD = frozenset(
    {
        "answer",
        "api_key",
        "args",
        "args_json",
        "arguments",
        "arguments_json",
        "authorization",
        "content",
        "entities",
        "messages",
        "password",
        "payload",
        "payload_json",
        "prompt",
        "query",
        "question",
        "reply",
        "request_json",
        "result",
        "result_json",
        "secret",
        "text",
        "token",
    }
)
# Loggers whose words are checked, and that may therefore say more than a warning.
OURS = ("turnfence", "harness_service", "state_service", "__main__")
_VALUE_MAX_CHARS = 2000
_FRAMES_MAX = 30

EventDict = MutableMapping[str, Any]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def configure(level: str = "info", form: str = "auto", stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library's logging alike; call once, at the process's start.

    ``form``: ``json``, ``pretty``, or ``auto`` (pretty when ``stream`` is a terminal).
    """
    out = stream or sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    pretty = form == "pretty" or (form == "auto" and out.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        withhold,
        _TracebackLines(with_text=number <= logging.DEBUG),
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=out.isatty())
        if pretty
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Other people's libraries log requests, heads and bodies below warning, whatever level is asked for.
    root.setLevel(max(number, logging.WARNING))
    for ours in OURS:
        logging.getLogger(ours).setLevel(number)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of one module."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def withhold(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Processor: replace withheld values by their size, bound the length of the others."""
    return {key: _shown(key, value) for key, value in event.items()}


def _shown(key: str, value: Any) -> Any:
    if key.lower() in WITHHELD:
        size = len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else None
        return "[withheld]" if size is None else f"[withheld: {size}]"
    if isinstance(value, Mapping):
        return {inner: _shown(str(inner), item) for inner, item in value.items()}
    if isinstance(value, (list, tuple)) and key != "exc_info":
        return [_shown("", item) for item in value]
    if isinstance(value, str) and len(value) > _VALUE_MAX_CHARS:
        return value[:_VALUE_MAX_CHARS] + "…"
    return value


class _TracebackLines:
    """Processor: ``exc_info`` → ``error`` (type names, outermost first) and ``at`` (file:line function)."""

    def __init__(self, *, with_text: bool) -> None:
        self._with_text = with_text

    def __call__(self, _logger: Any, _method: str, event: EventDict) -> EventDict:
        raised = _exception_of(event.pop("exc_info", None))
        if raised is not None:
            chain = _chain(raised)
            event["error"] = [
                f"{type(e).__name__}: {e}"[:_VALUE_MAX_CHARS] if self._with_text else type(e).__name__
                for e in chain
            ]
            event["at"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}"
                for e in chain
                for frame in traceback.extract_tb(e.__traceback__)
            ][-_FRAMES_MAX:]
        return event


def _exception_of(exc_info: Any) -> BaseException | None:
    if exc_info is True:
        return sys.exception()
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple) and isinstance(exc_info[1], BaseException):
        return exc_info[1]
    return None


def _chain(raised: BaseException) -> list[BaseException]:
    """The exception and what it was raised from, outermost first; members of a group after it."""
    chain: list[BaseException] = []
    todo: list[BaseException | None] = [raised]
    while todo:
        error = todo.pop(0)
        if error is None or error in chain:
            continue
        chain.append(error)
        if isinstance(error, BaseExceptionGroup):
            todo.extend(error.exceptions)
        todo.append(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
    return chain
