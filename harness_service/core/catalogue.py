"""The agent catalogue: which agents, skills and tools exist (design: catalogue.md)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from turnfence.axes import SideEffect


class Share(StrEnum):
    """Where a node's output is published when the node is done (state document 5.10)."""

    TASK = "TASK"
    SESSION = "SESSION"


class OnToolError(StrEnum):
    """What a tool error says about a write: not applied (FAILED), or perhaps applied (UNKNOWN)."""

    FAILED = "failed"
    UNKNOWN = "unknown"


class McpServer(msgspec.Struct, frozen=True):
    """``command`` for stdio, or ``url`` for streamable HTTP; header values may be ``env:NAME``."""

    key: str
    command: tuple[str, ...] = ()
    url: str = ""
    headers: Mapping[str, str] = {}


class ArgumentRule(msgspec.Struct, frozen=True):
    """Where one argument (or skill input) may come from, or what the platform injects into it.

    ``sources``: expressions ``user``, ``model``, ``evidence``, ``evidence.<path>``, ``shared.<k>``,
    ``session.<k>``, ``prior.<type>[.<attr>]``. Empty and no ``inject``: any source.
    """

    sources: tuple[str, ...] = ()
    inject: str = ""  # platform.user_id | platform.organ_id | platform.conversation_id | platform.run_id
    required: bool = False
    label: str = ""


class OutputRule(msgspec.Struct, frozen=True):
    description: str = ""
    share: Share | None = None


class EntityRule(msgspec.Struct, frozen=True):
    """How to recognise business objects in a result: JMESPaths over the result or its items."""

    id: str
    display_name: str = ""
    attrs: tuple[str, ...] = ()
    items: str = ""  # JMESPath to a list; empty: the result itself


class VerifyContract(msgspec.Struct, frozen=True):
    """How to check afterwards whether a write took effect; ``args``: JMESPath over {args, key}."""

    tool: str
    args: Mapping[str, str]
    found: str


class ToolContract(msgspec.Struct, frozen=True):
    """One business tool. ``name`` is the catalogue name (``ops.disk_usage``)."""

    name: str
    server: str
    remote_name: str
    side_effect: SideEffect = SideEffect.NONE
    confirm: bool = True
    idempotency_key: tuple[str, ...] = ()
    pass_key_as: str = ""
    args: Mapping[str, ArgumentRule] = {}
    success: str = ""
    empty: str = ""
    extract: Mapping[str, str] = {}
    entities: Mapping[str, EntityRule] = {}
    verify: VerifyContract | None = None
    mask: tuple[str, ...] = ()
    labels: Mapping[str, str] = {}
    timeout: float = 30.0  # seconds
    on_error: OnToolError = OnToolError.FAILED
    artifact: bool = False

    @property
    def is_write(self) -> bool:
        return self.side_effect is SideEffect.WRITE

    @property
    def wire_name(self) -> str:
        """The name the model sees: dots are not allowed in function names."""
        return self.name.replace(".", "__")


class Skill(msgspec.Struct, frozen=True):
    key: str
    title: str = ""
    objective: str = ""
    tools: tuple[str, ...] = ()
    inputs: Mapping[str, ArgumentRule] = {}
    outputs: Mapping[str, OutputRule] = {}
    target: str = ""
    delegatable: bool = False


class Agent(msgspec.Struct, frozen=True):
    key: str
    title: str = ""
    description: str = ""
    instructions: str = ""
    skills: tuple[str, ...] = ()


class Catalogue(msgspec.Struct, frozen=True):
    agents: Mapping[str, Agent]
    skills: Mapping[str, Skill]
    tools: Mapping[str, ToolContract]
    mcp_servers: Mapping[str, McpServer]
    runbooks: tuple[dict[str, Any], ...] = ()

    def tools_of(self, skill: str) -> tuple[ToolContract, ...]:
        """The skill's tools in the catalogue's order; KeyError when the skill is unknown."""
        return tuple(self.tools[name] for name in self.skills[skill].tools)
