"""What the environment of a process says; its settings are in `tandem.config`."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.config import TracingConfig

__all__ = ["cache_home", "otlp_protocol", "ray_address", "traces_wanted"]


def cache_home() -> Path:
    """Where made or downloaded things are kept: $TANDEM_HOME, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem."""
    if home := os.environ.get("TANDEM_HOME"):
        return Path(home)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tandem"


def ray_address() -> str:
    """Address of a running Ray cluster to join ($RAY_ADDRESS, as Ray's own tools read it); empty: start one here."""
    return os.environ.get("RAY_ADDRESS", "")


def traces_wanted(tracing: TracingConfig) -> bool:
    """Whether this process sends spans: its settings name a collector, or OpenTelemetry's own variables do
    (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/) and do not turn it off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    named = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return bool(tracing.otlp_endpoint) or any(os.environ.get(name) for name in named)


def otlp_protocol() -> str:
    """As the environment says; OpenTelemetry's Python packages take gRPC by default."""
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or general
