"""The cold store's tables (state document 2.3; design: state.md, "SQL"), one schema for MySQL 8,
MariaDB 10.11+ and SQLite.

Ids compare byte for byte (binary collations), every table has its business key as a unique key,
JSON is opaque text (hashed bytes must survive), times are epoch milliseconds written by us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects import mysql

metadata = MetaData()

_OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}

Id = String(64).with_variant(mysql.VARCHAR(64, charset="ascii", collation="ascii_bin"), "mysql")
Code = String(64).with_variant(mysql.VARCHAR(64, charset="ascii", collation="ascii_bin"), "mysql")
Name = String(512).with_variant(mysql.VARCHAR(512, charset="utf8mb4", collation="utf8mb4_bin"), "mysql")
Long = Text().with_variant(mysql.LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin"), "mysql")
Key = BigInteger().with_variant(Integer(), "sqlite")


def _table(name: str, *columns: Any, unique: Sequence[str], indexes: Sequence[Sequence[str]] = ()) -> Table:
    """A table with the columns that all have, its business key and its indexes, all scoped by organ_id."""
    return Table(
        name,
        metadata,
        Column("id", Key, primary_key=True, autoincrement=True),
        Column("organ_id", Id, nullable=False),
        Column("conversation_id", Id, nullable=False),
        *columns,
        Column("create_time", BigInteger, nullable=False),
        Column("update_time", BigInteger, nullable=False),
        Column("version", BigInteger, nullable=False, default=0),
        Column("delete_flag", SmallInteger, nullable=False, default=0),
        UniqueConstraint("organ_id", *unique, name=f"uk_{name}"),
        *[Index(f"ix_{name}_{number}", "organ_id", *index) for number, index in enumerate(indexes, 1)],
        **_OPTIONS,
    )


def _text(name: str) -> Column[str]:
    return Column(name, Long, nullable=False, default="")


def _id(name: str) -> Column[str]:
    return Column(name, Id, nullable=False, default="")


def _code(name: str) -> Column[str]:
    return Column(name, Code, nullable=False, default="")


def _name(name: str) -> Column[str]:
    return Column(name, Name, nullable=False, default="")


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, default=0)


def _ms(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=True)


def _maybe(name: str) -> Column[bool]:
    return Column(name, Boolean(create_constraint=False), nullable=True)


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean(create_constraint=False), nullable=False, default=False)


chat_conversation = _table(
    "chat_conversation",
    _id("user_id"),
    _text("title"),
    _id("active_task_id"),
    _text("session_shared"),
    _number("state_version"),
    _number("persist_seq"),
    _number("fence_version"),
    _id("fence_trace"),
    _ms("last_message_time"),
    unique=["conversation_id"],
    indexes=[["user_id", "last_message_time"]],
)

chat_message = _table(
    "chat_message",
    _id("message_id"),
    _code("role"),
    _code("message_type"),
    _text("content"),
    _id("task_id"),
    _id("node_id"),
    _number("round"),
    _id("trace_id"),
    _number("idx"),
    _ms("created_at_ms"),
    Column("release_outcome", Code, nullable=True),
    unique=["conversation_id", "message_id"],
    indexes=[["conversation_id", "version", "idx"], ["conversation_id", "task_id", "node_id"]],
)

task_instance = _table(
    "task_instance",
    _id("task_id"),
    _id("agent_id"),
    _text("goal_summary"),
    _text("request"),
    _code("status"),
    _id("current_node_id"),
    _text("final_message"),
    _text("shared"),
    _text("prior"),
    _text("record"),
    _number("state_version"),
    _ms("started_time"),
    _ms("suspended_time"),
    _ms("finished_time"),
    _id("trace_id"),
    _id("source_message_id"),
    unique=["task_id"],
    indexes=[["conversation_id", "finished_time"]],
)

task_graph_node = _table(
    "task_graph_node",
    _id("task_id"),
    _id("node_id"),
    _text("title"),
    _text("objective"),
    _name("skill_key"),
    _name("target"),
    _flag("target_claimed"),
    _number("delegate_depth"),
    _text("depends_on"),
    _code("status"),
    _text("result"),
    _text("inputs"),
    _text("outputs"),
    _text("state"),
    _code("error_code"),
    _text("error_message"),
    _ms("started_time"),
    _ms("finished_time"),
    unique=["task_id", "node_id"],
    indexes=[["conversation_id"]],
)

task_graph_edge = _table(
    "task_graph_edge",
    _id("task_id"),
    _id("from_node_id"),
    _id("to_node_id"),
    _code("edge_type"),
    unique=["task_id", "from_node_id", "to_node_id"],
    indexes=[["conversation_id"]],
)

task_checkpoint = _table(
    "task_checkpoint",
    _id("task_id"),
    _id("checkpoint_id"),
    _id("node_id"),
    _code("type"),
    _text("question"),
    _text("expected_fields"),
    _text("allowed_actions"),
    _text("suggestions"),
    _text("pending_action"),
    _text("fields"),
    _id("evidence_id"),
    _ms("created_at_ms"),
    _ms("expires_at_ms"),
    unique=["checkpoint_id"],
    indexes=[["conversation_id", "task_id"]],
)

task_resume_record = _table(
    "task_resume_record",
    _id("resume_id"),
    _id("checkpoint_id"),
    _id("task_id"),
    _id("message_id"),
    _id("user_id"),
    _code("resume_action"),
    _ms("acted_at"),
    unique=["resume_id"],
    indexes=[["conversation_id"]],
)

tool_call_record = _table(
    "tool_call_record",
    _id("call_id"),
    _id("task_id"),
    _id("node_id"),
    _name("tool_name"),
    _code("side_effect"),
    _text("request"),
    _code("args_hash"),
    _text("args_brief"),
    _code("idempotency_key"),
    Column("live_key", Code, nullable=True),
    _number("round"),
    _text("response"),
    _text("result_summary"),
    _text("extract_counts"),
    _text("entities"),
    _id("payload_id"),
    _number("payload_bytes"),
    _flag("artifact"),
    _code("call_status"),
    _maybe("business_ok"),
    _maybe("empty_result"),
    _code("failure_kind"),
    _code("error_code"),
    _text("error_message"),
    _id("trace_id"),
    _name("model_call_id"),
    _ms("started_time"),
    _ms("finished_time"),
    _ms("duration_ms"),
    _ms("not_before"),
    unique=["call_id"],
    indexes=[
        ["conversation_id", "version"],
        ["conversation_id", "task_id", "node_id"],
        ["conversation_id", "live_key", "call_status"],
        ["trace_id"],
    ],
)
# A call without its request and response, which may be large.
HEAD_COLUMNS = tuple(c for c in tool_call_record.c if c.name not in ("request", "response"))
tool_call_record.append_constraint(
    UniqueConstraint("organ_id", "task_id", "live_key", name="uk_tool_call_record_live")
)

task_node_payload = _table(
    "task_node_payload",
    _id("payload_id"),
    _code("payload_type"),
    _text("payload_data"),
    unique=["payload_id"],
    indexes=[["conversation_id"]],
)

diagnosis_run = _table(
    "diagnosis_run",
    _id("run_id"),
    _id("message_id"),
    _code("input_hash"),
    _id("user_id"),
    _id("agent_id"),
    _id("task_id"),
    _text("query"),
    _flag("query_cut"),
    Column("intent", Code, nullable=True),
    Column("turn_mode", Code, nullable=True),
    _code("status"),
    _code("run_state"),
    Column("reason", Code, nullable=True),
    _code("error_code"),
    Column("release_outcome", Code, nullable=True),
    Column("fallback_type", Code, nullable=True),
    Column("stop_reason", Code, nullable=True),
    Column("collection_state", Code, nullable=True),
    Column("semantic_verdict", Code, nullable=True),
    Column("stream_state", Code, nullable=True),
    Column("turn_status", Code, nullable=True),
    _text("limits"),
    _text("usage_json"),
    _text("answer"),
    _text("conclusion"),
    _text("published_result"),
    _text("closing_events"),
    _number("duration_ms"),
    _number("tokens"),
    _number("agent_steps"),
    _number("tool_calls"),
    _ms("started_time"),
    _ms("finished_time"),
    Column("stream_end", Code, nullable=True),
    _ms("stream_last_sequence"),
    unique=["run_id"],
    indexes=[
        ["conversation_id", "version"],
        ["conversation_id", "run_state", "version"],
        ["run_state", "started_time"],
        ["user_id", "started_time"],
    ],
)
diagnosis_run.append_constraint(UniqueConstraint("organ_id", "message_id", name="uk_diagnosis_run_message"))

run_trace = _table(
    "run_trace",
    _id("run_id"),
    _number("sequence"),
    _code("type"),
    _code("phase"),
    _code("status"),
    _ms("started_time"),
    _ms("duration_ms"),
    _id("node_id"),
    _id("evidence_id"),
    _text("attributes"),
    unique=["run_id", "sequence"],
    indexes=[["conversation_id"]],
)

turn_commit = _table(
    "turn_commit",
    _id("run_id"),
    _number("persist_seq"),
    unique=["run_id"],
    indexes=[["conversation_id", "version"]],
)

conversation_entity = _table(
    "conversation_entity",
    _code("entity_type"),
    _name("entity_id"),
    _text("display_name"),
    _text("attrs"),
    _id("task_id"),
    _id("evidence_id"),
    _ms("seen_at"),
    _number("mentions"),
    _number("added_seq"),
    unique=["conversation_id", "entity_type", "entity_id"],
)

# What the sweeper asks of all organisations at once.
Index("ix_diagnosis_run_unfinished", diagnosis_run.c.run_state, diagnosis_run.c.started_time)
Index("ix_chat_conversation_erasing", chat_conversation.c.delete_flag, chat_conversation.c.fence_trace)
Index("ix_chat_conversation_age", chat_conversation.c.delete_flag, chat_conversation.c.last_message_time)
Index("ix_task_node_payload_age", task_node_payload.c.create_time)
Index("ix_run_trace_age", run_trace.c.create_time)
