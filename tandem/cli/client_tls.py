"""The options of client commands for a router that speaks TLS."""

from __future__ import annotations

import argparse

from tandem.config import TlsConfig
from tandem.trust import Certificates

__all__ = ["add_tls_options", "certificates_of"]


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TLS, for a router that speaks it")
    group.add_argument("--tls-ca", default="", metavar="FILE", help="PEM of the authority that signed the router's certificate")
    group.add_argument("--tls-cert", default="", metavar="FILE", help="PEM of our own certificate, if the router asks for one")
    group.add_argument("--tls-key", default="", metavar="FILE", help="PEM of its key")
    group.add_argument("--tls-name", default="", metavar="NAME", help="name in the router's certificate, if not the address")


def certificates_of(args: argparse.Namespace) -> Certificates | None:
    """None: no TLS option was given. Raises ConfigError: a file cannot be used."""
    return Certificates.load(TlsConfig(args.tls_cert, args.tls_key, args.tls_ca, args.tls_name))
