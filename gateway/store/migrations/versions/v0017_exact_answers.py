"""The answers of executions that equal requests share, and the requests that they answered."""

import sqlalchemy as sa
from alembic import op

revision = "exact_answers"
down_revision = "ended_sessions"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "exact_answers",
        sa.Column("execution_id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
    )
    op.create_index("exact_answers_of_tenant", "exact_answers", ["tenant"])
    columns = ["created_at", "execution_id", "num_bytes"]
    op.create_index("exact_answers_by_age", "exact_answers", columns)
    op.create_index("exact_answers_expiring", "exact_answers", ["expires_at"])
    op.add_column(
        "usage", sa.Column("is_cached", sa.Boolean, nullable=False, server_default=sa.false())
    )
