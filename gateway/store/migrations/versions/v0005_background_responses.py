"""Which responses were ordered in the background."""

import sqlalchemy as sa
from alembic import op

revision = "background_responses"
down_revision = "responses_and_conversations"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("is_background", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("responses", column)
