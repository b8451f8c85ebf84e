"""The bundled catalogue: it loads, it hears what people say, and what it says is in the evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import harness_service
from harness_service.adapters.catalogue_yaml import load_catalogue
from harness_service.adapters.runbook_model import RunbookModel
from harness_service.core.catalogue import Catalogue
from harness_service.core.literals import corpus_of, missing
from harness_service.ports import Briefing, ChatRequest, ModelCall, Observation

FOLDER = Path(harness_service.__file__).parent / "catalogue"


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue(FOLDER)


@pytest.fixture(scope="module")
def model(catalogue: Catalogue) -> RunbookModel:
    return RunbookModel(catalogue)


def test_it_loads(catalogue: Catalogue) -> None:
    assert set(catalogue.agents) == {"ops"}
    assert set(catalogue.skills) == {"host-diagnosis", "ticketing"}
    assert [name for name, tool in catalogue.tools.items() if tool.is_write] == ["ops.create_ticket"]
    verify = catalogue.tools["ops.create_ticket"].verify
    assert verify is not None
    assert verify.args == {"request_id": "key"}


def test_its_knowledge_is_titled_markdown() -> None:
    articles = sorted((FOLDER / "knowledge").glob("*.md"))
    assert len(articles) >= 5
    assert all(article.read_text(encoding="utf-8").startswith("# ") for article in articles)


# --- what people say ------------------------------------------------------------------------------


async def reply(model: RunbookModel, call: ModelCall, **briefing: Any) -> dict[str, Any]:
    request = ChatRequest(call, (), Briefing(**{"agents": ("ops",), **briefing}))
    parsed: dict[str, Any] = json.loads((await model.complete(request, timeout=1.0)).text)
    return parsed


@pytest.mark.parametrize(
    ("text", "mode", "intent", "goal"),
    [
        ("hello", "REPLY_ONLY", "SYSTEM_CHAT", ""),
        ("你好", "REPLY_ONLY", "SYSTEM_CHAT", ""),
        ("What can you do?", "REPLY_ONLY", "SYSTEM_CHAT", ""),
        ("你能做什么？", "REPLY_ONLY", "SYSTEM_CHAT", ""),
        ("How do I free space on a full disk?", "REPLY_ONLY", "KNOWLEDGE_QUERY", ""),
        ("what is the ticket policy", "REPLY_ONLY", "KNOWLEDGE_QUERY", ""),
        ("磁盘满了怎么办", "REPLY_ONLY", "KNOWLEDGE_QUERY", ""),
        ("diagnose this host", "START_FRESH", "DIAGNOSIS", "Diagnose this host"),
        ("Hi, please check this server.", "START_FRESH", "DIAGNOSIS", "Diagnose this host"),
        ("What is wrong with this host?", "START_FRESH", "DIAGNOSIS", "Diagnose this host"),
        ("the machine is very slow", "START_FRESH", "DIAGNOSIS", "Diagnose this host"),
        ("诊断这台主机", "START_FRESH", "DIAGNOSIS", "诊断这台主机"),
        ("帮我看看服务器为什么这么慢，这台服务器很卡", "START_FRESH", "DIAGNOSIS", "诊断这台主机"),
        ("is the disk full?", "START_FRESH", "DIAGNOSIS", "Check the disks"),
        ("检查磁盘", "START_FRESH", "DIAGNOSIS", "检查磁盘"),
        ("check port 8080", "START_FRESH", "DIAGNOSIS", "Check a port"),
        ("search the log /var/log/syslog for error", "START_FRESH", "DIAGNOSIS", "Search a log"),
        ("open a ticket: disk / is full", "START_FRESH", "DIAGNOSIS", "Open a ticket"),
        ("帮我提一张工单", "START_FRESH", "DIAGNOSIS", "提一张工单"),
        (
            "diagnose this host and open a ticket",
            "START_FRESH",
            "DIAGNOSIS",
            "Diagnose this host; Open a ticket",
        ),
        ("write me a poem", "UNCERTAIN", "SYSTEM_CHAT", ""),
        ("写首诗", "UNCERTAIN", "SYSTEM_CHAT", ""),
    ],
)
async def test_what_people_say(model: RunbookModel, text: str, mode: str, intent: str, goal: str) -> None:
    decision = await reply(model, ModelCall.TURN_DECISION, text=text)
    assert (decision["mode"], decision["intent"], decision["goal_summary"]) == (mode, intent, goal)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("Disk / on web-1 is full, host is slow", "CONTINUE_TASK"),  # the answer to "what is it about?"
        ("How to log in is not documented", "CONTINUE_TASK"),
        ("diagnose this host instead", "REPLACE_TASK"),
        ("cancel", "CANCEL_TASK"),
    ],
)
async def test_what_people_answer(model: RunbookModel, text: str, mode: str) -> None:
    asked = {"has_task": True, "has_checkpoint": True, "agent_id": "ops", "request": "open a ticket"}
    assert (await reply(model, ModelCall.TURN_DECISION, text=text, **asked))["mode"] == mode


async def test_a_diagnosis_with_a_ticket_is_two_nodes(model: RunbookModel) -> None:
    request = "diagnose this host and open a ticket"
    plan = await reply(model, ModelCall.TASK_PLAN, request=request, agent_id="ops")
    assert [(node["skill"], node["target"], node["depends_on"]) for node in plan["nodes"]] == [
        ("host-diagnosis", "", []),
        ("ticketing", "ops.create_ticket", ["diagnose-host"]),
    ]


# --- whole nodes ----------------------------------------------------------------------------------

Results = dict[str, Any]

HEALTHY: Results = {
    "ops.cpu_load": {"percent": 3.1, "load_1m": 0.25, "cpus": 4},
    "ops.memory_usage": {"percent": 41.0, "available_bytes": 8123456512},
    "ops.disk_usage": {
        "filesystems": [
            {"path": "/", "percent": 55.5, "free_bytes": 123},
            {"path": "/data", "percent": 71, "free_bytes": 4567},
        ]
    },
    "ops.top_processes": {
        "processes": [
            {"pid": 1, "name": "init", "cpu_percent": 0.0, "memory_bytes": 12345678},
            {"pid": 77, "name": "postgres", "cpu_percent": 2.5, "memory_bytes": 987654321},
        ]
    },
}
FULL_DISK: Results = {
    **HEALTHY,
    "ops.disk_usage": {"filesystems": [{"path": "/data", "percent": 97.3, "free_bytes": 4567}]},
}
SHORT_OF_ALL: Results = {
    **FULL_DISK,
    "ops.cpu_load": {"percent": 99.5, "load_1m": 12, "cpus": 4},
    "ops.memory_usage": {"percent": 93.25, "available_bytes": 1024},
}
TICKET: Results = {
    "ops.create_ticket": {"status": "created", "id": "T-12", "title": "Disk / is full", "service": "host"}
}


async def run_node(model: RunbookModel, results: Results, **briefing: Any) -> tuple[dict[str, Any], Results]:
    """Let the model run one node over canned results; gives its draft, and what each evidence says."""
    observations: list[Observation] = []
    evidence: Results = {}
    names = {tool.replace(".", "__"): tool for tool in results}
    for number in range(1, 12):
        request = ChatRequest(
            ModelCall.NODE_STEP,
            (),
            Briefing(agent_id="ops", round=number, observations=tuple(observations), **briefing),
        )
        answer = await model.complete(request, timeout=1.0)
        assert answer.tool_calls
        for call in answer.tool_calls:
            arguments = json.loads(call.arguments_json)
            if call.name == "builtin_finish":
                return arguments["draft"], evidence
            if call.name.startswith("builtin_"):
                observations.append(Observation("", call.name, "ok", arguments, None, round=number))
                continue
            tool = names[call.name]
            evidence_id = f"e{len(evidence) + 1}"
            evidence[evidence_id] = results[tool]
            observations.append(Observation(evidence_id, tool, "ok", arguments, results[tool], round=number))
    raise AssertionError("the node does not end")


def assert_is_grounded(draft: dict[str, Any], evidence: Results) -> None:
    for fact in draft["facts"]:
        corpus = corpus_of(evidence[one] for one in fact["evidence_ids"])
        assert missing(fact["text"], corpus) == (), fact["text"]
    assert missing(draft["conclusion"], corpus_of(evidence.values())) == ()


@pytest.mark.parametrize("request_text", ["diagnose this host", "诊断这台主机"])
@pytest.mark.parametrize("results", [HEALTHY, FULL_DISK, SHORT_OF_ALL], ids=["healthy", "disk", "all"])
async def test_a_diagnosis_states_only_what_was_measured(
    model: RunbookModel, results: Results, request_text: str
) -> None:
    draft, evidence = await run_node(
        model, results, skill="host-diagnosis", request=request_text, text=request_text
    )
    assert len(draft["facts"]) == 5
    assert draft["missing_info"] == []
    assert_is_grounded(draft, evidence)
    judged = {
        "conclusion": draft["conclusion"],
        "facts": draft["facts"],
        "evidence": [{"evidence_id": key, "status": "ok", "result": one} for key, one in evidence.items()],
    }
    assert (await reply(model, ModelCall.SEMANTIC_VERDICT, draft=judged))["verdict"] == "SUPPORTED"


async def test_a_healthy_host(model: RunbookModel) -> None:
    text = "diagnose this host"
    draft, _ = await run_node(model, HEALTHY, skill="host-diagnosis", request=text, text=text)
    assert draft["conclusion"] == (
        "No resource on this host is exhausted: the processor is 3.1 % busy, memory is 41.0 % used, "
        "and the fullest file system, /data, is 71 % full."
    )
    assert draft["recommendations"] == []


async def test_the_culprits_are_named(model: RunbookModel) -> None:
    text = "diagnose this host"
    draft, _ = await run_node(model, SHORT_OF_ALL, skill="host-diagnosis", request=text, text=text)
    assert draft["conclusion"] == (
        "This host is short of a resource: file system /data is 97.3 % full; memory is 93.25 % used, most by "
        "postgres; the processor is 99.5 % busy, most with postgres."
    )
    assert len(draft["recommendations"]) == 3


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("is the disk full?", HEALTHY),
        ("检查磁盘", FULL_DISK),
        ("check port 8080", {"ops.check_port": {"host": "127.0.0.1", "port": 8080, "open": True}}),
        ("8080端口通吗", {"ops.check_port": {"host": "127.0.0.1", "port": 8080, "open": False}}),
        (
            "search the log /var/log/syslog for error",
            {
                "ops.search_log": {
                    "path": "/var/log/syslog",
                    "matches": [{"line": 7, "text": 'error 5 in "x"'}],
                }
            },
        ),
    ],
)
async def test_the_small_runbooks_are_grounded(model: RunbookModel, text: str, results: Results) -> None:
    draft, evidence = await run_node(model, results, skill="host-diagnosis", request=text, text=text)
    assert draft["conclusion"]
    assert_is_grounded(draft, evidence)


@pytest.mark.parametrize(
    ("text", "briefing", "title", "service"),
    [
        ("open a ticket: Disk / is full", {}, "Disk / is full", "host"),
        ('Open a ticket titled "Disk / is full", service web-1', {}, "Disk / is full", "web-1"),
        ("create a ticket about slow logins for service web-1.", {}, "slow logins", "web-1"),
        ("提一张工单：磁盘已满，服务：web-1", {}, "磁盘已满", "web-1"),
        ("open a ticket", {"inputs": {"title": "Disk / is full"}}, "Disk / is full", "host"),
        ("open a ticket for it", {"inputs": {"title": "Disk / is full"}}, "Disk / is full", "host"),
        ("open a ticket", {"user_replies": ("Disk / is full",)}, "Disk / is full", "host"),
    ],
)
async def test_a_ticket_is_opened_with_what_is_known(
    model: RunbookModel, text: str, briefing: dict[str, Any], title: str, service: str
) -> None:
    request = ChatRequest(
        ModelCall.NODE_STEP,
        (),
        Briefing(agent_id="ops", skill="ticketing", request=text, text=text, **briefing),
    )
    (call,) = (await model.complete(request, timeout=1.0)).tool_calls
    assert call.name == "ops__create_ticket"
    arguments = json.loads(call.arguments_json)
    assert (arguments["title"], arguments["service"]) == (title, service)


async def test_a_ticket_about_nothing_is_asked_about(model: RunbookModel) -> None:
    briefing = Briefing(agent_id="ops", skill="ticketing", request="提一张工单", text="提一张工单")
    (call,) = (await model.complete(ChatRequest(ModelCall.NODE_STEP, (), briefing), timeout=1.0)).tool_calls
    assert call.name == "builtin_ask_user"
    assert "标题" in json.loads(call.arguments_json)["question"]


async def test_a_ticket_that_is_open_is_concluded(model: RunbookModel) -> None:
    text = "open a ticket: Disk / is full"
    draft, evidence = await run_node(model, TICKET, skill="ticketing", request=text, text=text)
    assert draft["conclusion"] == "Ticket T-12 is open: “Disk / is full”, service “host”."
    assert draft["facts"][0]["evidence_ids"] == ["e1"]
    assert_is_grounded(draft, evidence)
