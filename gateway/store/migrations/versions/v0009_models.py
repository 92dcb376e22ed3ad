"""The models that gateways have seen. The table begins with the models of recent requests."""

import time

import sqlalchemy as sa
from alembic import op

revision = "models"
down_revision = "batch_keys"
branch_labels = None
depends_on = None

_RECENT_S = 30 * 24 * 3600


def upgrade() -> None:
    models = op.create_table(
        "models",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("seen_at", sa.Float, nullable=False),
    )
    model, ended_at = sa.column("model", sa.String), sa.column("ended_at", sa.Float)
    recent = (
        sa.select(model, sa.func.max(ended_at))
        .select_from(sa.table("usage", model, ended_at))
        .where(ended_at > time.time() - _RECENT_S)
        .group_by(model)
    )
    op.execute(models.insert().from_select(["name", "seen_at"], recent))
