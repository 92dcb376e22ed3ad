"""All settings, read once at start-up from ``WARREN_`` variables and the command line.

The command line takes precedence over the environment. An invalid value or an unknown variable
stops the process at start-up with a one-line error, which names the option or the variable.
Variables that Kubernetes injects for a Service are ignored.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
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
_EXPECTED = {
    "int_parsing": "an integer",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}
"""What a setting has to be, by the type of pydantic's error."""
DEFAULT_MODEL = "smollm2"
MIN_SECRET_BYTES = 32
_SECRETS = ("broker", "secret", "database_url", "engine_key")
"""Settings that can also be read from a file, which another setting names."""

_CONFIG = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


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


def _check_secret(secret: SecretStr) -> SecretStr:
    if len(secret.get_secret_value().encode()) < MIN_SECRET_BYTES:
        raise PydanticCustomError(
            "secret_too_short",
            "the secret must have at least 32 bytes; `openssl rand -hex 32` generates one",
        )
    return secret


class InvalidSetting(Exception):
    """A problem with one setting, for which pydantic has no error."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


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

    broker: SecretStr | None = Field(
        None,
        description="AMQP URL of the RabbitMQ broker, amqp:// or amqps://; for a cluster the URLs "
        "of its nodes, separated by commas. It contains a password: set the variable or "
        "WARREN_BROKER_FILE, because options are visible in the process list. Unset: an "
        "in-memory bus, which only `warren serve` supports.",
    )
    broker_file: Path | None = Field(
        None, description="File that contains the URL of WARREN_BROKER, such as a mounted secret."
    )
    trusted_users: CommaSeparated = Field(
        ("gateway", "worker", "operator"),
        description="Comma-separated users of the broker whose messages may name any tenant and "
        "any request: those of gateways, workers and operators. Any other user publishes under "
        "its own name. The user of WARREN_BROKER is always trusted. Add only users of Warren's "
        "own processes.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged. Use debug for troubleshooting."
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
    job_log_level: Literal["info", "warning", "off"] = Field(
        "info",
        description="Least severe level of the log lines about single requests and jobs. info: "
        "every step; warning: take-overs, moved jobs, dead letters, and answers 500 and 503. "
        "WARREN_LOG_LEVEL also applies. Set warning if the lines of every request are too many.",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="OTLP/HTTP endpoint that receives trace spans. Unset: spans are not exported.",
    )
    otlp_metrics_endpoint: str | None = Field(
        None,
        description="OTLP/HTTP endpoint that receives metrics with the names of OpenTelemetry's "
        "conventions for generative AI. Unset: they are not exported. /metrics is always served.",
    )
    metrics_tenants: int = Field(
        0,
        ge=0,
        description="Number of tenants that have their own metrics: those with the most requests. "
        "All others are counted as the tenant `other`. The default keeps names of tenants out of "
        "/metrics, which needs no API key unless WARREN_OPEN_METRICS is false. Raise it to see "
        "single tenants on dashboards.",
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

    @model_validator(mode="before")
    @classmethod
    def _read_secrets(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read secrets from their files. Raises `InvalidSetting`."""
        read = {
            name: _read_secret(name, Path(path))
            for name in _SECRETS
            if (path := values.get(f"{name}_file")) is not None
        }
        for name in read:
            if values.get(name) is not None:
                raise InvalidSetting(name, f"{variable(name)}_FILE is also set")
        return {**values, **read}


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
        "an equal share. Lower it to save memory.",
    )
    max_connections: int = Field(
        2048,
        gt=0,
        description="Maximum number of open client connections of one gateway; further "
        "connections are answered 503. If the process's limit of open files is lower, it applies "
        "instead. Raise it, with the limit of open files, if many clients keep idle connections.",
    )
    max_connections_per_address: int = Field(
        1024,
        gt=0,
        description="Maximum number of open connections from one IPv4 address or one /64 network "
        "of IPv6. Behind a proxy all clients share its address: set it to WARREN_MAX_CONNECTIONS "
        "there.",
    )
    max_body_bytes: int = Field(
        4 << 20,
        gt=0,
        description="Maximum size of an HTTP request body in bytes; a larger body is answered "
        "413. Raise it if long conversations are refused, and with it WARREN_MAX_BYTES_IN_FLIGHT "
        "and what a proxy before the gateway allows.",
    )
    max_bytes_in_flight: int = Field(
        64 << 20,
        gt=0,
        description="Maximum total size of the bodies that one gateway handles at once, and of the "
        "stored objects that it reads for requests, in bytes; a body counts with its length and 64 "
        "bytes for each JSON value. A request that would exceed it is answered 429. Tenants share "
        "it like `WARREN_MAX_REQUESTS`. Raise it for many long prompts at once.",
    )
    max_detached: int = Field(
        500,
        gt=0,
        description="Maximum number of detached requests of one tenant whose jobs have not ended, "
        "at all gateways together; further ones are answered 429. The field `max_detached` of an "
        "API key overrides it. Lower it if single tenants fill the queues.",
    )
    request_timeout_s: Seconds = Field(
        600,
        description="Seconds after which an unfinished request fails with `deadline_exceeded`. "
        "Raise it for very long answers.",
    )
    require_worker: bool = Field(
        False,
        description="Answer 503 with `Retry-After` at once if no worker of the model lives, "
        "instead of letting the request wait for one until its deadline. Detached requests, "
        "requests of the class `batch` and batches wait all the same. Set it if clients have "
        "somewhere else to go.",
    )
    affinity: bool = Field(
        True,
        description="Prefer, for the further turns of a conversation and for long prompts, the "
        "worker that may have their beginning in its prefix cache. Turn it off to measure without "
        "preference. Set the same value on all gateways.",
    )
    max_queue_wait_s: Seconds = Field(
        60,
        description="Longest acceptable wait for a worker, in seconds; a request that is estimated "
        "to wait longer is answered 429. Lower it to shed load earlier.",
    )
    first_event_timeout_s: Seconds = Field(
        10,
        description="Seconds to wait for a worker's first event before the response headers are "
        "sent. An error within this time still determines the HTTP status. Raise it if clients "
        "rely on the status while requests queue; lower it if they, or a proxy, give up on a "
        "response without headers.",
    )
    ping_interval_s: Seconds = Field(
        15,
        description="Seconds of silence after which a stream receives an SSE comment. Keep it "
        "below the idle timeout of proxies.",
    )
    send_timeout_s: Seconds = Field(
        30,
        description="Seconds within which a client must read 64 KB of its response; a slower "
        "client is disconnected. Raise it for clients on slow networks; lower it to free their "
        "memory sooner.",
    )
    disconnect_grace_s: float = Field(
        5,
        ge=0,
        description="Seconds for which a client may resume a stream with event ids after its "
        "connection is lost; meanwhile the request continues, or the log of a finished stream is "
        "kept. A running request is cancelled after the worker's `WARREN_READER_GRACE_S` at the "
        "latest. Raise both for clients that take longer to reconnect; 0 cancels at once.",
    )
    detach_ttl_s: Seconds = Field(
        3600,
        description="Deadline of a request with `detach`, in seconds, and how long its log is "
        "kept without a reader. Raise it if clients come back for their answers later than this.",
    )
    reply_retention_s: Seconds = Field(
        60,
        description="Seconds for which a request's log is kept after its last reader disconnects. "
        "Clients and gateways can resume the stream within this time. Raise it if gateways take "
        "longer to restart. The logs use memory and disk of the broker.",
    )
    worker_silence_s: Seconds = Field(
        8,
        description="Seconds without a heartbeat after which a worker is considered lost and its "
        "jobs are published again. The job of a resumed stream is redelivered by the broker "
        "instead. Raise it if workers on overloaded machines are considered lost while they run.",
    )
    secret: Annotated[SecretStr, AfterValidator(_check_secret)] | None = Field(
        None,
        description="At least 32 random bytes, from which the gateway derives the keys that sign "
        "stream tokens and turn Idempotency-Keys into request ids. Set the same value on all "
        "gateways. Unset: a random value at each start, so that tokens and Idempotency-Keys are "
        "valid only at one gateway, until it restarts.",
    )
    secret_file: Path | None = Field(
        None, description="File that contains WARREN_SECRET, such as a mounted secret."
    )
    receipt_keys_file: Path | None = Field(
        None,
        description="File of Ed25519 keys in PEM that sign receipts, the current one first, such "
        "as a mounted secret. Set the same keys on all gateways. Unset: requests for a receipt "
        "are refused.",
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
    open_metrics: bool = Field(
        True,
        description="Answer /metrics without an API key. false: it needs a key with the scope "
        "`metrics`, if there are API keys. Turn it off if the load and the models' names must not "
        "be public.",
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
    database_url: SecretStr | None = Field(
        None,
        description="URL of the PostgreSQL database of files, batches, responses and "
        "conversations, postgresql://USER:PASSWORD@HOST/NAME, with libpq's parameters, such as "
        "?sslmode=verify-full. Set the same one on all gateways. Unset: a SQLite database in "
        "WARREN_DATA_DIR, which only gateways of one machine can share.",
    )
    database_url_file: Path | None = Field(
        None,
        description="File that contains the URL of WARREN_DATABASE_URL, such as a mounted secret.",
    )
    files_url: str | None = Field(
        None,
        description="URL of the storage of files: s3://, gs://, az:// or file:///, such as "
        "s3://BUCKET/PREFIX. Set the same one on all gateways. Unset: a directory in "
        "WARREN_DATA_DIR.",
    )
    files_credentials_file: Path | None = Field(
        None,
        description="File with the credentials of WARREN_FILES_URL, in the format of AWS's "
        "credentials file, such as a mounted secret. Its section is [default]. Unset: they come "
        "from the variables of the storage's own tools, such as AWS_ACCESS_KEY_ID.",
    )
    max_file_bytes: int = Field(
        200 << 20,
        gt=0,
        description="Maximum size of an uploaded file in bytes. Raise it for larger batches, and "
        "with it what a proxy before the gateway allows.",
    )
    max_tenant_file_bytes: int = Field(
        8 << 30,
        gt=0,
        description="Maximum total size of the files of one tenant in bytes. Lower it if the "
        "storage is small.",
    )
    file_retention_s: Seconds = Field(
        30 * 24 * 3600,
        description="Seconds after which files are deleted, unless a request says otherwise. "
        "Lower it to save storage.",
    )
    store_responses: bool = Field(
        True,
        description="Store the responses of `/v1/responses` whose requests do not set `store`, as "
        "OpenAI does. Turn it off to store nothing unless a client asks for it.",
    )
    response_retention_days: Annotated[float, Field(gt=0)] = Field(
        30,
        description="Days after which stored responses, and conversations without changes, are "
        "deleted. Lower it to save storage, or if your rules on privacy demand it.",
    )
    max_tenant_responses: int = Field(
        100_000,
        gt=0,
        description="Maximum number of stored responses and conversations of one tenant. Once a "
        "minute, the least recently changed ones beyond it are deleted. Raise it if conversations "
        "are lost too early.",
    )
    max_tenant_response_bytes: int = Field(
        8 << 30,
        gt=0,
        description="Maximum total size of the stored responses and conversations of one tenant "
        "in bytes. The least recently changed ones beyond it are deleted at once. Lower it if the "
        "database's disk is small.",
    )
    max_batch_lines: int = Field(
        50_000,
        gt=0,
        description="Maximum number of requests in one batch. Raise it for larger files, within "
        "WARREN_MAX_FILE_BYTES.",
    )
    batch_window: int = Field(
        128,
        gt=0,
        description="Maximum number of requests of one batch and model that are in the queue at "
        "once. Twice the number that all workers of a model run at the same time keeps them busy. "
        "Raise it if workers are idle while a batch runs.",
    )
    batch_lease_s: Annotated[float, Field(gt=0, le=60)] = Field(
        15,
        description="Seconds after which another gateway continues the batches of a gateway that "
        "was killed. It must be several times the difference between the gateways' clocks. Lower "
        "it to continue them sooner.",
    )
    webhook_networks: Networks = Field(
        (),
        description="Comma-separated private networks that webhooks may reach, such as 10.0.0.0/8; "
        "http:// is allowed there only. Unset: public addresses only.",
    )
    webhook_max_tries: Annotated[int, Field(gt=0, le=100)] = Field(
        16,
        description="Number of tries after which the delivery of a webhook is given up. Raise it "
        "for endpoints with long outages.",
    )
    webhook_retry_s: Seconds = Field(
        5,
        description="Seconds between the first two tries of a webhook. Each further pause is "
        "twice as long, up to 6 hours, and shortened at random by up to a half. Raise it if "
        "endpoints need longer to recover.",
    )
    usage_retention_s: Seconds = Field(
        400 * 24 * 3600,
        description="Seconds after which the usage record of a request is deleted. Set it to what "
        "your accounting needs.",
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
        description="Quantization of the weights for the CPU. It saves memory and bandwidth at "
        "some loss of quality; a GPU expands the weights again and saves nothing. auto: no "
        "quantization; weights have WARREN_DTYPE. Set it to fit a larger model or to decode "
        "faster.",
    )
    kernels: Literal["auto", "native", "reference", "triton"] = Field(
        "auto",
        description="Kernel implementation. auto: triton on a GPU; native on the CPU if it "
        "supports the model, otherwise reference. Set reference to find out whether a kernel "
        "causes a problem.",
    )
    max_cpu_isa: Literal["auto", "avx2", "avx512"] = Field(
        "auto",
        description="Newest instruction set to use on the CPU. auto: the newest that the processor "
        "supports. Set avx2 on all workers of a model if some of their processors lack AVX-512.",
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
        "sequence needs room in the KV cache.",
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
    # A variable is text, and pydantic takes no text for a number among literals.
    block_size: Annotated[Literal[8, 16, 32], BeforeValidator(int)] = Field(
        16,
        description="Tokens in one block of the KV cache. Smaller blocks waste less memory and "
        "share shorter prefixes. Set 8 if the cache is small and answers are short.",
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
    batch_reserve: int = Field(
        4,
        ge=0,
        description="Number of sequence slots reserved for interactive jobs; batch jobs use at "
        "most WARREN_MAX_NUM_SEQS minus this number. Raise it if interactive requests wait behind "
        "batch jobs.",
    )
    prefix_cache: bool = Field(
        True,
        description="Reuse the KV cache of prompt prefixes that requests of one tenant share. "
        "Turn it off to measure without reuse.",
    )
    max_draft_tokens: int = Field(
        15,
        ge=0,
        le=63,
        description="Maximum number of tokens of a sequence that one step drafts and checks on the "
        "CPU. No token changes, and drafts are made only if they save time. Set 0 to turn drafts "
        "off, for example to measure without them.",
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
    engine_key: SecretStr | None = Field(
        None,
        description="API key that the engine's server requires. Set the variable or "
        "WARREN_ENGINE_KEY_FILE, because options are visible in the process list.",
    )
    engine_key_file: Path | None = Field(
        None, description="File that contains WARREN_ENGINE_KEY, such as a mounted secret."
    )
    require_same_numerics: bool = Field(
        False,
        description="Let a stream that has begun wait, until its deadline, for a worker with the "
        "numerics (device, data type, kernels) that it began with, rather than continue it here. "
        "Set it on all workers of a model if a change within a text is worse than a delay.",
    )
    max_waiting_jobs: int = Field(
        256,
        ge=0,
        description="Maximum number of jobs of each class that a worker takes from its queue "
        "beyond those that it can run, in order to serve their tenants in turn. Raise it if there "
        "are so many tenants that each has few places; 0 serves the queue in the order of arrival.",
    )
    batch_patience_s: Seconds = Field(
        60,
        description="Seconds without a token after which a batch job is promoted to interactive "
        "priority, one job at a time, so that no job starves. Lower it if batch jobs must advance "
        "beside constant interactive load.",
    )
    health_host: str = Field(
        "127.0.0.1",
        description="Address on which WARREN_HEALTH_PORT listens. 0.0.0.0 answers other machines; "
        "no key is required.",
    )
    health_port: Port | None = Field(
        None,
        description="TCP port of the worker's /live, /health and /metrics. Unset: they are not "
        "served. Set it for probes and Prometheus.",
    )
    stall_timeout_s: Seconds = Field(
        60,
        description="Seconds without a completed step, while there is work, or without a turn of "
        "the event loop, after which the worker exits so that its jobs are redelivered. Raise it "
        "if a step may take longer, as on a slow CPU.",
    )
    announce_interval_s: Seconds = Field(
        2,
        description="Seconds between a worker's heartbeats. Keep it well below "
        "WARREN_WORKER_SILENCE_S.",
    )
    reader_grace_s: Seconds = Field(
        10,
        description="Seconds after which a stream that has no reader is cancelled, unless it is "
        "detached. Raise it if readers take longer to reconnect; lower it to free their slots "
        "sooner.",
    )
    stream_events_per_s: Annotated[float, Field(gt=0)] = Field(
        10,
        description="Most events per second of an interactive stream, after its first ten tokens; "
        "the tokens between two events are sent together. An event costs worker, broker and "
        "gateway about as much with one token as with ten. Raise it for smoother text; lower it "
        "to serve more streams. A request with `stream_options.each_token` is sent every token at "
        "once.",
    )
    job_timeout_s: Seconds = Field(
        600,
        description="Seconds for which a worker runs a job whose publisher sets no deadline. The "
        "time in the queue does not count. Raise it for very long answers to AMQP programs and "
        "`warren batch`.",
    )


_Settings = TypeVar("_Settings", bound=CommonSettings)


def secret_in(path: Path) -> str:
    """The secret in a file. Raises `StartupError`."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise StartupError(f"{path} cannot be read: {reason}") from None


def _read_secret(name: str, path: Path) -> str:
    try:
        secret = secret_in(path)
    except StartupError as error:
        raise InvalidSetting(f"{name}_file", str(error)) from None
    if not secret.isprintable():
        raise InvalidSetting(f"{name}_file", f"{path} does not contain one line of text")
    return secret


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
    """Load settings. ``options`` are those of the command line; None means that an option was not
    given.

    Raises `StartupError` naming each invalid option or variable; the values of secrets are not
    shown.
    """
    _check_variables()
    given = {name: value for name, value in options.items() if value is not None}

    def place(name: str) -> str:
        # The value of a secret may have come from a file.
        names = (name, f"{name}_file")
        if chosen := next((one for one in names if one in given), None):
            return option(chosen)
        return variable(next((one for one in names if variable(one) in os.environ), names[0]))

    try:
        return settings(**given)
    except InvalidSetting as error:
        where = option(error.name) if error.name in given else variable(error.name)
        raise StartupError(f"{where}: {error}") from None
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
        f"{name}: not available; see docs/migrating.md"
        if name.removeprefix(PREFIX).lower() in NOT_AVAILABLE
        else f"unknown setting {name}{did_you_mean(name, known)}"
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIX)
        and name not in known
        and not name.startswith(f"{PREFIX}TEST_")
        and not _is_of_kubernetes(name, value)
    ]
    if unknown:
        raise StartupError("; ".join(unknown))
