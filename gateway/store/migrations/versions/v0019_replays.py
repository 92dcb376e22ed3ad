"""The reports of replays."""

import sqlalchemy as sa
from alembic import op

revision = "replays"
down_revision = "promoted_lines"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "replays",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("report", sa.JSON, nullable=False),
    )
    op.create_index("replays_of_tenant", "replays", ["tenant", "created_at", "id"])
    op.create_index("replays_by_age", "replays", ["created_at", "id"])
