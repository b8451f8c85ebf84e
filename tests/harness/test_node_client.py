"""The contract as a caller without Python sees it: a Node client that knows the .proto files alone runs turns
on the embedded default."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import services
from tests.servers import PrivateRedis, private_folder

pytestmark = pytest.mark.node

CLIENT = Path(__file__).parent.parent / "node" / "run_turn.mjs"
USER = {"organ_id": "acme", "user_id": "ada"}


@pytest.fixture(scope="module")
def harness(valkey: PrivateRedis) -> Iterator[str]:
    """The address of a harness with nothing set: bundled catalogue, runbook model, Valkey and SQLite."""
    with (
        private_folder() as folder,
        services.pair(folder, valkey.url, f"sqlite+aiosqlite:///{folder / 'cold.db'}") as pair,
    ):
        yield pair.harness.address


class Node:
    """One program run after the other: what they print, and how they end."""

    def __init__(self, program: Path, target: str) -> None:
        self._program = program
        self._target = target

    def run(self, **request: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._program, CLIENT, self._target, json.dumps(request)],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def turn(self, text: str, **more: Any) -> list[dict[str, Any]]:
        """The events of a whole turn; the call's end was OK."""
        done = self.run(principal=USER, text=text, **more)
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def client(node: Path, harness: str) -> Node:
    return Node(node, harness)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in events]


def only(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [event[kind] for event in events if event["kind"] == kind]
    assert isinstance(found, dict)
    return found


def assert_a_whole_story(events: list[dict[str, Any]]) -> None:
    """metadata (status | progress)* content done, numbered without a gap, all of one run."""
    assert kinds(events)[0] == "metadata"
    assert kinds(events)[-2:] == ["content", "done"]
    assert set(kinds(events)[1:-2]) <= {"status", "progress"}
    assert [int(event["sequence"]) for event in events] == list(range(1, len(events) + 1))
    assert {event["run_id"] for event in events} == {only(events, "metadata")["run_id"]}


def test_a_node_client_is_told_a_talk_from_metadata_to_done(client: Node) -> None:
    events = client.turn("hello")
    assert_a_whole_story(events)
    assert only(events, "content")["body"] == "chat"
    assert "Hello" in only(events, "content")["text"]
    done = only(events, "done")
    assert (done["release_outcome"], done["turn_status"]) == ("RELEASE_OUTCOME_SUCCESS", "TURN_STATUS_DONE")
    assert int(done["usage"]["model_calls"]) >= 1


def test_a_node_client_gets_a_diagnosis_made_with_real_tools(client: Node) -> None:
    events = client.turn("诊断这台主机", locale="zh-CN")
    assert_a_whole_story(events)
    assert "progress" in kinds(events)
    content = only(events, "content")
    assert content["body"] == "report"
    assert content["text"]
    assert any(char > "\u3400" for char in content["text"])  # Chinese came through both ways
    assert int(only(events, "done")["usage"]["tool_calls"]) >= 3


def test_a_node_client_goes_on_with_its_conversation_and_repeats_a_message_safely(client: Node) -> None:
    first = client.turn("hello", message_id="node-1")
    conversation = only(first, "metadata")["conversation_id"]
    second = client.turn("what can you do", conversation_id=conversation, message_id="node-2")
    assert only(second, "metadata")["conversation_id"] == conversation
    assert only(second, "metadata")["run_id"] != only(first, "metadata")["run_id"]
    again = client.turn("what can you do", conversation_id=conversation, message_id="node-2")
    assert only(again, "metadata") == only(second, "metadata")
    assert only(again, "content") == only(second, "content")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"text": "hello"}, "INVALID_ARGUMENT"),
        ({"principal": USER}, "INVALID_ARGUMENT"),
        ({"principal": USER, "text": "hello", "conversation_id": "of nobody"}, "INVALID_ARGUMENT"),
    ],
    ids=["no_principal", "nothing_said", "no_id"],
)
def test_a_node_client_learns_by_the_status_why_nothing_ran(
    client: Node, request_: dict[str, Any], status: str
) -> None:
    done = client.run(**request_)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{status}: ")
