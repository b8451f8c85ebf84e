"""The first tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.String(64).with_variant(mysql.VARCHAR(64, charset="ascii", collation="ascii_bin"), "mysql")
NAME = sa.String(512).with_variant(mysql.VARCHAR(512, charset="utf8mb4", collation="utf8mb4_bin"), "mysql")
LONG = sa.Text().with_variant(mysql.LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin"), "mysql")
KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}


def _create(name: str, *parts: Any) -> None:
    """Create a table unless an earlier, cut-short run has made it."""
    if not sa.inspect(op.get_bind()).has_table(name):
        op.create_table(name, *parts, **OPTIONS)


def _index(name: str, table: str, columns: list[str]) -> None:
    if name not in {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}:
        op.create_index(name, table, columns)


def _chat_conversation() -> None:
    _create(
        "chat_conversation",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("user_id", ID, nullable=False),
        sa.Column("title", LONG, nullable=False),
        sa.Column("active_task_id", ID, nullable=False),
        sa.Column("session_shared", LONG, nullable=False),
        sa.Column("state_version", sa.BigInteger(), nullable=False),
        sa.Column("persist_seq", sa.BigInteger(), nullable=False),
        sa.Column("fence_version", sa.BigInteger(), nullable=False),
        sa.Column("fence_trace", ID, nullable=False),
        sa.Column("last_message_time", sa.BigInteger(), nullable=True),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "conversation_id", name="uk_chat_conversation"),
    )
    _index("ix_chat_conversation_1", "chat_conversation", ["organ_id", "user_id", "last_message_time"])


def _chat_message() -> None:
    _create(
        "chat_message",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("message_id", ID, nullable=False),
        sa.Column("role", ID, nullable=False),
        sa.Column("message_type", ID, nullable=False),
        sa.Column("content", LONG, nullable=False),
        sa.Column("task_id", ID, nullable=False),
        sa.Column("node_id", ID, nullable=False),
        sa.Column("round", sa.BigInteger(), nullable=False),
        sa.Column("trace_id", ID, nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("release_outcome", ID, nullable=True),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "conversation_id", "message_id", name="uk_chat_message"),
    )
    _index("ix_chat_message_1", "chat_message", ["organ_id", "conversation_id", "version", "idx"])
    _index("ix_chat_message_2", "chat_message", ["organ_id", "conversation_id", "task_id", "node_id"])


def _conversation_entity() -> None:
    _create(
        "conversation_entity",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("entity_type", ID, nullable=False),
        sa.Column("entity_id", NAME, nullable=False),
        sa.Column("display_name", LONG, nullable=False),
        sa.Column("attrs", LONG, nullable=False),
        sa.Column("task_id", ID, nullable=False),
        sa.Column("evidence_id", ID, nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=True),
        sa.Column("mentions", sa.BigInteger(), nullable=False),
        sa.Column("added_seq", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint(
            "organ_id", "conversation_id", "entity_type", "entity_id", name="uk_conversation_entity"
        ),
    )


def _diagnosis_run() -> None:
    _create(
        "diagnosis_run",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("message_id", ID, nullable=False),
        sa.Column("input_hash", ID, nullable=False),
        sa.Column("user_id", ID, nullable=False),
        sa.Column("agent_id", ID, nullable=False),
        sa.Column("task_id", ID, nullable=False),
        sa.Column("query", LONG, nullable=False),
        sa.Column("query_cut", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("intent", ID, nullable=True),
        sa.Column("turn_mode", ID, nullable=True),
        sa.Column("status", ID, nullable=False),
        sa.Column("run_state", ID, nullable=False),
        sa.Column("reason", ID, nullable=True),
        sa.Column("error_code", ID, nullable=False),
        sa.Column("release_outcome", ID, nullable=True),
        sa.Column("fallback_type", ID, nullable=True),
        sa.Column("stop_reason", ID, nullable=True),
        sa.Column("collection_state", ID, nullable=True),
        sa.Column("semantic_verdict", ID, nullable=True),
        sa.Column("stream_state", ID, nullable=True),
        sa.Column("turn_status", ID, nullable=True),
        sa.Column("limits", LONG, nullable=False),
        sa.Column("usage_json", LONG, nullable=False),
        sa.Column("answer", LONG, nullable=False),
        sa.Column("conclusion", LONG, nullable=False),
        sa.Column("published_result", LONG, nullable=False),
        sa.Column("closing_events", LONG, nullable=False),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("agent_steps", sa.BigInteger(), nullable=False),
        sa.Column("tool_calls", sa.BigInteger(), nullable=False),
        sa.Column("started_time", sa.BigInteger(), nullable=True),
        sa.Column("finished_time", sa.BigInteger(), nullable=True),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "run_id", name="uk_diagnosis_run"),
        sa.UniqueConstraint("organ_id", "message_id", name="uk_diagnosis_run_message"),
    )
    _index("ix_diagnosis_run_1", "diagnosis_run", ["organ_id", "conversation_id", "version"])
    _index("ix_diagnosis_run_2", "diagnosis_run", ["organ_id", "conversation_id", "run_state", "version"])
    _index("ix_diagnosis_run_3", "diagnosis_run", ["organ_id", "run_state", "started_time"])


def _run_trace() -> None:
    _create(
        "run_trace",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("type", ID, nullable=False),
        sa.Column("phase", ID, nullable=False),
        sa.Column("status", ID, nullable=False),
        sa.Column("started_time", sa.BigInteger(), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=True),
        sa.Column("node_id", ID, nullable=False),
        sa.Column("evidence_id", ID, nullable=False),
        sa.Column("attributes", LONG, nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "run_id", "sequence", name="uk_run_trace"),
    )


def _task_checkpoint() -> None:
    _create(
        "task_checkpoint",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("task_id", ID, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("node_id", ID, nullable=False),
        sa.Column("type", ID, nullable=False),
        sa.Column("question", LONG, nullable=False),
        sa.Column("expected_fields", LONG, nullable=False),
        sa.Column("allowed_actions", LONG, nullable=False),
        sa.Column("suggestions", LONG, nullable=False),
        sa.Column("pending_action", LONG, nullable=False),
        sa.Column("fields", LONG, nullable=False),
        sa.Column("evidence_id", ID, nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "checkpoint_id", name="uk_task_checkpoint"),
    )
    _index("ix_task_checkpoint_1", "task_checkpoint", ["organ_id", "conversation_id", "task_id"])


def _task_graph_edge() -> None:
    _create(
        "task_graph_edge",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("task_id", ID, nullable=False),
        sa.Column("from_node_id", ID, nullable=False),
        sa.Column("to_node_id", ID, nullable=False),
        sa.Column("edge_type", ID, nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "task_id", "from_node_id", "to_node_id", name="uk_task_graph_edge"),
    )


def _task_graph_node() -> None:
    _create(
        "task_graph_node",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("task_id", ID, nullable=False),
        sa.Column("node_id", ID, nullable=False),
        sa.Column("title", LONG, nullable=False),
        sa.Column("objective", LONG, nullable=False),
        sa.Column("skill_key", NAME, nullable=False),
        sa.Column("target", NAME, nullable=False),
        sa.Column("target_claimed", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("delegate_depth", sa.BigInteger(), nullable=False),
        sa.Column("depends_on", LONG, nullable=False),
        sa.Column("status", ID, nullable=False),
        sa.Column("result", LONG, nullable=False),
        sa.Column("inputs", LONG, nullable=False),
        sa.Column("outputs", LONG, nullable=False),
        sa.Column("state", LONG, nullable=False),
        sa.Column("error_code", ID, nullable=False),
        sa.Column("error_message", LONG, nullable=False),
        sa.Column("started_time", sa.BigInteger(), nullable=True),
        sa.Column("finished_time", sa.BigInteger(), nullable=True),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "task_id", "node_id", name="uk_task_graph_node"),
    )


def _task_instance() -> None:
    _create(
        "task_instance",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("task_id", ID, nullable=False),
        sa.Column("agent_id", ID, nullable=False),
        sa.Column("goal_summary", LONG, nullable=False),
        sa.Column("request", LONG, nullable=False),
        sa.Column("status", ID, nullable=False),
        sa.Column("current_node_id", ID, nullable=False),
        sa.Column("final_message", LONG, nullable=False),
        sa.Column("shared", LONG, nullable=False),
        sa.Column("prior", LONG, nullable=False),
        sa.Column("record", LONG, nullable=False),
        sa.Column("state_version", sa.BigInteger(), nullable=False),
        sa.Column("started_time", sa.BigInteger(), nullable=True),
        sa.Column("suspended_time", sa.BigInteger(), nullable=True),
        sa.Column("finished_time", sa.BigInteger(), nullable=True),
        sa.Column("trace_id", ID, nullable=False),
        sa.Column("source_message_id", ID, nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "task_id", name="uk_task_instance"),
    )
    _index("ix_task_instance_1", "task_instance", ["organ_id", "conversation_id", "finished_time"])


def _task_node_payload() -> None:
    _create(
        "task_node_payload",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("payload_id", ID, nullable=False),
        sa.Column("payload_type", ID, nullable=False),
        sa.Column("payload_data", LONG, nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "payload_id", name="uk_task_node_payload"),
    )


def _task_resume_record() -> None:
    _create(
        "task_resume_record",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("resume_id", ID, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("task_id", ID, nullable=False),
        sa.Column("message_id", ID, nullable=False),
        sa.Column("user_id", ID, nullable=False),
        sa.Column("resume_action", ID, nullable=False),
        sa.Column("acted_at", sa.BigInteger(), nullable=True),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "resume_id", name="uk_task_resume_record"),
    )


def _tool_call_record() -> None:
    _create(
        "tool_call_record",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("call_id", ID, nullable=False),
        sa.Column("task_id", ID, nullable=False),
        sa.Column("node_id", ID, nullable=False),
        sa.Column("tool_name", NAME, nullable=False),
        sa.Column("side_effect", ID, nullable=False),
        sa.Column("request", LONG, nullable=False),
        sa.Column("args_hash", ID, nullable=False),
        sa.Column("args_brief", LONG, nullable=False),
        sa.Column("idempotency_key", ID, nullable=False),
        sa.Column("live_key", ID, nullable=True),
        sa.Column("round", sa.BigInteger(), nullable=False),
        sa.Column("response", LONG, nullable=False),
        sa.Column("result_summary", LONG, nullable=False),
        sa.Column("extract_counts", LONG, nullable=False),
        sa.Column("entities", LONG, nullable=False),
        sa.Column("payload_id", ID, nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("artifact", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("call_status", ID, nullable=False),
        sa.Column("business_ok", sa.Boolean(create_constraint=False), nullable=True),
        sa.Column("empty_result", sa.Boolean(create_constraint=False), nullable=True),
        sa.Column("failure_kind", ID, nullable=False),
        sa.Column("error_code", ID, nullable=False),
        sa.Column("error_message", LONG, nullable=False),
        sa.Column("trace_id", ID, nullable=False),
        sa.Column("model_call_id", NAME, nullable=False),
        sa.Column("started_time", sa.BigInteger(), nullable=True),
        sa.Column("finished_time", sa.BigInteger(), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=True),
        sa.Column("not_before", sa.BigInteger(), nullable=True),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "call_id", name="uk_tool_call_record"),
        sa.UniqueConstraint("organ_id", "task_id", "live_key", name="uk_tool_call_record_live"),
    )
    _index("ix_tool_call_record_1", "tool_call_record", ["organ_id", "conversation_id", "version"])
    _index("ix_tool_call_record_2", "tool_call_record", ["organ_id", "conversation_id", "task_id", "node_id"])
    _index(
        "ix_tool_call_record_3",
        "tool_call_record",
        ["organ_id", "conversation_id", "live_key", "call_status"],
    )
    _index("ix_tool_call_record_4", "tool_call_record", ["organ_id", "trace_id"])


def _turn_commit() -> None:
    _create(
        "turn_commit",
        sa.Column("id", KEY, nullable=False, primary_key=True, autoincrement=True),
        sa.Column("organ_id", ID, nullable=False),
        sa.Column("conversation_id", ID, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("persist_seq", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("delete_flag", sa.SmallInteger(), nullable=False),
        sa.UniqueConstraint("organ_id", "run_id", name="uk_turn_commit"),
    )
    _index("ix_turn_commit_1", "turn_commit", ["organ_id", "conversation_id", "version"])


TABLES = (
    _chat_conversation,
    _chat_message,
    _conversation_entity,
    _diagnosis_run,
    _run_trace,
    _task_checkpoint,
    _task_graph_edge,
    _task_graph_node,
    _task_instance,
    _task_node_payload,
    _task_resume_record,
    _tool_call_record,
    _turn_commit,
)


def upgrade() -> None:
    for create in TABLES:
        create()


def downgrade() -> None:
    for create in reversed(TABLES):
        op.drop_table(create.__name__.removeprefix("_"))
