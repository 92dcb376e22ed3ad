"""The usage of the answers of batches. The usage of earlier batches is unknown."""

import sqlalchemy as sa
from alembic import op

revision = "batch_usage"
down_revision = "models"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for kind in ("input", "cached", "output", "reasoning"):
        op.add_column("batches", sa.Column(f"num_{kind}_tokens", sa.BigInteger))
