"""What the controller saves, in Ray's internal key-value store: it lives as long as the Ray cluster does (and longer, where its
head keeps its state outside)."""

from __future__ import annotations

import asyncio

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

__all__ = ["RayStore"]

_NAMESPACE = "tandem"


class RayStore:
    """See `StateStore`. key: of the cluster."""

    def __init__(self, key: str) -> None:
        self._key = key

    async def load(self) -> str:
        return await asyncio.to_thread(self.read)

    def read(self) -> str:
        """`load`, for code without an event loop."""
        value = _internal_kv_get(self._key, namespace=_NAMESPACE)
        return value.decode() if value else ""

    async def save(self, text: str) -> None:
        await asyncio.to_thread(_internal_kv_put, self._key, text, namespace=_NAMESPACE)

    async def clear(self) -> None:
        await asyncio.to_thread(_internal_kv_del, self._key, namespace=_NAMESPACE)
