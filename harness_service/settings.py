"""Every knob of the harness service, with its unit, default and meaning (wire.md, Commands and settings).

How variables are written and how bad ones are named: ``turnfence.serving.settings``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from turnfence.serving.settings import (
    PREFIX,
    Count,
    Group,
    LogSettings,
    Names,
    Seconds,
    ServiceSettings,
    load,
)


class ModelSettings(Group):
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


class ReactSettings(Group):
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


class BudgetSettings(Group):
    """The server's limits of one run; a caller's budget may only lower them."""

    model_calls: Count = 100
    tool_calls: Count = 200
    tokens: Count = 1_000_000  # prompt and completion together
    payload_bytes: Count = 64 * 1024 * 1024  # of all tool results together
    deadline: Seconds = 600.0


class CollectionSettings(Group):
    """When evidence collection is saturated (lifecycle document 8); each in a row."""

    no_gain: Count = 3
    violations: Count = 3


class LimitSettings(Group):
    """How much one process takes on; above it a call is answered OVERLOADED."""

    runs: Count = 200
    runs_per_organ: Count = 50
    runs_per_user: Count = 5
    rpcs: Count = 1000  # of any kind at once
    follower_events: Annotated[int, Field(ge=8)] = 256  # waiting for one slow reader
    reader_stall: Seconds = 15.0  # a reader that takes nothing for so long is gone
    drain: Seconds = 20.0  # for running turns to end when the process is told to stop


class Settings(ServiceSettings):
    """The harness service's settings; build them with ``load_settings``."""

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
    return load(Settings, **overrides)
