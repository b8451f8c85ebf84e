"""How a call of a business tool can fail, as an adapter tells it (state document 5.4)."""

from __future__ import annotations

from enum import StrEnum


class ToolFailure(StrEnum):
    """How a tool call failed (state document 5.4, with D42): the rows of the mapping table."""

    TIMEOUT = "TIMEOUT"
    UNREACHABLE = "UNREACHABLE"  # provably before the first byte was sent
    IO_ERROR = "IO_ERROR"  # broke after it may have been sent
    UNKNOWN_CALL = "UNKNOWN_CALL"
    MCP_TOOL_ERROR = "MCP_TOOL_ERROR"  # result with is_error
    MCP_PARAMETER_ERROR = "MCP_PARAMETER_ERROR"  # -32602
    MCP_RPC_ERROR = "MCP_RPC_ERROR"
    AUTH = "AUTH"
    RATE_LIMIT = "RATE_LIMIT"
    TOO_LARGE = "TOO_LARGE"  # above state.payload-max-bytes
