"""The sessions of the console that have ended before their time."""

import sqlalchemy as sa
from alembic import op

revision = "ended_sessions"
down_revision = "run_times"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ended_sessions",
        sa.Column("subject", sa.String(80), primary_key=True),
        sa.Column("ended_at", sa.Float, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
