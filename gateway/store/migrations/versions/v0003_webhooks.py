"""Webhooks, and the deliveries to them."""

import sqlalchemy as sa
from alembic import op

revision = "webhooks"
down_revision = "uploads"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("url", sa.String(2048), nullable=False),
        sa.Column("event_types", sa.JSON, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.Column("secret", sa.String(128), nullable=False),
        sa.Column("old_secret", sa.String(128)),
        sa.Column("old_secret_until", sa.BigInteger),
    )
    op.create_index("webhooks_of_tenant", "webhooks", ["tenant"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column(
            "webhook_id",
            sa.String(64),
            sa.ForeignKey("webhooks.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("event_id", sa.String(64), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("object_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("num_tries", sa.Integer, nullable=False),
        sa.Column("due_at", sa.Float),
        sa.Column("reason", sa.String(256)),
    )
    op.create_index("webhook_deliveries_due", "webhook_deliveries", ["due_at"])
    op.create_index("webhook_deliveries_of_webhook", "webhook_deliveries", ["webhook_id"])
