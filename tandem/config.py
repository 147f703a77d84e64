"""Settings of every process: frozen, nested, resolved once at start. As text: `tandem.config_json`."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from dataclasses import dataclass, field

from tandem.errors import ConfigError
from tandem.secret import Secret

__all__ = [
    "AutoscaleConfig",
    "CacheConfig",
    "ClusterConfig",
    "DecodeConfig",
    "ModelSource",
    "PoolLimits",
    "PrefillConfig",
    "RouterConfig",
    "TlsConfig",
    "TracingConfig",
    "TransferConfig",
    "TrustConfig",
    "WorkerConfig",
    "beyond_loopback",
    "on_node",
    "transfer_of",
]

_ROOM = 4


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Which checkpoint, and in which numbers.

    path: local folder or hub id; empty: the embedded model.
    dtype: of weights and KV: "auto" takes the checkpoint's own, float32 for the embedded model; float32, bfloat16, float16.
    max_context_tokens: limit on prompt + answer; 0 takes the checkpoint's max_position_embeddings.
    """

    path: str = ""
    dtype: str = "auto"
    max_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes of the two pools of a worker.

    block_size_tokens: tokens per KV block; both pools of workers must agree.
    budget_bytes: memory for KV blocks and state slots together; 0: `free_fraction` of what is available at start, to this
    machine or to the control group (a pod's, for example) that limits the worker.
    free_fraction: share of the available memory that one worker may take when no budget is given.
    max_sequences: most sequences that hold a state slot at once.
    prefix_gib: memory of a prefill worker for copies of recurrent states, at which prompts that begin alike take up the work
    of earlier ones; 0: every prompt is computed whole. Their keys and values stay in KV blocks that nothing else needs.
    """

    block_size_tokens: int = 32
    budget_bytes: int = 0
    free_fraction: float = 0.1
    max_sequences: int = 64
    prefix_gib: float = 0.25


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """chunk_tokens: most prompt tokens that one step computes, over all prompts in it; fewer where the link to the decode
    workers falls behind, see `prefill_worker.chunk_size`.
    max_queue: prompts that may wait in one worker; more are refused with Overloaded.
    ageing: how much of what a worker computes meanwhile counts for a prompt that waits, against shorter ones.
    batch_share: of the tokens that requests of class batch get at least while interactive ones have work.
    reserve_patience_s: how long a full decode worker is asked again before the router may choose another.
    checkpoint_every_tokens: distance of the states kept along a prompt; longer prompts take a multiple of it.
    checkpoint_ends: keep states also at the ends of prompts and where prompts part, wherever that is. Off, every answer is
    the same to the last bit whether its prefix was computed or found, if `checkpoint_every_tokens` is a multiple of
    what the kernels compute at a time (256 positions on a CPU).
    absorb_chunk_tokens: answers are absorbed in idle time, so that the next turn of a conversation finds them; this many
    tokens at a time and up to the end of a tile, between whose layers prompts that arrive come first. 0: they are not."""

    chunk_tokens: int = 512
    max_queue: int = 1024
    ageing: float = 0.5
    batch_share: float = 0.1
    reserve_patience_s: float = 10.0
    checkpoint_every_tokens: int = 512
    checkpoint_ends: bool = True
    absorb_chunk_tokens: int = 64


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """max_batch: most sequences in one step. max_joins_per_step: verified sequences that may join in one step.
    lease_ttl_s: a reservation whose hand-off is not complete by then expires.
    overcommit: by how much the longest answers that were asked for may exceed the memory for them. 1.0: a reservation holds
    the blocks of the whole answer. Above, it counts for the prompt and 1 / `overcommit` of the answer, takes blocks as it
    grows, and sequences are evicted when all grow longer than that.
    swap_gib: host memory for sequences that were evicted; none left, or 0: they go through prefill again.
    batch_share: of blocks and of slots that requests of class batch may hold together, whichever routers placed them; the rest
    is kept free for interactive ones. One of batch may always be there. Routers learn it from the worker.
    keep_prefixes: full blocks of prompts stay, in memory that nothing else needs, and prompts that begin alike share them.
    local_prefill_tokens: longest prompt that a decode worker may compute itself, where that is clearly quicker than to wait for
    a prefill worker and ship its state; 0: none. local_prefill_share: of the time of each step, what computing prompts may add
    to it while sequences run."""

    max_batch: int = 64
    max_joins_per_step: int = 8
    lease_ttl_s: float = 60.0
    overcommit: float = 1.0
    swap_gib: float = 4.0
    batch_share: float = 0.75
    keep_prefixes: bool = True
    local_prefill_tokens: int = 32
    local_prefill_share: float = 0.1

    def __post_init__(self) -> None:
        """Raises ConfigError: a value is out of range."""
        for name, least, most in (
            ("overcommit", 1.0, math.inf),
            ("swap_gib", 0.0, math.inf),
            ("batch_share", 0.0, 1.0),
            ("local_prefill_tokens", 0, 2**31 - 1),
            ("local_prefill_share", 0.01, 1.0),
        ):
            if not least <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"decode.{name}: {value:g} is not between {least:g} and {most:g}")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """poll_interval_s: how often the sender looks while something is in flight; the receiver takes multiples of it.
    timeout_s: a write that takes longer has failed.
    ucx_tls: value for UCX_TLS; empty leaves UCX's own choice (or the operator's environment) alone.
    net_devices: value for UCX_NET_DEVICES; empty: the loopback device alone for a worker whose `host` is a loopback address,
    else UCX's own choice.
    overlap: push KV by chunk and state by layer while prefill computes; off pushes all at the end (for benchmarks)."""

    poll_interval_s: float = 0.0002
    timeout_s: float = 30.0
    ucx_tls: str = ""
    net_devices: str = ""
    overlap: bool = True


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Paths of PEM files, the same on every node; read once at start. All empty: no TLS.

    cert_file, key_file: what this process shows. ca_file: who must have signed what the other side shows.
    server_name: the name in the servers' certificates, where that is not the address that is called (pods, for example).
    """

    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class TrustConfig:
    """How the processes of one cluster know each other. secret: without it a process neither serves nor is served; never
    written by operators, since `up` makes it or reads `secret_file`. tls: of the internal connections, always mutual."""

    secret: Secret = field(default_factory=Secret)
    secret_file: str = ""
    tls: TlsConfig = field(default_factory=TlsConfig)


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """otlp_endpoint: URL of an OpenTelemetry collector, such as http://127.0.0.1:4317, to which every process sends its spans
    of requests; empty: as the OTEL_ variables of the environment say, and without those nowhere."""

    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        """Raises ConfigError: it is no URL."""
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"tracing.otlp_endpoint: {self.otlp_endpoint!r} does not begin with http:// or https://")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything that one prefill or decode worker needs. host: where its internal gRPC server listens (port chosen by
    the system), and what it tells others; empty: the address of its node, which a cluster of several hosts needs.
    threads: intra-op compute threads; 0: all cores. seed of nothing: workers have no randomness of their own.
    drain_s: how long a worker that was asked to end lets finish what runs, before it hands it over to others.
    metrics_port: of an HTTP endpoint of the worker's own metrics, which routers name in /metrics/targets; 0: none, routers
    show them; -1: any free one."""

    model: ModelSource = field(default_factory=ModelSource)
    cache: CacheConfig = field(default_factory=CacheConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    host: str = "127.0.0.1"
    threads: int = 0
    drain_s: float = 300.0
    metrics_port: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """model: the checkpoint that the workers serve, as they were given it; used where the folder that they name is not on this
    host. host: where clients connect. grpc_port, http_port: 0 lets the system choose.
    max_queue: requests that may wait for a worker. max_attempts: how often a request is placed in all.
    queue_wait_s: the longest that a request waits for a worker or for room, at each placement.
    batch_ageing_s: a batch request waits behind interactive ones that came up to so much later.
    ask_after_s: after so much silence before the first token the prefill worker is asked whether it has the task.
    stall_s: an attempt of which nothing was heard for so long, not even an answer to that, has ended.
    max_new_tokens_default: when a client gives none. max_message_bytes: largest message from a client.
    client_timeout_s: the longest that a client may take to send a request, and that it may leave what is written to it unread.
    max_connections: over HTTP, at once; one more is closed unserved.
    connection_age_s: a gRPC connection takes new calls for so long; then its client connects anew, behind a Service perhaps to
    another router, and the calls that run on the old one go on there. 0: as long as it stands.
    grace_s: for streams that run when the router is asked to end.
    tls: of the ports for clients; with a ca_file clients must show a certificate. trust: see `TrustConfig`.
    api_keys_file: who may call, see `router.callers`; empty: everybody who reaches the ports.
    operators: names of the API keys that may scale, drain and replace, with commas between them; empty: every caller may."""

    model: str = ""
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    max_queue: int = 1024
    max_attempts: int = 4
    queue_wait_s: float = 60.0
    batch_ageing_s: float = 30.0
    ask_after_s: float = 5.0
    stall_s: float = 120.0
    max_new_tokens_default: int = 128
    max_message_bytes: int = 16 * 1024 * 1024
    client_timeout_s: float = 60.0
    max_connections: int = 4096
    connection_age_s: float = 0.0
    grace_s: float = 10.0
    api_keys_file: str = ""
    operators: str = ""
    tls: TlsConfig = field(default_factory=TlsConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """min, max: workers of one pool. up_cooldown_s: after it grew, it grows no further for so long. down_after_s: one worker
    fewer must have been enough for so long before it shrinks."""

    min: int = 1
    max: int = 64
    up_cooldown_s: float = 30.0
    down_after_s: float = 300.0


@dataclass(frozen=True, slots=True)
class AutoscaleConfig:
    """Off by default; where something else scales the pools (HPA, KEDA), it stays off. See `controller.autoscale`.

    every_s: between looks. stale_s: older numbers are not used. queue_s, backlog_tokens, busy: targets of a prefill worker: the
    longest wait in its queue, tokens that wait there, share of time that it computes. memory_used, itl_s: targets of a decode
    worker: share in use of KV blocks or state slots, whichever is more; seconds of a step, that is, between tokens."""

    enabled: bool = False
    every_s: float = 5.0
    stale_s: float = 15.0
    prefill: PoolLimits = field(default_factory=PoolLimits)
    decode: PoolLimits = field(default_factory=PoolLimits)
    queue_s: float = 1.0
    backlog_tokens: int = 8192
    busy: float = 0.8
    memory_used: float = 0.8
    itl_s: float = 0.05


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What `tandem up` starts. prefill, decode: wanted workers per pool, until they are scaled. max_prefill, max_decode: to how
    many a pool of a cluster on this machine can be scaled, among which its memory is divided at the start; 0: as many as
    are wanted, and 4 at least. autoscale: by policy, off by default. trust, tracing: of all its processes."""

    worker: WorkerConfig = field(default_factory=WorkerConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    prefill: int = 1
    decode: int = 1
    max_prefill: int = 0
    max_decode: int = 0

    @property
    def units(self) -> dict[str, int]:
        """Workers of each pool for which a cluster on this machine has room."""
        return {
            "prefill": self.max_prefill or max(self.prefill, _ROOM),
            "decode": self.max_decode or max(self.decode, _ROOM),
        }


def transfer_of(worker: WorkerConfig) -> TransferConfig:
    """The transfer settings of a worker: one that keeps to this machine opens no other device's ports."""
    if worker.transfer.net_devices or not _is_loopback(worker.host):
        return worker.transfer
    return dataclasses.replace(worker.transfer, net_devices="lo")


def on_node(worker: WorkerConfig, node_address: str) -> WorkerConfig:
    """The settings of a worker that runs on the node with that address."""
    return worker if worker.host else dataclasses.replace(worker, host=node_address)


def beyond_loopback(worker: WorkerConfig) -> WorkerConfig:
    """The settings for nodes that others started: each worker is where its node is. An address that is no loopback one was
    chosen by the operator, and stays."""
    return dataclasses.replace(worker, host="") if _is_loopback(worker.host) else worker


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
