"""What workers tell of their prefixes, and what they are told of answers."""

from __future__ import annotations

from dataclasses import replace

from router.handles import load_of
from router.prefixes import PrefixEntry
from router.worker import WorkerLoad
from tandem.measures import Measures
from tandem.session import _Told
from tandem.v1 import worker_pb2 as pb
from tests.router.tools import Bench, prompt

INDEX = pb.PrefixIndex(version=3, names=[11, 12], num_tokens=[32, 40], parents=[0, 11])
ENTRIES = (PrefixEntry(11, 32), PrefixEntry(12, 40, parent=11))


async def test_an_index_is_sent_when_it_has_changed_and_remembered_until_then() -> None:
    told = _Told(Measures())
    load = pb.WorkerLoad(prefixes=INDEX)
    first = told.with_load(pb.PrefillEvents(), load).load
    second = told.with_load(pb.PrefillEvents(), load).load
    assert (first.HasField("prefixes"), second.HasField("prefixes")) == (True, False)
    known = load_of(first)
    assert known.prefixes == ENTRIES
    assert load_of(second, known).prefixes is known.prefixes
    load.prefixes.version = 4
    assert told.with_load(pb.PrefillEvents(), load).load.HasField("prefixes")


async def test_a_worker_without_a_cache_says_nothing_of_it() -> None:
    assert (
        not _Told(Measures()).with_load(pb.PrefillEvents(), pb.WorkerLoad(prefixes=pb.PrefixIndex())).load.HasField("prefixes")
    )


async def test_answers_go_back_to_workers_that_keep_states() -> None:
    bench = Bench()
    [worker] = bench.cluster.prefill
    await bench.ask(prompt(max_new_tokens=3))
    assert worker.absorbed == []
    worker.load = replace(worker.load or WorkerLoad(), prefixes=ENTRIES)
    bench.cluster.table.changed()
    tokens, _, _ = await bench.ask(prompt(max_new_tokens=3))
    [absorbed] = worker.absorbed
    assert absorbed.generated == tuple(tokens)
    assert absorbed.tokens == absorbed.prompt + tuple(tokens)
    bench.assert_nothing_is_left()
