"""The options of client commands for a router, and a channel to it: its address, TLS, an API key."""

from __future__ import annotations

import argparse
from pathlib import Path

import grpc.aio

from tandem.config import TlsConfig
from tandem.errors import ConfigError
from tandem.guard import MetadataChannel
from tandem.rpc import create_channel
from tandem.trust import Certificates

__all__ = ["add_router_options", "add_tls_options", "api_key_of", "certificates_of", "channel_to"]


def add_router_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="127.0.0.1:50051", metavar="HOST:PORT", help="of the router (default %(default)s)")
    add_tls_options(parser)


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TLS, for a router that speaks it")
    group.add_argument("--tls-ca", default="", metavar="FILE", help="PEM of the authority that signed the router's certificate")
    group.add_argument("--tls-cert", default="", metavar="FILE", help="PEM of our own certificate, if the router asks for one")
    group.add_argument("--tls-key", default="", metavar="FILE", help="PEM of its key")
    parser.add_argument("--api-key-file", default="", metavar="FILE", help="our API key, for a router that asks for one")
    group.add_argument("--tls-name", default="", metavar="NAME", help="name in the router's certificate, if not the address")


def certificates_of(args: argparse.Namespace) -> Certificates | None:
    """None: no TLS option was given. Raises ConfigError: a file cannot be used."""
    return Certificates.load(TlsConfig(args.tls_cert, args.tls_key, args.tls_ca, args.tls_name))


def api_key_of(args: argparse.Namespace) -> str:
    """Empty: none was given. Raises ConfigError: the file cannot be read."""
    if not args.api_key_file:
        return ""
    try:
        return Path(args.api_key_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the API key {args.api_key_file}: {getattr(error, 'strerror', None) or error}"
        ) from error


def channel_to(address: str, args: argparse.Namespace) -> grpc.aio.Channel:
    """To a router, as the options say; on the running event loop. Raises ConfigError: a file cannot be used."""
    channel = create_channel(address, certificates=certificates_of(args))
    key = api_key_of(args)
    return MetadataChannel(channel, (("authorization", f"Bearer {key}"),)) if key else channel
