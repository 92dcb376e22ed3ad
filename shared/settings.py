"""All settings, read once at start-up from ``WARREN_`` variables and the command line.

The command line wins over the environment. A bad value, or a variable that no setting knows, stops
the start with one clear line.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from shared.errors import StartupError

PREFIX = "WARREN_"
DEFAULT_MODEL = "smollm2"

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class CommonSettings(BaseSettings):
    """What gateway and worker share."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    broker: SecretStr | None = Field(
        None, description="AMQP URL of the broker, amqp:// or amqps://; none: the embedded bus."
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: console on a terminal, JSON elsewhere."
    )
    otlp_endpoint: str | None = Field(
        None, description="Where spans go, as OTLP over HTTP; none: nowhere."
    )
    drain_grace_s: Seconds = Field(
        30, description="How long what runs may go on after SIGTERM; then workers hand it over."
    )


class GatewaySettings(CommonSettings):
    """The HTTP side."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(8000, description="Port to listen on; 0 takes a free one.")
    max_requests: int = Field(
        1024, gt=0, description="Requests in flight in one gateway; one more is answered 429."
    )
    max_body_bytes: int = Field(4 << 20, gt=0, description="Longest HTTP body; more is 413.")
    request_timeout_s: Seconds = Field(600, description="Deadline of a request.")
    max_queue_wait_s: Seconds = Field(
        60, description="A request that would wait longer for a worker is answered 429."
    )
    first_event_timeout_s: Seconds = Field(
        10, description="How long response headers wait for a worker's first word."
    )
    ping_interval_s: Seconds = Field(
        15, description="A silent stream gets an SSE comment this often."
    )
    send_timeout_s: Seconds = Field(
        30, description="A client that reads nothing for so long has left."
    )
    disconnect_grace_s: float = Field(
        5,
        ge=0,
        description="How long a request goes on after its client left, and how long the log of an "
        "ended stream with ids is kept, for the client to come back. A running one ends after the "
        "worker's `WARREN_READER_GRACE_S` at the latest.",
    )
    detach_ttl_s: Seconds = Field(
        3600, description="How long a request with `detach` may take, and its log lasts unread."
    )
    reply_retention_s: Seconds = Field(
        60, description="How long the log of a request outlives its last reader."
    )
    worker_silence_s: Seconds = Field(
        8,
        description="A stream whose worker was silent for so long goes to another one; one "
        "that was resumed waits for the broker's heartbeats.",
    )
    secret: SecretStr | None = Field(
        None,
        description="Signs stream tokens and makes ids of Idempotency-Keys, the same in all "
        "gateways; none: drawn at each start.",
    )
    keys_file: Path | None = Field(
        None, description="The API keys, as `warren keys` writes them; none: nobody needs one."
    )
    allow_anonymous: bool = Field(
        False, description="Whether to listen beyond this machine without API keys."
    )
    drain_grace_s: Seconds = Field(30, description="How long open streams may go on after SIGTERM.")
    cors_origins: CommaSeparated = Field(
        (), description="Origins allowed by CORS, separated by commas; none: CORS is off."
    )


class WorkerSettings(CommonSettings):
    """The computing side."""

    model: str = Field(
        DEFAULT_MODEL, description="A pulled name, a directory, a GGUF file or a hub id."
    )
    served_name: str | None = Field(
        None, description="The name clients use; none: what --model says, a path's last part."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and activations; auto: as in the checkpoint."
    )
    weight_format: Literal["auto", "q8_0", "q4_0", "q4_1"] = Field(
        "auto", description="Weights in 8 or 4 bits, on the CPU; auto: as --dtype."
    )
    kernels: Literal["auto", "native", "reference", "triton"] = Field(
        "auto", description="Who computes; auto: triton on a GPU, else native where that can."
    )
    batch_invariant: bool = Field(
        False,
        description="Whether a GPU computes a token the same whatever else is in its step, at the "
        "price of speed; the CPU's native kernels always do.",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    max_num_seqs: int = Field(64, gt=0, description="Sequences that run at once.")
    max_num_batched_tokens: int = Field(
        512, gt=0, description="Tokens computed in one step, prompts and decodes together."
    )
    max_seq_len: int | None = Field(
        None, gt=0, description="Longest prompt and output together; none: the model's context."
    )
    # A variable is text, and pydantic takes no text for a number among literals.
    block_size: Annotated[Literal[8, 16, 32], BeforeValidator(int)] = Field(
        16, description="Tokens in one block of the KV cache."
    )
    kv_cache_bytes: int | None = Field(
        None, gt=0, description="Size of the KV cache; none: a share of the free memory."
    )
    gpu_memory_share: float = Field(
        0.9, gt=0, le=1, description="Of a GPU's memory, for weights, steps and KV cache together."
    )
    batch_reserve: int = Field(
        4, ge=0, description="Sequences fewer that batch jobs may run, so that others find room."
    )
    batch_patience_s: Seconds = Field(
        60,
        description="A batch job that waits so long for a token goes on among interactive ones, "
        "one at a time.",
    )
    prefix_cache: bool = Field(
        True, description="Whether prompts of one tenant share the KV cache of how they begin."
    )
    max_step_ms: float = Field(
        200,
        gt=0,
        description="Longest step while answers stream: long prompts are cut to keep to it.",
    )
    compute_threads: int | None = Field(
        None, gt=0, description="CPU threads that compute; none: one for each core."
    )
    tool_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="How the model calls tools; auto: as its chat template says."
    )
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = Field(
        "auto", description="How the model thinks aloud; auto: as its chat template says."
    )
    health_port: Port | None = Field(
        None, description="Port of the worker's own /live, /health and /metrics; none: closed."
    )
    stall_timeout_s: Seconds = Field(
        60, description="A worker whose engine has work and no step for so long ends itself."
    )
    announce_interval_s: Seconds = Field(2, description="How often a worker says what it serves.")
    reader_grace_s: Seconds = Field(
        10, description="A stream without a reader for so long is cancelled, unless it is detached."
    )
    job_timeout_s: Seconds = Field(600, description="Deadline of jobs that bear none.")


_Settings = TypeVar("_Settings", bound=CommonSettings)


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}{field}".upper()


def load(settings: type[_Settings], **options: Any) -> _Settings:
    """Read settings; ``options`` are the command line's, None where it said nothing.

    Raises `StartupError` naming each wrong setting, without its value where that is secret.
    """
    known = {
        variable(field) for cls in (GatewaySettings, WorkerSettings) for field in cls.model_fields
    }
    unknown = sorted(v for v in os.environ if v.startswith(PREFIX) and v not in known)
    unknown = [v for v in unknown if not v.startswith(f"{PREFIX}TEST_")]
    if unknown:
        raise StartupError(f"unknown setting {', '.join(unknown)}")
    try:
        return settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        lines = [
            f"{variable(str(problem['loc'][0]))}: {problem['msg']}" for problem in error.errors()
        ]
        raise StartupError("; ".join(lines)) from None
