"""The API keys of batches, with the limits that they had."""

import sqlalchemy as sa
from alembic import op

revision = "batch_keys"
down_revision = "sizes_of_responses"
branch_labels = None
depends_on = None


def upgrade() -> None:
    key_id = sa.Column("key_id", sa.String(64), nullable=False, server_default="")
    op.add_column("batches", key_id)
    op.add_column("batches", sa.Column("key_limits", sa.JSON))
