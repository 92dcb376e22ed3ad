"""API keys that operators manage over HTTP."""

import sqlalchemy as sa
from alembic import op

revision = "api_keys"
down_revision = "uploads_of_tenant"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("line", sa.Text, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("api_keys_of_tenant", "api_keys", ["tenant"])
