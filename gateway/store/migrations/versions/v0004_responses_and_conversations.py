"""Stored responses, and conversations with their items."""

import sqlalchemy as sa
from alembic import op

revision = "responses_and_conversations"
down_revision = "webhooks"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("previous_id", sa.String(64)),
        sa.Column("conversation_id", sa.String(64)),
        sa.Column("conversation_end", sa.Integer),
        sa.Column("input", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.Column("is_pending", sa.Boolean, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
    )
    op.create_index("responses_of_tenant", "responses", ["tenant", "expires_at", "id"])
    op.create_index("responses_expiring", "responses", ["expires_at"])
    op.create_index("responses_pending", "responses", ["is_pending", "created_at"])
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("last_position", sa.Integer, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
    )
    op.create_index("conversations_of_tenant", "conversations", ["tenant", "expires_at", "id"])
    op.create_index("conversations_expiring", "conversations", ["expires_at"])
    op.create_table(
        "conversation_items",
        sa.Column(
            "conversation_id",
            sa.String(64),
            sa.ForeignKey("conversations.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("conversation_items_by_id", "conversation_items", ["conversation_id", "id"])
