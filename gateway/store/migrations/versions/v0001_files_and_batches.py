"""Files, batches and the answers of batches."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("filename", sa.String(512), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("state", sa.String(16), nullable=False),
    )
    op.create_index("files_of_tenant", "files", ["tenant", "created_at", "id"])
    op.create_table(
        "batches",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(16), nullable=False),
        sa.Column("metadata", sa.JSON),
        sa.Column("output_expires_after_s", sa.BigInteger),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("in_progress_at", sa.BigInteger),
        sa.Column("finalizing_at", sa.BigInteger),
        sa.Column("completed_at", sa.BigInteger),
        sa.Column("failed_at", sa.BigInteger),
        sa.Column("expired_at", sa.BigInteger),
        sa.Column("cancelling_at", sa.BigInteger),
        sa.Column("cancelled_at", sa.BigInteger),
        sa.Column("models", sa.JSON),
        sa.Column("errors", sa.JSON),
        sa.Column("num_lines", sa.Integer, nullable=False),
        sa.Column("num_completed", sa.Integer, nullable=False),
        sa.Column("num_failed", sa.Integer, nullable=False),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("body_hash", sa.String(64)),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("lease_until", sa.Float, nullable=False),
        sa.UniqueConstraint("tenant", "idempotency_key", name="batches_idempotency_key"),
    )
    op.create_index("batches_of_tenant", "batches", ["tenant", "created_at", "id"])
    op.create_index("batches_to_run", "batches", ["status", "lease_until"])
    op.create_table(
        "batch_answers",
        sa.Column(
            "batch_id",
            sa.String(64),
            sa.ForeignKey("batches.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("line", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("is_error", sa.Boolean, nullable=False),
        sa.Column("text", sa.LargeBinary, nullable=False),
    )
