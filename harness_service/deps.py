"""What the story of a turn is built from: ``harness_service.turn.build_turn(deps)``."""

from __future__ import annotations

import time
from dataclasses import dataclass

from harness_service.core.catalogue import Catalogue
from harness_service.ports import ChatModel, Clock, KnowledgeBase, StateStore, ToolProvider
from harness_service.settings import Settings


@dataclass(frozen=True)
class Deps:
    """``guard_model`` judges conclusions; it is ``model`` itself unless one of its own is configured."""

    settings: Settings
    catalogue: Catalogue
    state: StateStore
    model: ChatModel
    guard_model: ChatModel
    tools: ToolProvider
    knowledge: KnowledgeBase
    clock: Clock


class SystemClock:
    """The machine's two clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()
