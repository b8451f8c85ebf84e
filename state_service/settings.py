"""Every knob of the state service, with its unit, default and meaning (state document 6.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from state_service.conversation.stores import Rules
from state_service.conversation.sweep import Retention
from state_service.core.changes import Limits
from state_service.core.drain import Expiries
from turnfence.serving.settings import (
    PREFIX,
    Count,
    Group,
    LogSettings,
    Seconds,
    ServiceSettings,
    load,
    parse_span,
)

SpanOrZero = Annotated[float, BeforeValidator(parse_span), Field(ge=0, allow_inf_nan=False)]


class StateSettings(BaseModel):
    """``state.*``, by the specification's names. Names of that section that only the harness decides
    by are ignored here: both services are often started from one environment."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    key_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_:.-]{1,64}$")] = "g2rain:rt:"
    lease: Seconds = 30.0
    conversation_ttl: Seconds = 7 * 86_400.0  # of a conversation's keys, renewed each turn
    task_ttl_running: Seconds = 86_400.0
    task_ttl_suspended: Seconds = 7_200.0
    sentinel_gap: Seconds = 600.0  # how much earlier a suspended group's sentinel goes
    payload_done_ttl: SpanOrZero = 3_600.0  # of payloads once their nodes are done; 0: at once
    events_ttl: Seconds = 3_600.0  # of a run's events after its end
    payload_inline_max_bytes: Count = 524_288  # above: a table of its own, by pointer
    payload_redis_max_bytes: Count = 262_144  # above: not in Redis
    payload_max_bytes: Count = 4_194_304  # above: the evidence fails, with a reason
    space_field_max_bytes: Count = 65_536
    message_max_bytes: Count = 4_096
    dialogue_max: Count = 60
    records_max: Count = 20
    node_actions_max: Count = 50
    flush_max_bytes: Count = 1_048_576

    @model_validator(mode="after")
    def _ttls_fit(self) -> StateSettings:
        """A TTL that the gap makes negative would delete the sentinel (D17)."""
        for name in ("task_ttl_running", "task_ttl_suspended", "conversation_ttl"):
            if getattr(self, name) <= 2 * self.sentinel_gap:
                raise ValueError(f"{name} must be more than twice sentinel_gap")
        return self


class RedisSettings(Group):
    """How the hot store is reached (``TURNFENCE_REDIS__*``; the address is ``TURNFENCE_REDIS_URL``)."""

    timeout: Seconds = 5.0  # of one command, and of waiting for a free connection
    connections: Count = 32


class SqlSettings(Group):
    """How the cold store is reached (``TURNFENCE_SQL__*``; the address is ``TURNFENCE_SQL_URL``)."""

    timeout: Seconds = 5.0  # of one statement, and of waiting for a free connection
    connections: Count = 16


class SweeperSettings(Group):
    """How often conversations that nobody comes back to are looked after (``TURNFENCE_SWEEPER__*``)."""

    interval: Seconds = 30.0  # between two sweeps of ``serve``, give or take a fifth
    batch: Count = 100  # conversations, or rows of one kind, in one sweep


class RetentionSettings(Group):
    """How long things are kept (``TURNFENCE_RETENTION__*``, such as 365d); unset: for ever."""

    conversations: Seconds | None = None  # since the last turn; then all of it goes, as by DeleteConversation
    payloads: Seconds | None = None  # full results that were too large for their row
    traces: Seconds | None = None  # events of the runs' timelines


class Settings(ServiceSettings):
    """The state service's settings; build them with ``load_settings``."""

    state_listen: str = "127.0.0.1:7071"  # host:port (port 0: any free one) or unix:/path
    insecure: bool = False  # allow a listening address that other machines can reach, without TLS
    reflection: bool = True
    data_dir: Path = Path(".turnfence")
    redis_url: str = "embedded:"
    sql_url: str = ""  # empty: SQLite in the data directory
    redis: RedisSettings = RedisSettings()
    sql: SqlSettings = SqlSettings()
    state: StateSettings = StateSettings()
    sweeper: SweeperSettings = SweeperSettings()
    retention: RetentionSettings = RetentionSettings()
    rpcs: Count = 1000  # at once; above it a call is refused
    drain: Seconds = 10.0  # for calls under way when the process is told to stop
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

    @property
    def embedded_sql(self) -> bool:
        """Whether the cold store is the embedded default, which migrates itself."""
        return not self.sql_url

    @property
    def database_url(self) -> str:
        return self.sql_url or f"sqlite+aiosqlite:///{self.data_dir.absolute()}/turnfence.db"


def load_settings(**overrides: object) -> Settings:
    return load(Settings, **overrides)


def rules(settings: StateSettings) -> Rules:
    """The settings as the story uses them: whole milliseconds."""
    return Rules(
        lease_ms=_ms(settings.lease),
        conversation_ttl_ms=_ms(settings.conversation_ttl),
        task_ttl_running_ms=_ms(settings.task_ttl_running),
        flush_max_bytes=settings.flush_max_bytes,
        message_max_bytes=settings.message_max_bytes,
        payload_inline_max_bytes=settings.payload_inline_max_bytes,
        payload_redis_max_bytes=settings.payload_redis_max_bytes,
        payload_max_bytes=settings.payload_max_bytes,
        space_field_max_bytes=settings.space_field_max_bytes,
        limits=Limits(
            dialogue_max=settings.dialogue_max,
            records_max=settings.records_max,
            node_actions_max=settings.node_actions_max,
        ),
        expiries=Expiries(
            suspended_ms=_ms(settings.task_ttl_suspended),
            sentinel_gap_ms=_ms(settings.sentinel_gap),
            payload_done_ms=_ms(settings.payload_done_ttl),
            events_ms=_ms(settings.events_ttl),
        ),
    )


def retention(settings: RetentionSettings) -> Retention:
    """The same for the sweeper."""
    spans = (settings.conversations, settings.payloads, settings.traces)
    return Retention(*(None if span is None else _ms(span) for span in spans))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
