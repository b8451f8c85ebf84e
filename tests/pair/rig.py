"""A pair with its stand-ins: what the model says next, how the tools behave, and who is still alive."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.model_server import ModelServer, Reply, evidence_ids
from tests.pair.caller import Caller, Conversation, new_id
from tests.services import Pair
from tests.tool_sim import Sim
from turnfence.errors import Reason, TurnfenceError

TOOL_SECONDS = 2  # a write's own limit; recovery waits for it before it believes "nothing happened"


def write_catalogue(folder: Path, sim: Sim) -> None:
    """Two agents of one skill each: one that looks, one that writes."""
    folder.mkdir()
    write = {
        "side_effect": "WRITE",
        "confirm": True,
        "idempotency_key": ["title"],
        "pass_key_as": "request_id",
        "args": {"title": {"from": ["user", "model"], "required": True, "label": "Title"}},
        "success": "status == 'created'",
        "labels": {"title": "Title"},
        "timeout": f"{TOOL_SECONDS}s",
    }
    catalogue = {
        "mcp_servers": {"sim": {"command": list(sim.command)}},
        "agents": {
            "reader": {
                "title": "Reader",
                "description": "Looks at facts.",
                "instructions": "Look before you judge.",
                "skills": ["look"],
            },
            "writer": {
                "title": "Writer",
                "description": "Writes things.",
                "instructions": "Write only what was asked for.",
                "skills": ["write"],
            },
        },
        "skills": {
            "look": {"title": "Look", "objective": "Find out how it is", "tools": ["sim.read_fact"]},
            "write": {
                "title": "Write",
                "objective": "Write one thing",
                "tools": ["sim.find_thing", "sim.write_thing", "sim.write_plain"],
            },
        },
        "tools": {
            "sim.read_fact": {"timeout": f"{TOOL_SECONDS}s"},
            "sim.find_thing": {"timeout": f"{TOOL_SECONDS}s", "empty": "length(items) == `0`"},
            "sim.write_thing": write
            | {
                "verify": {
                    "tool": "sim.find_thing",
                    "args": {"title": "args.title"},
                    "found": "length(items) > `0`",
                }
            },
            "sim.write_plain": write,
        },
    }
    (folder / "sim.yaml").write_text(yaml.safe_dump(catalogue, sort_keys=False), encoding="utf-8")


@dataclass
class Rig:
    pair: Pair
    model: ModelServer
    tools: Sim
    caller: Caller

    async def reset(self) -> None:
        """Everybody alive and in touch; nothing told, nothing remembered."""
        dead = [service for service in (self.pair.state, self.pair.harness) if not service.alive]
        for service in dead:
            service.start()
        if dead:
            await self.in_touch()
        self.model.replies = {"semantic_verdict": [{"verdict": "SUPPORTED", "reason": "it is cited"}]}
        self.model.requests.clear()
        self.tools.forget()

    async def in_touch(self) -> None:
        """Until the harness has found the state service again."""
        talk = self.talk()
        async with asyncio.timeout(10):
            while True:
                try:
                    await talk.get_run(new_id())
                except TurnfenceError as error:
                    if error.reason is Reason.NOT_FOUND:
                        return
                await asyncio.sleep(0.02)  # it tries to connect again in its own time

    def talk(self, agent_id: str = "reader") -> Conversation:
        return Conversation(self.caller, agent_id=agent_id)

    def says(self, name: str, *replies: Reply) -> None:
        self.model.replies[name] = list(replies)

    def task_turn(self, agent_id: str, *steps: Reply) -> None:
        """The router sends the turn to an agent, whose steps are these."""
        decision = {
            "mode": "START_FRESH",
            "intent": "DIAGNOSIS",
            "agent_id": agent_id,
            "goal_summary": "see to it",
            "reply": "",
        }
        self.says("turn_decision", decision)
        self.says("step", *steps)


# --- what a model says ----------------------------------------------------------------------------


def read_fact(name: str = "load") -> Reply:
    return [("sim__read_fact", {"name": name})]


def write(tool: str, title: str) -> Reply:
    return [(f"sim__{tool}", {"title": title})]


def report(body: dict[str, Any], fact: str, gain: str = "GAINED") -> tuple[str, Any]:
    rated = {"evidence_id": evidence_ids(body)[-1], "gain": gain, "fact": fact}
    return ("builtin_report_progress", {"reports": [rated]})


def finish(
    body: dict[str, Any], conclusion: str = "", fact: str = "", missing: tuple[str, ...] = ()
) -> tuple[str, Any]:
    """A draft; its one fact, when there is one, cites the last evidence."""
    facts = [{"text": fact, "evidence_ids": evidence_ids(body)[-1:]}] if fact else []
    draft = {
        "conclusion": conclusion,
        "facts": facts,
        "missing_info": list(missing),
        "recommendations": [],
    }
    return ("builtin_finish", {"draft": draft})


def concludes(conclusion: str = "The load is 42 percent.", fact: str = "load is 42 percent") -> Reply:
    """Report what the last call found, and finish with it."""
    return lambda body: [report(body, fact), finish(body, conclusion, fact)]
