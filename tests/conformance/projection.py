"""The stores of one conversation as the protocol's model sees them, so that its invariants can judge them.

Ids are the model's: ``<run>-reply`` of a message is ``<run>.reply`` there. Statements go round the service.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any

import msgspec
import pymysql
from sqlalchemy.engine import make_url

from state_service.core import keys
from state_service.core.changes import Unresolved
from state_service.ports import Scope
from tests.model.redis import Call, Hot
from tests.model.sql import Sql
from tests.state.rig import PREFIX
from turnfence import records as r
from turnfence.axes import NodeStatus, RunState

STATUS = {"UNKNOWN_PRE_CALL": "PRE_CALL"}
GIVEN_UP, INTERRUPTED = "GIVEN_UP", "INTERRUPTED"


def model_id(name: str) -> str:
    return name.replace("-", ".")


def together(nodes: Iterable[tuple[str, NodeStatus]]) -> str:
    """The states of a graph's nodes as one: the model has one node."""
    return " ".join(status.value for _, status in sorted(nodes))


def call_of(head: r.EvidenceHead) -> Call:
    return Call(head.idempotency_key, STATUS.get(head.status.value, head.status.value), head.trace_id, 0)


class HotReader:
    """The conversation in Redis."""

    def __init__(self, client: Any, scope: Scope) -> None:
        self._client = client
        self._prefix = f"{PREFIX}{keys.tag(scope.organ_id, scope.conversation_id)}:"

    def _key(self, suffix: str) -> str:
        return self._prefix + suffix

    def _hash(self, suffix: str) -> dict[str, str]:
        found: dict[bytes, bytes] = self._client.hgetall(self._key(suffix))
        return {name.decode(): value.decode() for name, value in found.items()}

    def names(self) -> list[bytes]:
        return list(self._client.scan_iter(self._prefix + "*", count=1000))

    def image(self) -> dict[bytes, bytes]:
        return {key: self._client.dump(key) for key in self.names()}

    def restore(self, image: dict[bytes, bytes]) -> None:
        for key in self.names():
            self._client.delete(key)
        for key, value in image.items():
            self._client.restore(key, 600_000, value)

    def drop_lock(self) -> None:
        self._client.delete(self._key(keys.LOCK))

    def ttls(self) -> dict[bytes, int]:
        return {key: self._client.pttl(key) for key in self.names()}

    def active_task(self) -> str:
        return self._hash(keys.STATE).get("activeTaskId", "")

    def read(self) -> Hot:
        h, state = Hot(), self._hash(keys.STATE)
        h.version = int(state.get("version") or 0)
        h.dv, h.seq = int(state.get("dataVersion") or 0), int(state.get("dataSeq") or 0)
        h.owner, h.vtrace = state.get("lastTraceId", ""), state.get("versionTrace", "")
        lock = self._hash(keys.LOCK)
        h.lock = (lock["run"], lock["token"]) if lock else None
        for text in self._client.lrange(self._key(keys.DIALOGUE), 0, -1):
            message = msgspec.json.decode(text, type=r.DialogueMessage)
            name = model_id(message.message_id)
            assert name not in h.messages, f"{name} is twice in the dialogue"
            h.messages[name] = message.version
        for member, score in self._client.zrange(self._key(keys.DIRTY), 0, -1, withscores=True):
            h.dirty[member.decode()] = int(score)
        h.outbox = dict.fromkeys(self._hash(keys.OUTBOX), 0)
        self._task(h, state.get("activeTaskId", ""))
        for text in self._hash(keys.UNRESOLVED).values():
            entry = msgspec.json.decode(text, type=Unresolved)
            heads = self._hash(keys.evidence(entry.task_id, entry.node_id))
            if entry.evidence_id in heads:
                self._call(h, heads[entry.evidence_id])
        return h

    def _task(self, h: Hot, task_id: str) -> None:
        if not task_id:
            return
        graph = self._hash(keys.graph(task_id))
        nodes = [msgspec.json.decode(graph[n], type=r.TaskNode) for n in graph if n != keys.EDGES_FIELD]
        h.node = together((node.node_id, node.status) for node in nodes)
        text = self._client.get(self._key(keys.checkpoint(task_id)))
        h.checkpoint = msgspec.json.decode(text, type=r.TaskCheckpoint).checkpoint_id if text else ""
        for node in nodes:
            for text in self._hash(keys.evidence(task_id, node.node_id)).values():
                self._call(h, text)

    def _call(self, h: Hot, text: str) -> None:
        head = msgspec.json.decode(text, type=r.EvidenceHead)
        h.calls[model_id(head.evidence_id)] = call_of(head)


class ColdReader:
    """The conversation in SQL, on a connection of our own."""

    def __init__(self, url: str, scope: Scope) -> None:
        parsed = make_url(url)
        self._scope = (scope.organ_id, scope.conversation_id)
        self._lite = parsed.get_backend_name() == "sqlite"
        self._connection: Any
        if self._lite:
            self._connection = sqlite3.connect(parsed.database or "", isolation_level=None)
            self._connection.row_factory = sqlite3.Row
        else:
            self._connection = pymysql.connect(
                host=parsed.host or "",
                port=parsed.port or 0,
                user=parsed.username or "",
                database=parsed.database,
                autocommit=True,
                cursorclass=pymysql.cursors.DictCursor,
            )

    def close(self) -> None:
        self._connection.close()

    def rows(self, table: str) -> list[dict[str, Any]]:
        place = "?" if self._lite else "%s"
        statement = f"SELECT * FROM {table} WHERE organ_id = {place} AND conversation_id = {place}"  # noqa: S608
        cursor = self._connection.cursor()
        cursor.execute(statement, self._scope)
        found = [dict(row) for row in cursor.fetchall()]
        cursor.close()
        return found

    def read(self) -> tuple[Sql, dict[str, str]]:
        """Its state, and evidence id → task id."""
        s, tasks = Sql(), {}
        active = ""
        for row in self.rows("chat_conversation"):
            s.sv, s.pseq, s.fence = row["state_version"], row["persist_seq"], row["fence_version"]
            s.fence_run, active = row["fence_trace"], row["active_task_id"]
        s.messages = {model_id(row["message_id"]): row["version"] for row in self.rows("chat_message")}
        for row in self.rows("tool_call_record"):
            status = STATUS.get(row["call_status"], row["call_status"])
            name = model_id(row["call_id"])
            s.calls[name] = Call(row["idempotency_key"], status, row["trace_id"], 0)
            tasks[name] = row["task_id"]
        s.commits = {row["run_id"]: row["version"] for row in self.rows("turn_commit")}
        for row in self.rows("diagnosis_run"):
            s.runs[row["run_id"]] = (_end(row, s), row["version"])
            s.run_of[row["message_id"]] = row["run_id"]
        for row in self.rows("task_checkpoint"):
            if row["delete_flag"]:
                s.gone.add(row["checkpoint_id"])
            elif row["task_id"] == active:
                s.checkpoint = row["checkpoint_id"]
        nodes = [row for row in self.rows("task_graph_node") if row["task_id"] == active]
        s.node = together((row["node_id"], NodeStatus(row["status"])) for row in nodes)
        return s, tasks


def _end(row: dict[str, Any], s: Sql) -> str:
    if row["run_state"] == RunState.RUNNING.value:
        return "RUNNING"
    if row["run_id"] in s.commits:
        return "DONE"
    return GIVEN_UP if row["run_state"] == RunState.CANCELLED.value else INTERRUPTED
