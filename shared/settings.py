"""All settings, read once at start-up from ``WARREN_`` variables and the command line.

The command line takes precedence over the environment. An invalid value or an unknown variable
stops the process at start-up with a one-line error, which names the option or the variable.
Variables that Kubernetes injects for a Service are ignored.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from shared.errors import StartupError

PREFIX = "WARREN_"
CLIENT_VARIABLES = {"url": "WARREN_URL", "api_key_file": "WARREN_API_KEY_FILE"}
"""Variables that the commands that call a gateway read. They are no settings of a service."""
NOT_AVAILABLE = frozenset(
    {
        "enable_lora",
        "lora",
        "lora_adapters",
        "lora_modules",
        "max_loras",
        "mmproj",
        "num_shard",
        "pipeline_parallel_size",
        "tensor_parallel_size",
        "trust_remote_code",
    }
)
"""Options of other servers for what Warren does not do, as ``docs/migrating.md`` lists them."""
REMOVED = {
    "affinity": "it is always on",
    "announce_interval_s": "it is always 2",
    "batch_lease_s": "it is always 15",
    "batch_patience_s": "it is always 60",
    "batch_reserve": "it is a sixteenth of max_num_seqs",
    "batch_window": "it follows from the workers of the model",
    "block_size": "it is always 16",
    "broker_file": "set broker=file:PATH",
    "database_url_file": "set database_url=file:PATH",
    "engine_key_file": "set engine_key=file:PATH",
    "file_retention_s": "set retention_days, which responses have, too",
    "files_credentials_file": "set AWS_SHARED_CREDENTIALS_FILE",
    "first_event_timeout_s": "it is always 10",
    "health_host": "set health_port=ADDRESS:PORT",
    "job_log_level": "set log_level=notice to write only the warnings about requests and jobs",
    "job_timeout_s": "set request_timeout_s, which workers apply, too",
    "max_batch_lines": "it follows from max_file_bytes",
    "max_bytes_in_flight": "it is 16 times max_body_bytes",
    "max_connections": "it is max_requests and 1024 more",
    "max_connections_per_address": "it follows from max_requests and the other addresses",
    "max_cpu_isa": "set ATEN_CPU_CAPABILITY=avx2, which PyTorch reads, too",
    "max_detached": "it is always 500, unless a key or a tenant has another limit",
    "max_draft_tokens": "it is always 15",
    "max_tenant_file_bytes": "set max_tenant_bytes, which responses have, too",
    "max_tenant_response_bytes": "set max_tenant_bytes, which files have, too",
    "max_tenant_responses": "it follows from max_tenant_bytes",
    "max_waiting_jobs": "it is always 256",
    "open_metrics": "/metrics needs an API key as long as a key has the scope metrics",
    "otlp_metrics_endpoint": "set otlp_endpoint, which receives metrics, too",
    "ping_interval_s": "it is always 15",
    "prefix_cache": "it is always on",
    "reader_grace_s": "it follows from disconnect_grace_s, which workers apply, too",
    "reply_retention_s": "it is always 60",
    "response_retention_days": "set retention_days, which files have, too",
    "secret_file": "set secret=file:PATH",
    "send_timeout_s": "it is always 30",
    "stream_events_per_s": "it is always 10; a request may set stream_options.each_token",
    "usage_retention_days": "set retention_days=30,usage=DAYS",
    "usage_retention_s": "set retention_days=30,usage=DAYS",
    "webhook_max_tries": "it is always 16",
    "webhook_retry_s": "it is always 5",
    "worker_silence_s": "it is always 8",
}
"""Settings of earlier versions, and what replaces each of them."""
_EXPECTED = {
    "int_parsing": "an integer",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}
"""What a setting has to be, by the type of pydantic's error."""
DEFAULT_MODEL = "smollm2"
MIN_SECRET_BYTES = 32
_FILE = "file:"
"""What stands before the path in the value of a secret that is in a file."""

_CONFIG = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Days = Annotated[float, Field(gt=0)]
DAY_S = 24 * 3600.0
IDLE_CONNECTIONS = 1024
"""Connections of a gateway beside those of the requests that it handles."""


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _split_weights(value: object) -> object:
    """The weights by name, from ``name=weight`` separated by commas."""
    if not isinstance(value, str):
        return value
    pairs = (part.rpartition("=") for part in value.split(",") if part.strip())
    return {name.strip(): weight.strip() for name, _, weight in pairs}


Weights = Annotated[
    dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]],
    NoDecode,
    BeforeValidator(_split_weights),
]
CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Networks = Annotated[tuple[IPv4Network | IPv6Network, ...], NoDecode, BeforeValidator(_split)]


class Listener(NamedTuple):
    """Where a server listens."""

    host: str
    port: Port


def _listener(value: object) -> object:
    """The parts of ``PORT``, for this machine alone, or of ``ADDRESS:PORT``."""
    if not isinstance(value, str | int):
        return value
    host, _, port = str(value).rpartition(":")
    return Listener(host.strip("[]") or "127.0.0.1", port)  # type: ignore[arg-type]  # validated


@dataclass(frozen=True)
class RetentionDays:
    """For how many days a gateway keeps what it has stored."""

    files: Days = 30.0
    """Files, ended batches, stored responses, and conversations without changes."""
    usage: Days = 400.0
    """The usage records of requests."""
    answers: Days = 1.0
    """The answers of requests that are computed once."""

    def __str__(self) -> str:
        return f"{self.files:g},usage={self.usage:g},answers={self.answers:g}"


_KINDS_KEPT = ("", "usage", "answers")


def _retention(value: object) -> object:
    """The days of each kind, from ``DAYS,usage=DAYS,answers=DAYS``, of which each may be
    missing."""
    if not isinstance(value, str | int | float):
        return value
    parts = [part.strip().rpartition("=") for part in str(value).split(",")]
    days = {name.strip(): number.strip() for name, _, number in parts}
    if len(days) < len(parts) or not days.keys() <= set(_KINDS_KEPT):
        raise PydanticCustomError(
            "no_retention", "expected DAYS, usage=DAYS or answers=DAYS, separated by commas"
        )
    return {name or "files": number for name, number in days.items()}


def _read_secret(value: object) -> object:
    """The secret itself, or the secret in the file that ``file:PATH`` names."""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if not isinstance(value, str) or not value.startswith(_FILE):
        return value
    path = Path(value.removeprefix(_FILE)).expanduser()
    try:
        secret = secret_in(path)
    except StartupError as error:
        raise PydanticCustomError("secret_unreadable", "{why}", {"why": str(error)}) from None
    if not secret.isprintable():
        raise PydanticCustomError(
            "secret_unreadable", "{path} does not contain one line of text", {"path": str(path)}
        )
    return secret


Secret = Annotated[SecretStr, BeforeValidator(_read_secret)]
"""A value that is never shown, or ``file:PATH`` of a file that contains it."""


def _check_secret(secret: SecretStr) -> SecretStr:
    if len(secret.get_secret_value().encode()) < MIN_SECRET_BYTES:
        raise PydanticCustomError(
            "secret_too_short",
            "the secret must have at least 32 bytes; `openssl rand -hex 32` generates one",
        )
    return secret


_NOTICE = re.compile(r"(aws|gcp|azure)(=https?://[^\s/?#]+/?)?|signal:SIG(USR1|USR2|HUP)")


def _check_notice(place: str) -> str:
    if place and not _NOTICE.fullmatch(place) and not Path(place).is_absolute():
        raise PydanticCustomError(
            "no_place_of_notice",
            "expected aws, gcp or azure, which may be followed by =http://ADDRESS; "
            "signal:SIGUSR1, signal:SIGUSR2 or signal:SIGHUP; or an absolute path",
        )
    return place


_SERVICE_VARIABLE = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def _is_of_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes injects this variable for a Service named ``warren`` or ``warren-...``.

    Its ``WARREN_PORT=tcp://10.0.0.1:80`` is not the gateway's port.
    """
    is_address = name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(value) is not None
    return is_address or _SERVICE_VARIABLE.fullmatch(name) is not None


class _Variables(EnvSettingsSource):
    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {
            name: value
            for name, value in super()._load_env_vars().items()
            if value is None or not _is_of_kubernetes(name.upper(), value)
        }


class CommonSettings(BaseSettings):
    """Settings that the gateway and the worker share."""

    model_config = _CONFIG

    broker: Secret | None = Field(
        None,
        description="AMQP URL of the RabbitMQ broker, amqp:// or amqps://; for a cluster the URLs "
        "of its nodes, separated by commas. It contains a password, and options are visible in the "
        "process list: name a file that contains the URL, such as a mounted secret, with "
        "file:PATH. Unset: an in-memory bus, which only `warren serve` supports.",
    )
    trusted_users: CommaSeparated = Field(
        ("gateway", "worker", "operator"),
        description="Comma-separated users of the broker whose messages may name any tenant and "
        "any request: those of gateways, workers and operators. Any other user publishes under "
        "its own name. The user of WARREN_BROKER is always trusted. Add only users of Warren's "
        "own processes.",
    )
    log_level: Literal["debug", "info", "notice", "warning", "error"] = Field(
        "info",
        description="Least severe level that is logged. notice: like info, but of the lines about "
        "single requests and jobs only the warnings, such as take-overs, moved jobs, dead letters, "
        "and answers 500 and 503. Use debug for troubleshooting.",
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto",
        description="Format of log lines. auto: human-readable on a terminal, JSON otherwise.",
    )
    audit_file: Path | None = Field(
        None,
        description="File to which refused logins and administrative acts are appended as JSON "
        "lines. They are also written to the log by the logger `warren.audit`, whatever "
        "WARREN_LOG_LEVEL is. Set it to keep them apart from other log lines.",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="OTLP/HTTP endpoint that receives trace spans, and from gateways metrics with "
        "the names of OpenTelemetry's conventions for generative AI. OTEL_METRICS_EXPORTER=none "
        "or OTEL_TRACES_EXPORTER=none leaves the one or the other out. Unset: nothing is exported. "
        "/metrics is always served.",
    )
    metrics_tenants: int = Field(
        0,
        ge=0,
        description="Number of tenants that have their own metrics: those with the most requests. "
        "All others are counted as the tenant `other`. The default keeps names of tenants out of "
        "/metrics, which needs no API key unless a key has the scope `metrics`. Raise it to see "
        "single tenants on dashboards.",
    )
    request_timeout_s: Seconds = Field(
        600,
        description="Seconds after which an unfinished request fails with `deadline_exceeded`. A "
        "worker applies it, without the time in the queue, to jobs of AMQP programs and of `warren "
        "batch` that set no deadline. Raise it for very long answers.",
    )
    disconnect_grace_s: float = Field(
        5,
        ge=0,
        description="Seconds for which a client may resume a stream with event ids after its "
        "connection is lost; meanwhile the request continues, or the log of a finished stream is "
        "kept. Set the same value on gateways and workers, which cancel a request that has had no "
        "reader for 5 seconds longer, and for at least 10. Raise it for clients that take longer "
        "to reconnect; 0 cancels at once.",
    )
    drain_grace_s: Seconds = Field(
        30,
        description="Seconds that running jobs and open streams may take to finish after "
        "SIGTERM; a worker then returns unfinished jobs to the queue. Keep it below the "
        "orchestrator's stop timeout.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Options take precedence over variables; there are no other sources."""
        return init_settings, _Variables(settings_cls)


class GatewaySettings(CommonSettings):
    """Settings of the gateway."""

    host: str = Field(
        "127.0.0.1",
        description="Address on which the gateway listens. 0.0.0.0 accepts requests from other "
        "machines and requires WARREN_KEYS_FILE or WARREN_ALLOW_ANONYMOUS.",
    )
    port: Port = Field(8000, description="TCP port on which the gateway listens. 0: any free port.")
    max_requests: int = Field(
        1024,
        gt=0,
        description="Maximum number of requests that one gateway handles at once; further requests "
        "are answered 429. With API keys, the last eighth is kept for tenants that hold less than "
        "an equal share. It has 1024 open connections more; if the process's limit of open "
        "files is lower, it applies instead. Lower it to save memory.",
    )
    max_body_bytes: int = Field(
        4 << 20,
        gt=0,
        description="Maximum size of an HTTP request body in bytes; a larger body is answered "
        "413. The bodies that one gateway handles at once, and the stored objects that it reads "
        "for requests, may have 16 times as many bytes together. Raise it if long conversations "
        "are refused, and with it what a proxy before the gateway allows.",
    )
    require_worker: bool = Field(
        False,
        description="Answer 503 with `Retry-After` at once if no worker of the model lives, "
        "instead of letting the request wait for one until its deadline. Detached requests, "
        "requests of the class `batch` and batches wait all the same. Set it if clients have "
        "somewhere else to go.",
    )
    max_queue_wait_s: Seconds = Field(
        60,
        description="Longest acceptable wait for a worker, in seconds; a request that is estimated "
        "to wait longer is answered 429. Lower it to shed load earlier.",
    )
    detach_ttl_s: Seconds = Field(
        3600,
        description="Deadline of a request with `detach`, in seconds, and how long its log is "
        "kept without a reader. Raise it if clients come back for their answers later than this.",
    )
    secret: Annotated[Secret, AfterValidator(_check_secret)] | None = Field(
        None,
        description="At least 32 random bytes, or file:PATH of a file that contains them, from "
        "which the gateway derives the keys that sign stream tokens and turn Idempotency-Keys into "
        "request ids. Set the same value on all gateways. Unset: a random value at each start, so "
        "that tokens and Idempotency-Keys are valid only at one gateway, until it restarts.",
    )
    receipt_keys_file: Path | None = Field(
        None,
        description="File of Ed25519 keys in PEM that sign receipts, the current one first, such "
        "as a mounted secret. Set the same keys on all gateways. Unset: requests for a receipt "
        "are refused.",
    )
    audit_share: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Share of the finished answers, from 0 to 1, that another worker computes "
        "again in idle slots and compares token by token. Set it to find broken memory, wrong "
        "checkpoints and workers with other options: 0.01 costs less than a thousandth of the "
        "fleet's work.",
    )
    keys_file: Path | None = Field(
        None,
        description="File of API keys, managed with `warren keys`. Changes take effect without a "
        "restart. Unset: requests need no API key. Set it before other machines can reach the "
        "gateway.",
    )
    oidc_file: Path | None = Field(
        None,
        description="JSON file with the OpenID provider with which people sign in to the console, "
        "and with their roles, such as a mounted secret. It needs WARREN_KEYS_FILE. Unset: the "
        "console asks for an API key.",
    )
    allow_anonymous: bool = Field(
        False,
        description="Allow the gateway to listen on addresses other than loopback without API "
        "keys. Set it only if a proxy before the gateway authenticates clients, or all of the "
        "network is trusted.",
    )
    data_dir: Path = Field(
        Path("~/.local/share/warren"),
        description="Directory of files, and of the database if WARREN_DATABASE_URL is not set. "
        "It is created when something is stored for the first time. In a container, set it to a "
        "volume.",
    )
    database_url: Secret | None = Field(
        None,
        description="URL of the PostgreSQL database of files, batches, responses and "
        "conversations, postgresql://USER:PASSWORD@HOST/NAME, with libpq's parameters, such as "
        "?sslmode=verify-full, or file:PATH of a file that contains it. Set the same one on all "
        "gateways. Unset: a SQLite database in WARREN_DATA_DIR, which only gateways of one machine "
        "can share.",
    )
    files_url: str | None = Field(
        None,
        description="URL of the storage of files: s3://, gs://, az:// or file:///, such as "
        "s3://BUCKET/PREFIX. Set the same one on all gateways. Unset: a directory in "
        "WARREN_DATA_DIR.",
    )
    max_file_bytes: int = Field(
        200 << 20,
        gt=0,
        description="Maximum size of an uploaded file in bytes. A batch has at most one request "
        "for each 4 KiB of it: 51,200. Raise it for larger batches, and with it what a proxy "
        "before the gateway allows.",
    )
    max_tenant_bytes: int = Field(
        8 << 30,
        gt=0,
        description="Maximum total size of the files of one tenant in bytes; its stored responses "
        "and conversations may have as much again. A file beyond it is refused. The least recently "
        "changed responses and conversations beyond it are deleted at once, and once a minute "
        "those beyond one for each 64 KiB of it. Lower it if the storage is small.",
    )
    retention_days: Annotated[RetentionDays, NoDecode, BeforeValidator(_retention)] = Field(
        RetentionDays(),
        description="Days after which files, ended batches and stored responses are deleted, and "
        "conversations without changes, unless a request says otherwise; `usage=`: days after "
        "which the usage record of a request is deleted; `answers=`: days after which the answer "
        "of a request that was computed once is deleted. What is missing has its default. Lower "
        "it to save storage, or if your rules on privacy demand it; set `usage=` to what your "
        "accounting needs.",
    )
    store_responses: bool = Field(
        True,
        description="Store the responses of `/v1/responses` whose requests do not set `store`, as "
        "OpenAI does. Turn it off to store nothing unless a client asks for it.",
    )
    exact_cache: bool = Field(
        False,
        description="Compute equal requests of a tenant once if they are greedy or have a seed, "
        "as if each had the header `x-warren-cache: exact`; `x-warren-cache: off` declines it. "
        "Answers are kept as long as `answers=` in WARREN_RETENTION_DAYS says, and all of them "
        "have at most an eighth of WARREN_MAX_TENANT_BYTES. Set it if clients often send the same "
        "requests.",
    )
    webhook_networks: Networks = Field(
        (),
        description="Comma-separated private networks that webhooks may reach, such as 10.0.0.0/8; "
        "http:// is allowed there only. Unset: public addresses only.",
    )
    prices_file: Path | None = Field(
        None,
        description="JSON file with the prices of models, by which /v1/usage states costs. Unset: "
        "it states none.",
    )
    drain_grace_s: Seconds = Field(
        30,
        description="Seconds that open streams may take to finish after SIGTERM. Keep it below "
        "the orchestrator's stop timeout.",
    )
    cors_origins: CommaSeparated = Field(
        (),
        description="Comma-separated origins that CORS allows. Unset: CORS is disabled. Set it if "
        "web pages of other sites call the gateway.",
    )

    @property
    def max_connections(self) -> int:
        """The open connections of one gateway: idle clients keep theirs for a while."""
        return self.max_requests + IDLE_CONNECTIONS

    @property
    def max_exact_cache_bytes(self) -> int:
        """The stored answers of requests that are computed once, of all tenants, in bytes."""
        return self.max_tenant_bytes // 8

    @property
    def max_bytes_in_flight(self) -> int:
        """The bodies that one gateway handles at once, and the stored objects that it reads for
        requests, in bytes."""
        return 16 * self.max_body_bytes


def batch_reserve(max_num_seqs: int) -> int:
    """The slots of so many that batch jobs leave to interactive jobs: a sixteenth, and at least
    one."""
    return min(max(1, max_num_seqs // 16), max_num_seqs - 1)


class ModelSettings(BaseSettings):
    """How a worker, or a program with `warren.LLM`, loads a model and runs its requests."""

    model_config = _CONFIG

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """A program passes options. The environment is read by services alone."""
        return (init_settings,)

    model: str = Field(
        DEFAULT_MODEL,
        description="Model to serve: a known name, a model directory, a GGUF file or a Hugging "
        "Face Hub id, with or without @REVISION.",
    )
    served_name: str | None = Field(
        None,
        description="Model name that clients use. Unset: the value of WARREN_MODEL without a "
        "revision, or the last component of a path. Set it if workers load the model from "
        "different paths.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of weights and activations. auto: that of the checkpoint. Set "
        "bfloat16 to halve the memory of a float32 checkpoint.",
    )
    weight_format: Literal["auto", "q8_0", "q4_0", "q4_1"] = Field(
        "auto",
        description="Quantization of the weights. It saves memory and bandwidth at "
        "some loss of quality; a GPU expands the embedding and the output projection. auto: no "
        "quantization; weights have WARREN_DTYPE. Set it to fit a larger model or to decode "
        "faster.",
    )
    kv_dtype: Literal["auto", "float8"] = Field(
        "auto",
        description="Data type of the keys and values in the KV cache. auto: that of activations. "
        "float8 takes 8 bits instead of 16, at some loss of quality, and is for the CPU. Set it "
        "for more or longer sequences in the same memory.",
    )
    kernels: Literal["auto", "native", "native-int16", "reference", "triton"] = Field(
        "auto",
        description="Kernel implementation. auto: triton on a GPU; native on the CPU if it "
        "supports the model, otherwise reference. native-int16: native, with activations of 16 "
        "bits instead of 8 where weights are quantized, which is slower and more precise. Set "
        "reference to find out whether a kernel causes a problem.",
    )
    batch_invariant: bool = Field(
        False,
        description="Make a token's logits on a GPU independent of the other tokens in its "
        "step, which is slower. Set it for reproducible output. The CPU's native kernels "
        "are always batch invariant.",
    )
    device: str = Field(
        "auto",
        description="Device that runs the model: auto, cpu, cuda or cuda:N. auto: a GPU if there "
        "is one. Set it if there are several GPUs.",
    )
    max_num_seqs: int = Field(
        64,
        gt=0,
        description="Maximum number of sequences in a batch. Raise it for throughput; each "
        "sequence needs room in the KV cache. A sixteenth of them, and at least one, is kept for "
        "interactive jobs.",
    )
    max_num_batched_tokens: int = Field(
        512,
        gt=0,
        description="Maximum number of tokens in one step, prefill and decode together. Raise "
        "it for prefill throughput, lower it for shorter steps.",
    )
    max_seq_len: int | None = Field(
        None,
        gt=0,
        description="Maximum length of prompt and output together, in tokens. Unset: the model's "
        "context length. Lower it to refuse long requests, or if the KV cache is too small for "
        "the whole context.",
    )
    kv_cache_bytes: int | None = Field(
        None,
        gt=0,
        description="Size of the KV cache in bytes. Unset: derived from the free memory. Set it if "
        "other processes need memory on the same device.",
    )
    gpu_memory_share: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Fraction of the GPU's memory that weights, activations and KV cache use "
        "together. Lower it if other processes use the GPU.",
    )
    tenant_weights: Weights = Field(
        {},
        description="Weights of tenants, as `name=weight` separated by commas. While several "
        "tenants wait, one with weight 3 gets three times as many tokens as one with weight 1, "
        "the default. Set the same value on all workers of a model.",
    )
    max_step_ms: float = Field(
        200,
        gt=0,
        description="Target for the longest step while answers stream, in milliseconds; long "
        "prompts are split into chunks to meet it. Lower it for smoother streams, raise it for "
        "a shorter time to first token of long prompts.",
    )
    compute_threads: int | None = Field(
        None,
        gt=0,
        description="Number of CPU threads for computation. Unset: one per available core, "
        "or as many as the CPU quota of the control group allows. Lower it if other processes need "
        "the CPU.",
    )
    tool_parser: Literal[
        "auto",
        "none",
        "deepseek_v3",
        "functiongemma",
        "gemma4",
        "glm45",
        "harmony",
        "hermes",
        "kimi_k2",
        "llama3_json",
        "mistral",
        "pythonic",
        "qwen3_coder",
    ] = Field(
        "auto",
        description="Format in which the model writes tool calls. auto: derived from its chat "
        "template. Set it if calls arrive as text.",
    )
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "gemma4", "harmony", "qwen3"] = Field(
        "auto",
        description="Format in which the model writes its reasoning. auto: derived from its chat "
        "template. Set it if reasoning arrives as content.",
    )

    @property
    def batch_reserve(self) -> int:
        """The slots of sequences that batch jobs leave to interactive jobs, which a program does
        not have."""
        return 0


class WorkerSettings(CommonSettings, ModelSettings):
    """Settings of the worker."""

    engine: Literal["own", "vllm", "sglang", "llama-server", "trtllm", "openai"] = Field(
        "own",
        description="Engine that runs the model: Warren's own, or a server of another kind. "
        "WARREN_MODEL then names the tokenizer and the chat template. Set it for models that "
        "need several GPUs, or that the server runs faster.",
    )
    engine_url: str | None = Field(
        None,
        description="Base URL of the engine's server, without /v1. Unset: the server's usual port "
        "on this machine. Set it if the server runs elsewhere.",
    )
    engine_command: str | None = Field(
        None,
        description="Command that starts the engine's server, such as `vllm serve MODEL`. The "
        "worker starts it again when it ends, and ends it with itself. Unset: the server runs "
        "already.",
    )
    engine_key: Secret | None = Field(
        None,
        description="API key that the engine's server requires, or file:PATH of a file that "
        "contains it. Set it if the server demands a key.",
    )
    require_same_numerics: bool = Field(
        False,
        description="Let a stream that has begun wait, until its deadline, for a worker with the "
        "numerics (device, data type, kernels) that it began with, rather than continue it here. "
        "Set it on all workers of a model if a change within a text is worse than a delay.",
    )
    health_port: Annotated[Listener | None, NoDecode, BeforeValidator(_listener)] = Field(
        None,
        description="TCP port of the worker's /live, /health and /metrics, which need no key, for "
        "this machine alone, or ADDRESS:PORT, such as 0.0.0.0:8001 for all machines. Unset: they "
        "are not served. Set it for probes and Prometheus.",
    )
    stall_timeout_s: Seconds = Field(
        60,
        description="Seconds without a completed step, while there is work, or without a turn of "
        "the event loop, after which the worker exits so that its jobs are redelivered. Raise it "
        "if a step may take longer, as on a slow CPU.",
    )
    interruption_notice: Annotated[str, AfterValidator(_check_notice)] = Field(
        "",
        description="Where this machine learns that it ends soon: aws, gcp or azure for the "
        "metadata of a spot instance, or for example aws=http://127.0.0.1:1338 where the metadata "
        "has another address; signal:SIGUSR1, SIGUSR2 or SIGHUP for a signal to the worker; or the "
        "absolute path of a file that appears then. The worker hands its jobs over at once, "
        "without WARREN_DRAIN_GRACE_S. Unset: nowhere. Set it on machines that may be taken away.",
    )

    @property
    def batch_reserve(self) -> int:
        return batch_reserve(self.max_num_seqs)


_Settings = TypeVar("_Settings", bound=CommonSettings)


def secret_in(path: Path) -> str:
    """The secret in a file. Raises `StartupError`."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise StartupError(f"{path} cannot be read: {reason}") from None


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}{field}".upper()


def option(field: str) -> str:
    """The command-line option of a setting."""
    return f"--{field.replace('_', '-')}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown ``word``, with what was probably meant; may be empty."""
    close = get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def load(settings: type[_Settings], **options: Any) -> _Settings:
    """Load settings. ``options`` come from the command line; None means that an option was not
    given.

    Raises `StartupError` naming each invalid option or variable; the values of secrets are not
    shown.
    """
    _check_variables()
    given = {name: value for name, value in options.items() if value is not None}

    def place(name: str) -> str:
        return option(name) if name in given else variable(name)

    try:
        return settings(**given)
    except ValidationError as error:
        raise refusal(error, place) from None


def refusal(error: ValidationError, place: Callable[[str], str]) -> StartupError:
    """Names each invalid setting by its ``place``, which is an option or a variable."""
    lines = [f"{place(str(one['loc'][0]))}: {_explained(one)}" for one in error.errors()]
    return StartupError("; ".join(lines))


def _explained(problem: ErrorDetails) -> str:
    """What is wrong with the value of a setting. The values of secrets are not shown, because no
    secret is a number or a boolean."""
    expected = _EXPECTED.get(problem["type"])
    if expected is not None:
        return f"{problem['input']!r} is not {expected}"
    return problem["msg"].replace("Input should be", "the value must be")


def _check_variables() -> None:
    """Raise `StartupError` if a variable begins with the prefix and is no setting."""
    known = {
        variable(field) for cls in (GatewaySettings, WorkerSettings) for field in cls.model_fields
    }.union(CLIENT_VARIABLES.values())
    unknown = [
        _refusal_of_unknown(name, known)
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIX)
        and name not in known
        and not name.startswith(f"{PREFIX}TEST_")
        and not _is_of_kubernetes(name, value)
    ]
    if unknown:
        raise StartupError("; ".join(unknown))


def _refusal_of_unknown(name: str, known: Iterable[str]) -> str:
    """Why a variable that begins with the prefix is refused."""
    field = name.removeprefix(PREFIX).lower()
    if field in NOT_AVAILABLE:
        return f"{name}: not available; see docs/migrating.md"
    if field in REMOVED:
        return f"{name} was removed: {REMOVED[field]}"
    return f"unknown setting {name}{did_you_mean(name, known)}"
