"""Every knob of the harness service, with its unit, default and meaning (wire.md, Commands and settings).

All come from the environment: ``TURNFENCE_`` + the field's name, ``__`` between the parts of a nested
one (``TURNFENCE_REACT__MAX_ROUNDS``). A span is written ``500ms``, ``10s``, ``5m``, ``24h``, ``7d`` or in
ISO 8601 (``PT10M``) and is held as seconds. Settings are read once, at start-up; a bad value stops the
process with one message that names every bad variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
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


class _Group(BaseModel):
    """A nested group: a misspelt variable is an error, and an error never repeats the bad value."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ModelSettings(_Group):
    """``TURNFENCE_MODEL__*`` and, for the semantic guard, ``TURNFENCE_GUARD_MODEL__*``."""

    provider: Literal["runbook", "openai"] = "runbook"
    base_url: str = ""  # of an OpenAI-compatible endpoint
    api_key: SecretStr = SecretStr("")
    name: str = ""  # the model's name at the endpoint
    timeout: Seconds = 60.0  # of one call
    max_tokens: Count | None = None  # of one reply; None: the endpoint's own limit

    @model_validator(mode="after")
    def _complete(self) -> ModelSettings:
        missing = [part for part in ("base_url", "name") if not getattr(self, part)]
        if self.provider == "openai" and missing:
            raise ValueError(f"provider openai needs {' and '.join(missing)}")
        return self


class ReactSettings(_Group):
    """The agent loop of one node (state document 6.2)."""

    max_rounds: Count = 32
    max_no_progress_rounds: Count = 3  # in a row; then the node fails
    brief_max_chars: Count = 200  # of an argument's or result's brief
    observation_error_max_chars: Count = 1000  # of "reason, next step" as the model gets it
    observation_max_chars: Count = 16_000  # of one tool result as the model gets it


class StateSettings(BaseModel):
    """``state.*`` of state document 6.1, as far as the harness decides by them. The other names of that
    section belong to the state service, which is often started from the same environment: ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    lease: Seconds = 30.0
    heartbeat: Seconds = 10.0
    reconfirm_after: Seconds = 86_400.0  # an older approval is asked for again
    message_max_bytes: Count = 4096  # UTF-8; a longer user message is cut
    payload_max_bytes: Count = 4 * 1024 * 1024  # of one tool result
    prior_tasks_max: Count = 5
    prior_entities_max: Count = 10
    entities_max: Count = 200
    evidence_entities_max_chars: Count = 2048
    node_actions_max: Count = 50
    node_action_max_chars: Count = 200
    delegate_max_depth: Annotated[int, Field(ge=0)] = 2
    task_nodes_max: Count = 64
    flush_max_bytes: Count = 1_048_576
    write_confirm_bypass_tools: Names = ()  # catalogue names of write tools that need no approval
    call_timeout: Seconds = 10.0  # of one call to the state service

    @model_validator(mode="after")
    def _beats_before_the_lease_ends(self) -> StateSettings:
        if self.heartbeat * 2 > self.lease:
            raise ValueError("heartbeat must be at most half of lease, or one lost beat loses the turn")
        return self


class BudgetSettings(_Group):
    """The server's limits of one run; a caller's budget may only lower them."""

    model_calls: Count = 100
    tool_calls: Count = 200
    tokens: Count = 1_000_000  # prompt and completion together
    payload_bytes: Count = 64 * 1024 * 1024  # of all tool results together
    deadline: Seconds = 600.0


class CollectionSettings(_Group):
    """When evidence collection is saturated (lifecycle document 8); each in a row."""

    no_gain: Count = 3
    violations: Count = 3


class LimitSettings(_Group):
    """How much one process takes on; above it a call is answered OVERLOADED."""

    runs: Count = 200
    runs_per_organ: Count = 50
    runs_per_user: Count = 5
    rpcs: Count = 1000  # of any kind at once
    follower_events: Annotated[int, Field(ge=8)] = 256  # waiting for one slow reader
    reader_stall: Seconds = 15.0  # a reader that takes nothing for so long is gone
    drain: Seconds = 20.0  # for running turns to end when the process is told to stop


class LogSettings(_Group):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "pretty"] = "auto"  # auto: pretty on a terminal, else JSON lines


class Settings(BaseSettings):
    """The harness service's settings; build them with ``load_settings``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
    )

    harness_listen: str = "127.0.0.1:7070"  # host:port (port 0: any free one) or unix:/path
    state_target: str = "127.0.0.1:7071"  # any gRPC target
    insecure: bool = False  # allow a listening address that other machines can reach, without TLS
    reflection: bool = True
    data_dir: Path = Path(".turnfence")
    catalogue: Path | None = None  # a folder of YAML; None: the bundled one
    knowledge: Path | None = None  # a folder of Markdown; None: the bundled one
    model: ModelSettings = ModelSettings()
    guard_model: ModelSettings | None = None  # None: the same as ``model``
    react: ReactSettings = ReactSettings()
    state: StateSettings = StateSettings()
    budget: BudgetSettings = BudgetSettings()
    collection: CollectionSettings = CollectionSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    # Named so that they are refused: silence would leave a port open that its owner believes closed.
    tls: dict[str, str] | None = None
    auth: dict[str, str] | None = None

    @model_validator(mode="after")
    def _nothing_unserved(self) -> Settings:
        for name in ("tls", "auth"):
            if getattr(self, name) is not None:
                raise ValueError(f"{PREFIX}{name.upper()}__… is not served by this version")
        return self


def load_settings(**overrides: object) -> Settings:
    """Settings of the environment, with ``overrides`` (None: not overridden) above it.

    Raises ``InvalidSettings`` with one line for each bad variable; no bad value is repeated in it.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)  # type: ignore[arg-type]
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
