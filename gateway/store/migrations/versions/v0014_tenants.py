"""The limits of tenants."""

import sqlalchemy as sa
from alembic import op

revision = "tenants"
down_revision = "api_keys"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("limits", sa.JSON, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
