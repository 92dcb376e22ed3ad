"""The uploads of a tenant are counted without a look at the uploads of other tenants."""

from alembic import op

revision = "uploads_of_tenant"
down_revision = "due_deliveries"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("uploads_of_tenant", "uploads", ["tenant"])
