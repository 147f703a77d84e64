"""Reading what a tracer exported: the spans of each trace, and who stands under whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["PARTS", "PROMPT_WORDS", "TRACEPARENT", "Trace", "texts_of", "traces_of"]

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROMPT_WORDS = ("Whispering", "marmalade", "lighthouse")

# Of a request that was answered at the first attempt: whose child each part is; None: the client's, or nobody's.
PARTS: dict[str, str | None] = {
    "tandem.request": None,
    "tandem.queue": "tandem.request",
    "tandem.attempt": "tandem.request",
    "tandem.prefill": "tandem.attempt",
    "tandem.transfer": "tandem.attempt",
    "tandem.decode": "tandem.attempt",
}


@dataclass(frozen=True)
class Trace:
    trace_id: str
    spans: Sequence[ReadableSpan]

    @property
    def parents(self) -> dict[str, str | None]:
        """By name; only for a trace that has each name once."""
        names = {span.context.span_id: span.name for span in self.spans}
        assert len(set(names.values())) == len(self.spans)
        return {span.name: names.get(span.parent.span_id) if span.parent else None for span in self.spans}

    @property
    def is_whole(self) -> bool:
        """The request's own span ends last in the router; what its workers say may come later."""
        names = [span.name for span in self.spans]
        decoded = names.count("tandem.decode") == names.count("tandem.transfer")
        return "tandem.request" in names and decoded and names.count("tandem.prefill") == names.count("tandem.attempt")

    @property
    def root_parent(self) -> str | None:
        """The client's span, in hexadecimal digits."""
        parent = self._one("tandem.request").parent
        return f"{parent.span_id:016x}" if parent else None

    def service(self, name: str) -> str:
        return str(self._one(name).resource.attributes["service.name"])

    def instance(self, name: str) -> str:
        return str(self._one(name).resource.attributes["service.instance.id"])

    def attributes(self, name: str) -> dict[str, Any]:
        return dict(self._one(name).attributes or {})

    def in_order(self, *names: str) -> bool:
        """They begin one after another, and each ends after it began."""
        spans = [self._one(name) for name in names]
        begins, ends = [span.start_time or 0 for span in spans], [span.end_time or 0 for span in spans]
        return begins == sorted(begins) and all(begin <= end for begin, end in zip(begins, ends, strict=True))

    def _one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


def traces_of(spans: Iterable[ReadableSpan]) -> list[Trace]:
    by_id: dict[int, list[ReadableSpan]] = {}
    for span in spans:
        by_id.setdefault(span.context.trace_id, []).append(span)
    return [Trace(f"{trace_id:032x}", found) for trace_id, found in by_id.items()]


def texts_of(spans: Iterable[ReadableSpan]) -> str:
    """Whatever of them is text."""
    return "\n".join(span.to_json() for span in spans)
