"""How both services read their settings: names, spans, and one message for all that is wrong.

All come from the environment: ``TURNFENCE_`` + the field's name, ``__`` between the parts of a nested
one (``TURNFENCE_REACT__MAX_ROUNDS``). A span is written ``500ms``, ``10s``, ``5m``, ``24h``, ``7d`` or in
ISO 8601 (``PT10M``) and is held as seconds. Settings are read once, at start-up; a bad value stops the
process with one message that names every bad variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings import SettingsError as EnvironmentUnreadable

PREFIX = "TURNFENCE_"

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_ISO = TypeAdapter(timedelta)


class InvalidSettings(Exception):
    """The environment does not make valid settings; the text names every bad variable."""


def parse_span(value: object) -> object:
    """Seconds of ``7d``, ``24h``, ``10m``, ``500ms`` or an ISO 8601 duration; numbers are seconds already."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if match := _SPAN.fullmatch(text):
        return float(match[1]) * _UNITS[match[2]]
    if text.lstrip("-+").upper().startswith("P"):
        return _ISO.validate_python(text).total_seconds()
    if text == "0":
        return 0.0
    raise ValueError("a span needs a unit: 500ms, 10s, 5m, 24h, 7d or ISO 8601 (PT10M)")


def _names(value: object) -> object:
    """``a, b`` → ("a", "b")."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return value


Seconds = Annotated[float, BeforeValidator(parse_span), Field(gt=0, allow_inf_nan=False)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]
Count = Annotated[int, Field(gt=0)]


class Group(BaseModel):
    """A nested group: a misspelt variable is an error, and an error never repeats the bad value."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ServiceSettings(BaseSettings):
    """Base of a service's settings; unknown variables belong to the other service."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
    )


S = TypeVar("S", bound=ServiceSettings)


class LogSettings(Group):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "pretty"] = "auto"  # auto: pretty on a terminal, else JSON lines


def load(kind: type[S], **overrides: object) -> S:
    """Settings of the environment, with ``overrides`` (None: not overridden) above it.

    Raises ``InvalidSettings`` with one line for each bad variable; no bad value is repeated in it.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return kind(**given)
    except ValidationError as error:
        faults = [_fault(fault) for fault in error.errors(include_input=False, include_url=False)]
        raise InvalidSettings("\n".join(faults)) from None
    except EnvironmentUnreadable as error:
        raise InvalidSettings(str(error)) from None


def _fault(fault: Mapping[str, Any]) -> str:
    """``TURNFENCE_REACT__MAX_ROUNDS: Input should be …``."""
    message = str(fault["msg"]).removeprefix("Value error, ")
    path = "__".join(str(part) for part in fault["loc"]).upper()
    return f"{PREFIX}{path}: {message}" if path else message
