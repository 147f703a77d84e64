"""What a decode worker holds of a prompt does not travel again, and nothing that is shared is ever written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.clock import FakeClock
from tandem.errors import HandoffRefused
from tests.transfer.helpers import BLOCK, EPOCH, SPECS, Pair, fill, grant_of, lease_table, request, sequence_bytes
from transfer.handoff import HandoffResult
from transfer.lease_memory import AdmissionPolicy
from transfer.lease_state import Lease

PROMPT = 2 * BLOCK + 2


def served(pair: Pair, request_id: str, num_prompt: int = PROMPT, blocks: tuple[int, ...] = (3, 9, 5)) -> Lease:
    """A whole hand-off; the sequence runs."""
    lease = pair.reserve(num_prompt, request_id, may_share=True)
    pair.handoff(lease, blocks)
    pair.run(0.1)
    return pair.decode.leases.start_running(lease.id, EPOCH)


def end(pair: Pair, lease: Lease) -> None:
    assert pair.decode.leases.release(lease.id, EPOCH)


def test_a_prompt_that_begins_like_an_earlier_one_is_sent_only_the_rest() -> None:
    pair = Pair()
    end(pair, served(pair, "first"))
    again = served(pair, "again", PROMPT + BLOCK, (3, 9, 7, 8))
    assert again.num_held == 2
    assert [(r.kv_bytes, r.held_bytes, r.state_bytes) for r in pair.results if isinstance(r, HandoffResult)] == [
        (3 * SPECS.block_bytes, 0, SPECS.slot_bytes),
        (2 * SPECS.block_bytes, 2 * SPECS.block_bytes, SPECS.slot_bytes),
    ]
    assert sequence_bytes(pair.memory, (3, 9, 7, 8), 2) == sequence_bytes(pair.decode.memory, again.block_ids[:4], again.slot)


def test_blocks_are_shared_with_a_sequence_that_still_runs_and_stay_until_the_last_ends() -> None:
    pair = Pair()
    first, second = served(pair, "first"), served(pair, "second")
    assert second.block_ids[:2] == first.block_ids[:2]
    assert not set(second.block_ids[2:]) & set(first.block_ids[2:])
    before = sequence_bytes(pair.decode.memory, second.block_ids[:2], second.slot)
    end(pair, first)
    fill(pair.memory, seed=5)
    others = [served(pair, f"other {number}", 1, (1,)) for number in range(2)]
    assert not any(set(other.block_ids) & set(second.block_ids) for other in others)
    assert sequence_bytes(pair.decode.memory, second.block_ids[:2], second.slot) == before
    assert pair.decode.leases.check() == []


def test_a_whole_prompt_that_is_held_sends_its_state_alone() -> None:
    pair = Pair()
    served(pair, "first", 2 * BLOCK, (3, 9))
    again = served(pair, "again", 2 * BLOCK, (3, 9))
    assert again.num_held == 2
    assert isinstance(pair.results[-1], HandoffResult)
    assert (pair.results[-1].kv_bytes, pair.results[-1].state_bytes) == (0, SPECS.slot_bytes)


def test_what_was_not_verified_is_not_shared() -> None:
    pair = Pair()
    pair.reserve(PROMPT, "under way", may_share=True)
    assert pair.reserve(PROMPT, "second", may_share=True).num_held == 0
    cancelled = pair.reserve(PROMPT, "third", may_share=True)
    pair.decode.leases.abort(cancelled.id, "cancelled")
    pair.decode.leases.writer_quiet(cancelled.id, EPOCH, "p")
    assert pair.reserve(PROMPT, "fourth", may_share=True).num_held == 0


def test_a_writer_that_cannot_leave_out_blocks_is_given_none_that_are_shared() -> None:
    pair = Pair()
    first = served(pair, "first")
    lease = pair.reserve(PROMPT, "second")
    assert lease.num_held == 0
    assert not set(lease.block_ids) & set(first.block_ids)
    pair.handoff(lease)
    pair.run(0.1)
    assert len(pair.decode.verified) == 2


def test_a_writer_that_sends_what_is_held_is_refused() -> None:
    pair = Pair()
    end(pair, served(pair, "first"))
    lease = pair.reserve(PROMPT, "second", may_share=True)
    handoff = pair.sender.begin(replace(grant_of(lease), num_held=0), "second", 1, (3, 9, 5), 2)
    handoff.finish(PROMPT, 42, pair.clock.now(), pair.results.append)
    pair.run(0.1)
    assert pair.decode.refused_fields == ["kv_bytes"]


def test_a_grant_that_holds_more_than_the_prompt_is_refused() -> None:
    pair = Pair()
    lease = pair.reserve(PROMPT, "r")
    with pytest.raises(HandoffRefused, match="num_held"):
        pair.sender.begin(replace(grant_of(lease), num_held=4), "r", 1, (3, 9, 5), 2)


def test_where_every_bit_counts_nothing_of_a_tile_that_is_not_full_is_shared() -> None:
    for whole_tokens, num_held in ((1, 3), (2 * BLOCK, 2)):
        policy = AdmissionPolicy(keep_prefixes=True, whole_tokens=whole_tokens)
        leases = lease_table(FakeClock(), policy=policy)
        first = leases.reserve(request(3 * BLOCK + 1, request_id="first"), 1, "router", "p", may_share=True)
        leases.verified(first.id, EPOCH)
        again = leases.reserve(request(3 * BLOCK + 1, request_id="again"), 1, "router", "p", may_share=True)
        assert again.num_held == num_held


def test_kept_blocks_are_free_for_whoever_needs_them() -> None:
    pair = Pair()
    leases = pair.decode.leases
    end(pair, served(pair, "first"))
    assert (leases.num_blocks_used(), leases.num_blocks_free()) == (0, 16)
    large = pair.reserve(16 * BLOCK - 3, "large")
    assert len(large.block_ids) == 16
    leases.abort(large.id, "cancelled")
    leases.writer_quiet(large.id, EPOCH, "p")
    assert pair.reserve(PROMPT, "again", may_share=True).num_held == 0
    assert leases.check() == []
