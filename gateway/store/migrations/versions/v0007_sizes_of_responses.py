"""The index with which responses are counted contains their sizes."""

from alembic import op

revision = "sizes_of_responses"
down_revision = "usage"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("responses_of_tenant", "responses")
    columns = ["tenant", "expires_at", "id", "num_bytes"]
    op.create_index("responses_of_tenant", "responses", columns)
