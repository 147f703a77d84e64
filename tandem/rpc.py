"""Where every gRPC server and channel of tandem is made, so that options and credentials stand in one place.

Ports are never shared: a port in use is an error, not a second process that silently takes half of the calls.
Proxies of the environment are ignored, since tandem's processes talk to each other directly.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from tandem.errors import ConfigError
from tandem.guard import SecretChannel, SecretInterceptor
from tandem.trust import Certificates, Trust

__all__ = [
    "DEFAULT_MAX_MESSAGE_BYTES",
    "bind",
    "create_blocking_channel",
    "create_channel",
    "create_internal_channel",
    "create_internal_server",
    "create_server",
]

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# A server that does not answer a client's ping within this time is gone: its streams end with UNAVAILABLE.
_KEEPALIVE_TIME_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
# A client may stand still: its machine is paused, it is stopped with Ctrl-Z, it does not read. With this time gRPC also ends a
# connection whose client takes no more bytes (TCP_USER_TIMEOUT), which under load is soon after it has stopped. The price: what
# a client that vanished had asked for is computed for so much longer.
_CLIENT_STANDSTILL_MS = 20_000
# Pings of clients that come more often than this are answered with GOAWAY; well below what channels made here send.
_MIN_PING_INTERVAL_MS = 2_000
_RECONNECT_BACKOFF_MS = 100
_RECONNECT_BACKOFF_MAX_MS = 2_000
# What gRPC calls the least backoff is the time that one attempt to connect has, TLS and the other side's greeting included.
_CONNECT_ATTEMPT_MS = 5_000


def create_server(
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    connection_age_s: float = 0.0,
) -> grpc.aio.Server:
    """A server on the running event loop, without a port yet (see `bind`).

    max_message_bytes: largest message that it receives; a larger one is refused with RESOURCE_EXHAUSTED.
    connection_age_s: after so long, give or take a tenth, a client is asked to connect anew; calls that run on the old
    connection go on there until they end, however long that takes. 0: never.
    """
    options: tuple[tuple[str, int], ...] = (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _CLIENT_STANDSTILL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_pings_without_data", 0),
    )
    if connection_age_s > 0:
        options += (("grpc.max_connection_age_ms", max(1, round(connection_age_s * 1000))),)
    return grpc.aio.server(interceptors=tuple(interceptors), options=options)


def create_internal_server(trust: Trust) -> grpc.aio.Server:
    """A server for processes of the same cluster: a call without the secret gets UNAUTHENTICATED, whatever it asks for."""
    return create_server(interceptors=(SecretInterceptor(trust.secret),))


def bind(server: grpc.aio.Server, host: str, port: int, certificates: Certificates | None = None) -> int:
    """Give `server` its port; port 0 lets the system choose. Returns the port it listens on after `server.start()`.

    certificates: with them the port speaks TLS only, and with a `ca` among them it asks clients for a certificate of its.

    Raises:
        ConfigError: the port is in use, or the host is no address of this machine.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        _try_port(host, port)
        bound: int = (
            server.add_secure_port(address, _server_credentials(certificates))
            if certificates
            else server.add_insecure_port(address)
        )
    except (OSError, OverflowError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "the port is in use or the host is not this machine's"
        raise ConfigError(f"cannot listen on {address}: {reason}; choose another") from error
    return bound


def _try_port(host: str, port: int) -> None:
    """Ask the system first: it gives a reason, where gRPC only writes to stderr. Raises OSError, OverflowError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def create_channel(
    address: str, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, certificates: Certificates | None = None
) -> grpc.aio.Channel:
    """A channel to `address` (host:port) on the running event loop; connects on its first call, and again by itself.

    certificates: speak TLS, and show the client's own certificate if there is one."""
    options = _channel_options(max_message_bytes, certificates)
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _channel_credentials(certificates), options=options)


def create_blocking_channel(
    address: str, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, certificates: Certificates | None = None
) -> grpc.Channel:
    """The same for code without an event loop."""
    options = _channel_options(max_message_bytes, certificates)
    if certificates is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _channel_credentials(certificates), options=options)


def _channel_options(max_message_bytes: int, certificates: Certificates | None) -> tuple[tuple[str, int | str], ...]:
    options: tuple[tuple[str, int | str], ...] = (
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_ATTEMPT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_BACKOFF_MAX_MS),
    )
    if certificates is not None and certificates.server_name:
        options += (("grpc.ssl_target_name_override", certificates.server_name),)
    return options


def _channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(certificates.ca or None, certificates.key or None, certificates.cert or None)


def create_internal_channel(address: str, trust: Trust) -> grpc.aio.Channel:
    """A channel to a process of the same cluster: every call carries the secret, over mutual TLS where that is set up."""
    return SecretChannel(create_channel(address, certificates=trust.certificates), trust.secret)


def _server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    pairs = ((certificates.key, certificates.cert),)
    return grpc.ssl_server_credentials(pairs, certificates.ca or None, require_client_auth=bool(certificates.ca))
