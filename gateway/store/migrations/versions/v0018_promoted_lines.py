"""The lines of batches that ran with interactive priority. Those of earlier batches are unknown."""

import sqlalchemy as sa
from alembic import op

revision = "promoted_lines"
down_revision = "exact_answers"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("num_promoted", sa.Integer))
