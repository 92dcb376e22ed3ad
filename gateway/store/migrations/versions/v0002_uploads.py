"""Uploads, whose parts are files."""

import sqlalchemy as sa
from alembic import op

revision = "uploads"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("filename", sa.String(512), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("kept_s", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("file_id", sa.String(64)),
        sa.Column("body_hash", sa.String(64)),
    )
    op.add_column("files", sa.Column("upload_id", sa.String(64)))
    op.create_index("files_of_upload", "files", ["upload_id"])
