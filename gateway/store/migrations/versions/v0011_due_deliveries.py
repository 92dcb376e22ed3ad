"""The next delivery of an endpoint is found without a look at the deliveries of other endpoints."""

from alembic import op

revision = "due_deliveries"
down_revision = "batch_usage"
branch_labels = None
depends_on = None


def upgrade() -> None:
    columns = ["webhook_id", "due_at"]
    op.create_index("webhook_deliveries_of_webhook_due", "webhook_deliveries", columns)
    op.drop_index("webhook_deliveries_of_webhook", "webhook_deliveries")
