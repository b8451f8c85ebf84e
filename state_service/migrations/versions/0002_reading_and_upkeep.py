"""What the read side, deletion and the sweeper need: how a stream ended, and indexes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

CODE = sa.String(64).with_variant(mysql.VARCHAR(64, charset="ascii", collation="ascii_bin"), "mysql")

COLUMNS = (
    ("diagnosis_run", lambda: sa.Column("stream_end", CODE, nullable=True)),
    ("diagnosis_run", lambda: sa.Column("stream_last_sequence", sa.BigInteger, nullable=True)),
)
INDEXES = (
    ("ix_diagnosis_run_4", "diagnosis_run", ["organ_id", "user_id", "started_time"]),
    ("ix_task_graph_node_1", "task_graph_node", ["organ_id", "conversation_id"]),
    ("ix_task_graph_edge_1", "task_graph_edge", ["organ_id", "conversation_id"]),
    ("ix_task_node_payload_1", "task_node_payload", ["organ_id", "conversation_id"]),
    ("ix_task_resume_record_1", "task_resume_record", ["organ_id", "conversation_id"]),
    ("ix_run_trace_1", "run_trace", ["organ_id", "conversation_id"]),
    ("ix_diagnosis_run_unfinished", "diagnosis_run", ["run_state", "started_time"]),
    ("ix_chat_conversation_erasing", "chat_conversation", ["delete_flag", "fence_trace"]),
    ("ix_chat_conversation_age", "chat_conversation", ["delete_flag", "last_message_time"]),
    ("ix_task_node_payload_age", "task_node_payload", ["create_time"]),
    ("ix_run_trace_age", "run_trace", ["create_time"]),
)


def upgrade() -> None:
    """Each step only if an earlier, cut-short run has not done it."""
    inspector = sa.inspect(op.get_bind())
    for table, column in COLUMNS:
        if column().name not in {found["name"] for found in inspector.get_columns(table)}:
            op.add_column(table, column())
    for name, table, columns in INDEXES:
        if name not in {found["name"] for found in inspector.get_indexes(table)}:
            op.create_index(name, table, columns)


def downgrade() -> None:
    for name, table, _ in INDEXES:
        op.drop_index(name, table)
    for table, column in COLUMNS:
        op.drop_column(table, column().name)
