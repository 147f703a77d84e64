"""What a worker measures reaches each router once: what was added since the router was told last, and nothing from before."""

import asyncio
from collections.abc import AsyncIterator

from bench.virtual_time import VirtualTimeLoop
from tandem.mailbox import SessionHub
from tandem.measures import Measures
from tandem.session import HEARTBEAT_S, serve_session
from tandem.v1 import worker_pb2 as pb
from tandem.wire import series_from_wire


async def _commands(router_id: str) -> AsyncIterator[pb.DecodeCommand]:
    yield pb.DecodeCommand(hello=router_id)
    await asyncio.Event().wait()


def _session(hub: SessionHub[pb.DecodeEvents], measures: Measures, router_id: str) -> AsyncIterator[pb.DecodeEvents]:
    return serve_session(
        hub, _commands(router_id), lambda router, command: None, lambda router: None, lambda: pb.WorkerLoad(running=1), measures
    )


def _told(message: pb.DecodeEvents) -> dict[tuple[str, ...], float]:
    return {series.key[1]: series.total for series in map(series_from_wire, message.load.measured)}


async def _two_routers() -> list[dict[tuple[str, ...], float]]:
    hub, measures = SessionHub(pb.DecodeEvents), Measures()
    measures.add("decode_tokens", 100, "batch")
    early = _session(hub, measures, "early")
    told = [_told(await anext(early))]
    measures.add("decode_tokens", 5, "batch")
    told.append(_told(await anext(early)))
    late = _session(hub, measures, "late")
    await anext(late)
    measures.add("decode_tokens", 1, "interactive")
    told += [_told(await anext(early)), _told(await anext(late)), _told(await anext(early))]
    await early.aclose()  # type: ignore[attr-defined]
    await late.aclose()  # type: ignore[attr-defined]
    return told


def test_each_router_is_told_what_was_added_since_it_was_told_last() -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        told = runner.run(_two_routers())
    assert told == [{}, {("batch",): 5}, {("interactive",): 1}, {("interactive",): 1}, {}]


async def _busy() -> int:
    """Messages of a busy second that tell what was measured."""
    hub, measures = SessionHub(pb.DecodeEvents), Measures()
    session = _session(hub, measures, "router")
    await anext(session)
    with_measured = 0
    for _ in range(100):
        measures.add("decode_tokens", 1, "batch")
        hub.post("router", pb.DecodeEvents(ready=[pb.SequenceReady(request_id="r")]))
        await asyncio.sleep(HEARTBEAT_S / 100)
        with_measured += bool((await anext(session)).load.measured)
    await session.aclose()  # type: ignore[attr-defined]
    return with_measured


def test_a_message_a_step_does_not_carry_them_each_time() -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert 1 <= runner.run(_busy()) <= 3
