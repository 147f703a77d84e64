"""One request's life as bars of text: where its time went, and which worker spent it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.v1 import inference_pb2 as pb

__all__ = ["Span", "draw", "duration", "spans"]

_BAR_CELLS = 48
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLOURS = {"queue": "90", "prefill": "36", "hand-off": "33", "decode": "32"}


@dataclass(frozen=True, slots=True)
class Span:
    """A phase from `start_s` to `end_s`, counted from when the router received the request."""

    name: str
    start_s: float
    end_s: float
    note: str = ""


def spans(finished: pb.Finished) -> list[Span]:
    """Queue, prefill, hand-off, decode; the last two only when a decode worker took part, and no hand-off when that had
    computed the prompt itself."""
    t, usage = finished.timings, finished.usage
    prefill_rate = _rate(usage.prompt_tokens, t.prefill)
    result = [
        Span("queue", 0.0, t.queue),
        Span("prefill", t.queue, t.ttft, f"{finished.prefill_worker} · {_tokens(usage.prompt_tokens)}{prefill_rate}"),
    ]
    if finished.decode_worker:
        decoded = usage.completion_tokens - 1
        note = f"{finished.decode_worker} · {_tokens(decoded)}{_rate(decoded, t.decode)}"
        start = t.total - t.decode
        if finished.prefill_worker != finished.decode_worker:
            way = f"{finished.prefill_worker} → {finished.decode_worker}"
            result.append(Span("hand-off", t.ttft, max(start, t.ttft), way))
        result.append(Span("decode", start, t.total, note))
    return result


def draw(finished: pb.Finished, colour: bool) -> str:
    """The bars, and one line that sums up. Every line stands on the same scale; a phase that happened is never invisible."""
    total = max(finished.timings.total, 1e-9)
    lines = []
    for span in spans(finished):
        bar = _bar(span.start_s / total, span.end_s / total)
        painted = f"\x1b[{_COLOURS[span.name]}m{bar}\x1b[0m" if colour else bar
        lines.append(f"  {span.name:<9}│{painted}│ {duration(span.end_s - span.start_s)}  {span.note}".rstrip())
    return "\n".join([*lines, "  " + _summary(finished)])


def duration(seconds: float) -> str:
    """Eight characters, in the unit that a person would choose."""
    if seconds >= 1:
        return f"{seconds:6.2f} s"
    if seconds >= 0.001:
        return f"{seconds * 1e3:5.1f} ms"
    return f"{seconds * 1e6:5.0f} µs"


def _bar(start: float, end: float) -> str:
    """`start` and `end` are shares of the whole width. Starts at a whole cell, ends at an eighth of one."""
    first = min(_BAR_CELLS - 1, max(0, int(start * _BAR_CELLS)))
    eighths = max(1, min(_BAR_CELLS * 8, round(end * _BAR_CELLS * 8)) - first * 8)
    whole, part = divmod(eighths, 8)
    body = "█" * whole + (_EIGHTHS[part] if part else "")
    return (" " * first + body).ljust(_BAR_CELLS)


def _summary(finished: pb.Finished) -> str:
    t = finished.timings
    parts = [f"first token after {duration(t.ttft).strip()}", f"total {duration(t.total).strip()}"]
    parts.append(f"{_tokens(finished.usage.completion_tokens)} of answer")
    parts.append("stopped" if finished.finish_reason == "stop" else f"ended by {finished.finish_reason}")
    if finished.usage.cached_tokens:
        parts.append(f"{finished.usage.cached_tokens} prompt tokens from the cache")
    if finished.attempts > 1:
        parts.append(f"{finished.attempts} attempts")
    return " · ".join(parts)


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _rate(tokens: int, seconds: float) -> str:
    return f" · {tokens / seconds:,.0f} tokens/s" if tokens > 0 and seconds > 0 else ""
