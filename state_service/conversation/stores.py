"""What every step of the story works with, and how a script's answer becomes an error."""

from __future__ import annotations

import msgspec

from state_service.core.changes import Limits
from state_service.core.drain import Expiries
from state_service.ports import (
    Applied,
    Clock,
    Code,
    ColdStore,
    HistoryStore,
    HotStore,
    Scope,
    UpkeepStore,
)
from turnfence import records as r
from turnfence.errors import Reason, TurnfenceError


class Rules(msgspec.Struct, frozen=True):
    """The settings of the specification's section 6 that the story needs; spans in milliseconds."""

    lease_ms: int = 30_000
    conversation_ttl_ms: int = 7 * 86_400_000
    task_ttl_running_ms: int = 86_400_000
    flush_max_bytes: int = 1_048_576
    message_max_bytes: int = 4_096
    payload_inline_max_bytes: int = 524_288
    payload_redis_max_bytes: int = 262_144
    payload_max_bytes: int = 4_194_304
    space_field_max_bytes: int = 65_536
    limits: Limits = Limits()
    expiries: Expiries = Expiries(
        suspended_ms=7_200_000, sentinel_gap_ms=600_000, payload_done_ms=3_600_000, events_ms=3_600_000
    )

    @property
    def ttl_ms(self) -> int:
        """While a turn runs or anything is dirty, every key lives this long: the longer of the two
        TTLs, so that nothing expires before SQL has it."""
        return max(self.conversation_ttl_ms, self.task_ttl_running_ms)


class Stores(msgspec.Struct, frozen=True):
    hot: HotStore
    cold: ColdStore
    history: HistoryStore
    upkeep: UpkeepStore
    clock: Clock
    rules: Rules


def scope_of(turn: r.TurnRef) -> Scope:
    return Scope(turn.organ_id, turn.conversation_id)


def written(applied: Applied) -> int:
    """The data sequence of a script that wrote (now or before); everything else is an error."""
    if applied.code in (Code.APPLIED, Code.ALREADY):
        return applied.data_seq
    raise refused(applied.code)


def refused(code: Code) -> TurnfenceError:
    """Loss, conflict and gaps are told apart (D10)."""
    if code is Code.FENCED:
        return TurnfenceError(Reason.STATE_FENCED)
    return TurnfenceError(Reason.STATE_LOST, detail=f"script answered {code.name}")


def check_fence(state: dict[str, str], turn: r.TurnRef) -> None:
    """What a fenced script checks, for a plain read: the state hash is read together with the data."""
    if not state:
        raise TurnfenceError(Reason.STATE_LOST)
    if int(state.get("version") or 0) != turn.version or state.get("lastTraceId") != turn.run_id:
        raise TurnfenceError(Reason.STATE_FENCED)
    if int(state.get("dataSeq") or 0) < turn.seen_seq:
        raise TurnfenceError(Reason.STATE_LOST)
