"""How long the executions of requests have taken. The time of earlier executions is their
compute_s."""

import sqlalchemy as sa
from alembic import op

revision = "run_times"
down_revision = "tenants"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage", sa.Column("run_s", sa.Float))
