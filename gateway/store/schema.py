"""The schema of the database. `migrations` creates it; a test compares the two.

All times are Unix times in seconds.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

METADATA = MetaData()

FILES = Table(
    "files",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("filename", String(512), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    # uploading: the bytes are being written, or are complete and hidden until the end of the batch
    # or the upload that wrote them. part: they are a part of an upload. processed: the file exists.
    # deleted: it is being removed.
    Column("state", String(16), nullable=False),
    Column("upload_id", String(64)),
    Index("files_of_tenant", "tenant", "created_at", "id"),
    Index("files_of_upload", "upload_id"),
)

UPLOADS = Table(
    "uploads",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("filename", String(512), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    # Of the file, from its completion.
    Column("kept_s", BigInteger, nullable=False),
    # pending, completed or cancelled
    Column("state", String(16), nullable=False),
    Column("file_id", String(64)),
    # Of the request that completed it.
    Column("body_hash", String(64)),
    Index("uploads_of_tenant", "tenant"),
)

BATCHES = Table(
    "batches",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("completion_window", String(16), nullable=False),
    Column("metadata", JSON),
    Column("output_expires_after_s", BigInteger),
    Column("status", String(16), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("in_progress_at", BigInteger),
    Column("finalizing_at", BigInteger),
    Column("completed_at", BigInteger),
    Column("failed_at", BigInteger),
    Column("expired_at", BigInteger),
    Column("cancelling_at", BigInteger),
    Column("cancelled_at", BigInteger),
    Column("models", JSON),
    Column("errors", JSON),
    Column("num_lines", Integer, nullable=False),
    Column("num_completed", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("idempotency_key", String(255)),
    Column("body_hash", String(64)),
    # The fencing token: it grows with each claim, and a gateway writes only under its own.
    Column("fence", Integer, nullable=False),
    Column("lease_until", Float, nullable=False),
    # The API key of the order; empty without a key.
    Column("key_id", String(64), nullable=False, server_default=""),
    # The limits of the key at the order, which hold after the key is revoked.
    Column("key_limits", JSON),
    # The sums over the answers; none of batches from before they were counted.
    Column("num_input_tokens", BigInteger),
    Column("num_cached_tokens", BigInteger),
    Column("num_output_tokens", BigInteger),
    Column("num_reasoning_tokens", BigInteger),
    # The lines that ran as interactive jobs; null of batches from before they were counted.
    Column("num_promoted", Integer),
    UniqueConstraint("tenant", "idempotency_key", name="batches_idempotency_key"),
    Index("batches_of_tenant", "tenant", "created_at", "id"),
    Index("batches_to_run", "status", "lease_until"),
)

UNENDED = ("validating", "in_progress", "finalizing", "cancelling")
"""The statuses of batches that have not ended."""

USAGE = Table(
    "usage",
    METADATA,
    # Publishers choose the ids of their requests.
    Column("tenant", String(128), primary_key=True),
    Column("request_id", String(128), primary_key=True),
    Column("key_id", String(64), nullable=False),
    Column("model", String(128), nullable=False),
    Column("job_class", String(16), nullable=False),
    Column("outcome", String(64), nullable=False),
    # Of several records of a request, the record with the highest attempt is kept.
    Column("attempt", Integer, nullable=False),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_cached_tokens", BigInteger, nullable=False),
    Column("num_output_tokens", BigInteger, nullable=False),
    Column("num_takeovers", Integer, nullable=False),
    Column("queue_s", Float, nullable=False),
    Column("compute_s", Float, nullable=False),
    # None in records of old workers, whose compute_s is this time.
    Column("run_s", Float),
    Column("ended_at", Float, nullable=False),
    # Whether the answer was computed for another request.
    Column("is_cached", Boolean, nullable=False, server_default=false()),
    # The day of ended_at in UTC, as 2026-12-31.
    Column("day", String(10), nullable=False),
    Index("usage_of_tenant", "tenant", "ended_at"),
    Index("usage_by_time", "ended_at"),
)

ANSWERS = Table(
    "batch_answers",
    METADATA,
    Column("batch_id", String(64), ForeignKey(BATCHES.c.id, ondelete="CASCADE"), primary_key=True),
    # The number of the line in the input file, from 1.
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("is_error", Boolean, nullable=False),
    # The line of the output file or of the error file, without its end.
    Column("text", LargeBinary, nullable=False),
)

WEBHOOKS = Table(
    "webhooks",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("name", String(128), nullable=False),
    Column("url", String(2048), nullable=False),
    Column("event_types", JSON, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("secret", String(128), nullable=False),
    Column("old_secret", String(128)),
    Column("old_secret_until", BigInteger),
    Index("webhooks_of_tenant", "tenant"),
)

DELIVERIES = Table(
    "webhook_deliveries",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("webhook_id", String(64), ForeignKey(WEBHOOKS.c.id, ondelete="CASCADE"), nullable=False),
    Column("event_id", String(64), nullable=False),
    Column("type", String(64), nullable=False),
    Column("object_id", String(64), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    # The fencing token: it grows with each claim, and a gateway writes only under its own.
    Column("num_tries", Integer, nullable=False),
    # When the next try may begin; while a try is under way, the end of its lease. None: dead.
    Column("due_at", Float),
    Column("reason", String(256)),
    Index("webhook_deliveries_due", "due_at"),
    Index("webhook_deliveries_of_webhook_due", "webhook_id", "due_at"),
)

RESPONSES = Table(
    "responses",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("previous_id", String(64)),
    Column("conversation_id", String(64)),
    # The position of the conversation's last item before the response.
    Column("conversation_end", Integer),
    # A JSON array of items.
    Column("input", LargeBinary, nullable=False),
    # The response as JSON, once it has ended.
    Column("body", LargeBinary),
    Column("is_pending", Boolean, nullable=False),
    # The gateway that began it.
    Column("owner", String(64), nullable=False),
    Column("is_background", Boolean, nullable=False, server_default=false()),
    # The size of input and body.
    Column("num_bytes", BigInteger, nullable=False),
    # It contains all that the limits of a tenant need: the rows are large.
    Index("responses_of_tenant", "tenant", "expires_at", "id", "num_bytes"),
    Index("responses_expiring", "expires_at"),
    Index("responses_pending", "is_pending", "created_at"),
)

CONVERSATIONS = Table(
    "conversations",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("metadata", JSON, nullable=False),
    # The position of the last item that was ever added.
    Column("last_position", Integer, nullable=False),
    # The size of its items.
    Column("num_bytes", BigInteger, nullable=False),
    Index("conversations_of_tenant", "tenant", "expires_at", "id"),
    Index("conversations_expiring", "expires_at"),
)

CONVERSATION_ITEMS = Table(
    "conversation_items",
    METADATA,
    Column(
        "conversation_id",
        String(64),
        ForeignKey(CONVERSATIONS.c.id, ondelete="CASCADE"),
        primary_key=True,
    ),
    # Positions count from 1, in the order of the conversation; the positions of deleted items are
    # not used again.
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("id", String(64), nullable=False),
    # The item as JSON.
    Column("body", LargeBinary, nullable=False),
    Index("conversation_items_by_id", "conversation_id", "id"),
)

EXACT_ANSWERS = Table(
    "exact_answers",
    METADATA,
    Column("execution_id", String(64), primary_key=True),
    Column("tenant", String(128), nullable=False),
    # The log as the message `Restored`. None: it is a blob.
    Column("body", LargeBinary),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Index("exact_answers_of_tenant", "tenant"),
    Index("exact_answers_by_age", "created_at", "execution_id", "num_bytes"),
    Index("exact_answers_expiring", "expires_at"),
)

REPLAYS = Table(
    "replays",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("created_at", Float, nullable=False),
    # A `gateway.api.routes.replays.ReplayReport`: only numbers, nothing of requests and answers.
    Column("report", JSON, nullable=False),
    Index("replays_of_tenant", "tenant", "created_at", "id"),
    Index("replays_by_age", "created_at", "id"),
)

MODELS = Table(
    "models",
    METADATA,
    Column("name", String(128), primary_key=True),
    # By any gateway.
    Column("seen_at", Float, nullable=False),
)

TENANTS = Table(
    "tenants",
    METADATA,
    Column("tenant", String(128), primary_key=True),
    # The fields of `gateway.intake.keys.tenant_limits.TenantLimits` that are not None.
    Column("limits", JSON, nullable=False),
    # Grows with each change.
    Column("revision", BigInteger, nullable=False),
)

ENDED_SESSIONS = Table(
    "ended_sessions",
    METADATA,
    # A session, a person, or everyone: see `gateway.sign_in.endings`.
    Column("subject", String(80), primary_key=True),
    # The sessions that began until then have ended.
    Column("ended_at", Float, nullable=False),
    # Grows with each change, so that gateways notice it.
    Column("revision", BigInteger, nullable=False),
)

API_KEYS = Table(
    "api_keys",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("tenant", String(128), nullable=False),
    # The key in the format of a file of keys, which contains its hash.
    Column("line", Text, nullable=False),
    # Grows with each change, so that gateways notice it.
    Column("revision", BigInteger, nullable=False),
    Index("api_keys_of_tenant", "tenant"),
)
