"""What goes beside a request: deadline, key, request id."""

from __future__ import annotations

from tandem.client.messages import Options

__all__ = ["DEFAULT_ADDRESS", "call_options"]

DEFAULT_ADDRESS = "127.0.0.1:50051"


def call_options(options: Options, api_key: str) -> tuple[float | None, tuple[tuple[str, str], ...]]:
    """Timeout in seconds, and metadata."""
    metadata = []
    if api_key:
        metadata.append(("authorization", f"Bearer {api_key}"))
    if request_id := options.get("request_id"):
        metadata.append(("x-request-id", request_id))
    return options.get("timeout_s"), tuple(metadata)
