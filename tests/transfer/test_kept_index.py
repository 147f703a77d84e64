"""What routers are told of kept prompts: names that they compute too, of what is really there, a bounded number."""

from __future__ import annotations

from tandem.cache.names import Prefix
from tandem.cache.pool import IndexPool
from tandem.clock import FakeClock
from tandem.request import Request, SamplingParams, StopRules
from tests.transfer.helpers import BLOCK, EPOCH, FINGERPRINT, SPECS
from transfer import kept_index
from transfer.kept_index import KeptIndex
from transfer.lease import LeaseTable
from transfer.lease_memory import AdmissionPolicy


def table(num_blocks: int = 400) -> LeaseTable:
    pools = IndexPool(num_blocks, "blocks"), IndexPool(4, "slots")
    return LeaseTable(*pools, SPECS, FakeClock(), 60.0, EPOCH, AdmissionPolicy(keep_prefixes=True), FINGERPRINT)


def serve(leases: LeaseTable, tokens: tuple[int, ...]) -> None:
    asked = Request(f"{tokens}", tokens, SamplingParams(), StopRules(2))
    lease = leases.reserve(asked, 1, "router", "p", may_share=True)
    leases.verified(lease.id, EPOCH)
    leases.start_running(lease.id, EPOCH)
    leases.release(lease.id, EPOCH)


def test_a_router_that_knows_the_next_turn_finds_the_name_of_the_last_one() -> None:
    leases = table()
    assert leases.kept() == KeptIndex()
    serve(leases, tuple(range(2 * BLOCK + 1)))
    kept = leases.kept()
    assert (kept.version, kept.num_tokens) == (1, (2 * BLOCK,))
    next_turn = Prefix.of(FINGERPRINT, BLOCK, range(5 * BLOCK))
    assert kept.names == (next_turn.shorts[2],)


def test_a_prompt_shorter_than_a_block_is_not_told_of() -> None:
    leases = table()
    serve(leases, (1,) * (BLOCK - 1))
    assert leases.kept() == KeptIndex()


def test_the_newest_come_first_once_each_and_no_news_is_the_same_index() -> None:
    leases = table()
    for first in (1, 2, 1):
        serve(leases, (first,) * BLOCK)
    kept = leases.kept()
    assert kept.names == tuple(Prefix.of(FINGERPRINT, BLOCK, (first,) * BLOCK).shorts[1] for first in (1, 2))
    serve(leases, (1,) * BLOCK)
    assert leases.kept() is kept


def test_what_made_room_is_told_of_no_more() -> None:
    leases = table(num_blocks=4)
    serve(leases, (1,) * BLOCK)
    before = leases.kept()
    serve(leases, (2,) * (4 * BLOCK - 1))  # needs them all
    after = leases.kept()
    assert len(after.names) == 1
    assert set(after.names).isdisjoint(before.names)
    assert after.version > before.version


def test_a_bounded_number_is_told() -> None:
    leases = table(num_blocks=1000)
    for number in range(kept_index._MOST_PUBLISHED + 10):
        serve(leases, (number,) * BLOCK)
    names = leases.kept().names
    assert len(names) == kept_index._MOST_PUBLISHED
    assert names[0] == Prefix.of(FINGERPRINT, BLOCK, (number,) * BLOCK).shorts[1]
