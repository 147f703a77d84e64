"""What the router's tests share: a model of bytes, and a pipeline on fake workers."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from router.answer import Delta
from router.callers import Callers
from router.fake_workers import FakeCluster, Script
from router.job import Job, Outcome
from router.model import ModelInfo, ServedModel
from router.pipeline import Pipeline
from tandem.chat_parser import ChatFormat
from tandem.clock import MonotonicClock
from tandem.config import RouterConfig
from tandem.detokenizer import BytePieces, IncrementalDetokenizer
from tandem.errors import InvalidRequest
from tandem.measures import Measures
from tandem.secret import Secret
from tandem.tokenizer import ChatPrompt
from tandem.tracing import NO_TRACER, Tracer
from tandem.trust import Trust
from tandem.v1 import inference_pb2 as pb

EOS = 0
TRUST = Trust(Secret("of the router's tests"))
MODEL = ModelInfo("bytes", "f1", max_context_tokens=512, block_size_tokens=16, vocab_size=256)


class ByteTokenizer:
    """One token per byte of UTF-8; token 0 ends an answer."""

    eos_ids = frozenset({EOS})

    def encode(self, text: str, enough: int = 2**62) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        enough: int = 2**62,
    ) -> ChatPrompt:
        """Its template reasons when the options say so, and a system message of "never" is refused."""
        if any(message["content"] == "never" for message in messages):
            raise InvalidRequest("chat", "the template says no")
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return ChatPrompt(self.encode(text), ChatFormat(True, bool(options.get("thinking")), tools))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(BytePieces([b"", *(bytes([i]) for i in range(1, 256))]))


SERVED = ServedModel(MODEL, ByteTokenizer())


class Bench:
    """A pipeline on a fake cluster; ended: the jobs that it observed; measures: what it measured."""

    def __init__(
        self,
        num_prefill: int = 1,
        num_decode: int = 1,
        script: Script | None = None,
        config: RouterConfig | None = None,
        slots: int = 8,
        callers: Callers | None = None,
        tracer: Tracer = NO_TRACER,
        local_prefill_tokens: int = 0,
    ) -> None:
        self.cluster = FakeCluster(
            MODEL, num_prefill, num_decode, script, slots=slots, local_prefill_tokens=local_prefill_tokens
        )
        self.ended: list[Job] = []
        self.measures = Measures()
        self.pipeline = Pipeline(
            *(config or RouterConfig(), self.cluster.table, lambda: SERVED, MonotonicClock(), self.ended.append, callers),
            measures=self.measures,
            tracer=tracer,
        )

    async def ask(self, message: pb.GenerateRequest, deadline_s: float | None = None) -> tuple[list[int], str, Outcome]:
        return await collect(self.pipeline, message, deadline_s)

    def assert_nothing_is_left(self) -> None:
        assert not self.cluster.num_running
        assert not self.pipeline.num_by_phase
        for handle in self.cluster.by_id.values():
            assert not len(handle.subscriptions)
        for entry in self.cluster.table.entries:
            assert not entry.assigned_blocks
            assert not entry.assigned_tokens


async def collect(
    pipeline: Pipeline, message: pb.GenerateRequest, deadline_s: float | None = None
) -> tuple[list[int], str, Outcome]:
    tokens: list[int] = []
    text = ""
    outcome = None
    async for item in pipeline.generate(message, "test", deadline_s):
        if isinstance(item, Delta):
            tokens += item.token_ids
            text += item.text
        else:
            outcome = item
    assert outcome is not None
    return tokens, text, outcome


def says(text: str) -> Script:
    """Every answer is this text, then the end token."""
    data = text.encode()
    return Script(answer=lambda request, index: data[index] if index < len(data) else EOS)


def prompt(text: str = "hello", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]


async def until(condition: Callable[[], object], bound_s: float = 5.0) -> None:
    """Give the others turns until the condition holds."""
    async with asyncio.timeout(bound_s):
        for turn in itertools.count():
            if condition():
                return
            await asyncio.sleep(0 if turn < 1000 else 0.001)
