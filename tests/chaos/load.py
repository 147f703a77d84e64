"""Streams that go on while workers die, each token held against what one process computes."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from tandem.request import Request
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tests.chaos.cases import Case

__all__ = ["BOUNDED", "Load", "Record", "ask"]

BOUNDED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""The statuses with which a request may end when workers are lost: retries that were used up, no worker, or a full queue."""

_HANGS_S = 120.0
_PAUSE_S = 0.5


@dataclass(slots=True)
class Record:
    """One request as its client saw it. wrong: the first token that differs, in words; empty: none. status: with which it
    failed; None: it was answered. longest_gap_s: between two messages with tokens."""

    case: Case
    num_tokens: int = 0
    attempts: int = 0
    wrong: str = ""
    status: grpc.StatusCode | None = None
    reason: str = ""
    request_id: str = ""
    first_token_s: float = 0.0
    longest_gap_s: float = 0.0

    @property
    def resumed(self) -> bool:
        return self.attempts > 1


async def ask(stub: pb_grpc.InferenceStub, case: Case, timeout_s: float = _HANGS_S) -> Record:
    record = Record(case)
    asked_s = time.monotonic()
    last_s = 0.0
    try:
        async for response in stub.Generate(_message(case.request), timeout=timeout_s):
            if response.token_ids:
                now_s = time.monotonic()
                if last_s:
                    record.longest_gap_s = max(record.longest_gap_s, now_s - last_s)
                else:
                    record.first_token_s = now_s - asked_s
                last_s = now_s
                _compare(record, response.token_ids)
            if response.HasField("finished"):
                record.attempts, record.request_id = response.finished.attempts, response.finished.request_id
    except grpc.aio.AioRpcError as error:
        record.status, record.reason = error.code(), error.details() or ""
        return record
    if not record.attempts:
        record.wrong = record.wrong or "the stream ended without `finished`"
    elif record.num_tokens < len(case.expected):
        record.wrong = record.wrong or f"{record.num_tokens} of {len(case.expected)} tokens came"
    return record


class Load:
    """So many streams at once, one request after another, until `stop`."""

    def __init__(self, stub: pb_grpc.InferenceStub, cases: Sequence[Case], num_streams: int) -> None:
        self.records: list[Record] = []
        self._stub = stub
        self._cases = itertools.cycle(cases)
        self._stopping = False
        self._streams = [asyncio.create_task(self._stream(), name=f"stream {i}") for i in range(num_streams)]

    async def stop(self) -> None:
        """Let what runs come to its end."""
        self._stopping = True
        await asyncio.gather(*self._streams)

    @property
    def failures(self) -> Counter[str]:
        """Requests that failed, by status and reason, without the names of workers."""
        return Counter(f"{r.status.name}: {_gist(r.reason)}" for r in self.records if r.status is not None)

    async def _stream(self) -> None:
        while not self._stopping:
            record = await ask(self._stub, next(self._cases))
            self.records.append(record)
            if record.status is not None:
                await asyncio.sleep(_PAUSE_S)


def _compare(record: Record, tokens: Sequence[int]) -> None:
    expected = record.case.expected
    for token in tokens:
        at = record.num_tokens
        wanted = expected[at] if at < len(expected) else None
        if token != wanted and not record.wrong:
            record.wrong = f"token {at} is {token}, expected {wanted}"
        record.num_tokens += 1


def _message(request: Request) -> pb.GenerateRequest:
    sampling = request.sampling
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=request.prompt),
        max_new_tokens=request.stop.max_new_tokens,
        ignore_eos=True,
        sampling=pb.Sampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed),
    )


def _gist(reason: str) -> str:
    """Without the names of workers and requests, so that like reasons are counted together."""
    return re.sub(r"\b(prefill|decode)-[\w-]+", r"\1 …", reason.split(";")[0])[:90]
