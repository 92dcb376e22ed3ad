"""The usage of requests."""

import sqlalchemy as sa
from alembic import op

revision = "usage"
down_revision = "background_responses"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("request_id", sa.String(128), primary_key=True),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("job_class", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_takeovers", sa.Integer, nullable=False),
        sa.Column("queue_s", sa.Float, nullable=False),
        sa.Column("compute_s", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float, nullable=False),
        sa.Column("day", sa.String(10), nullable=False),
    )
    op.create_index("usage_of_tenant", "usage", ["tenant", "ended_at"])
    op.create_index("usage_by_time", "usage", ["ended_at"])
