"""Sender and receiver over the fake fabric: whatever happens to writes and messages, nothing wrong is ever believed, and no
memory is called quiet while a write may land in it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tandem.cache.budget import PoolSizes
from tandem.cache.memory import CacheMemory
from tandem.cache.spec import CacheSpecs
from tandem.config import TransferConfig
from tandem.errors import HandoffError, HandoffRefused, LeaseLost, NoRoom, PeerRefused, TransferFailed
from tests.transfer.helpers import (
    BLOCK,
    EPOCH,
    FINGERPRINT,
    KV,
    SPECS,
    SPECS_STATE_LAYERS,
    DecodeSide,
    Pair,
    fill,
    grant_of,
    request,
    sequence_bytes,
)
from transfer.fake_agent import Faults
from transfer.handoff import Finish, HandoffResult, LeaseGrant, Outgoing
from transfer.layout import CacheLayout
from transfer.lease_state import AWAITED_STATES, Lease, LeaseState
from transfer.plan import TransferPlan
from transfer.record import HandoffRecord, WriteNotice, clock_id, decode_message


def arrived_whole(pair: Pair, lease_blocks: tuple[int, ...], slot: int, blocks: tuple[int, ...] = (3, 9, 5)) -> bool:
    return sequence_bytes(pair.memory, blocks, 2) == sequence_bytes(pair.decode.memory, lease_blocks[: len(blocks)], slot)


def test_a_handoff_arrives_whole_and_is_verified_once() -> None:
    pair = Pair()
    lease = pair.reserve()
    pair.handoff(lease)
    pair.run(0.1)
    [(verified, record, exposed_s)] = pair.decode.verified
    assert verified.state is LeaseState.VERIFIED
    assert (record.first_token, record.num_positions) == (42, 10)
    assert 0.0 <= exposed_s <= 0.1
    assert pair.decode.refused == []
    assert arrived_whole(pair, lease.block_ids, lease.slot)
    [result] = pair.results
    assert isinstance(result, HandoffResult)
    assert (result.kv_bytes, result.state_bytes) == (3 * SPECS.block_bytes, SPECS.slot_bytes)


def test_nothing_else_in_the_decode_workers_memory_changes() -> None:
    pair = Pair()
    fill(pair.decode.memory, seed=9)
    lease = pair.reserve()
    others = tuple(b for b in range(16) if b not in lease.block_ids[:3]), 1 - lease.slot
    before = sequence_bytes(pair.decode.memory, *others)
    pair.handoff(lease)
    pair.run(0.1)
    assert len(pair.decode.verified) == 1
    assert sequence_bytes(pair.decode.memory, *others) == before


def test_finished_blocks_leave_before_prefill_ends() -> None:
    pair = Pair()
    lease = pair.reserve(num_prompt=12)
    handoff = pair.sender.begin(grant_of(lease), "r", 1, (3, 9, 5), 2)
    handoff.push_kv(0, 2)
    pair.run(0.02)
    assert pair.fabric.num_landed_items == 2 * 2
    assert pair.decode.leases.counts_by_state()["receiving"] == 1
    handoff.push_state(0)
    pair.run(0.02)
    assert pair.fabric.num_landed_items == 2 * 2 + 2


def test_without_overlap_everything_leaves_at_the_end_and_arrives_the_same() -> None:
    pair = Pair(config=TransferConfig(overlap=False))
    lease = pair.reserve()
    handoff = pair.sender.begin(grant_of(lease), "r", 1, (3, 9, 5), 2)
    handoff.push_kv(0, 2)
    handoff.push_state(0)
    pair.run(0.05)
    assert pair.fabric.num_landed_items == 0
    handoff.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.run(0.05)
    assert len(pair.decode.verified) == 1
    assert arrived_whole(pair, lease.block_ids, lease.slot)


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5, 8, 9])
def test_prompts_around_every_block_boundary_arrive(num_prompt: int) -> None:
    pair = Pair()
    lease = pair.reserve(num_prompt)
    blocks = tuple(range(7, 7 + SPECS.blocks_for(num_prompt)))
    pair.handoff(lease, blocks)
    pair.run(0.1)
    assert len(pair.decode.verified) == 1
    assert arrived_whole(pair, lease.block_ids, lease.slot, blocks)


def test_the_record_waits_for_the_slowest_write() -> None:
    pair = Pair(Faults(delay_s=(0.5, 0.5)))
    pair.handoff(pair.reserve())
    pair.run(0.4)
    assert pair.decode.verified == []
    assert pair.results == []
    pair.run(1.0)
    assert len(pair.decode.verified) == 1


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_arrival_gives_the_same_bytes(seed: int) -> None:
    pair = Pair(Faults(delay_s=(0.0, 0.3), notify_doubled=0.5), seed)
    leases = [pair.reserve(request_id=f"r{i}") for i in range(3)]
    for lease in leases:
        pair.handoff(lease)
    pair.run(2.0)
    assert sorted(lease.request.request_id for lease, _, _ in pair.decode.verified) == ["r0", "r1", "r2"]
    for lease in leases:
        assert arrived_whole(pair, lease.block_ids, lease.slot)
    assert set(pair.decode.refused_fields) <= {"lease_id"}  # the doubles
    assert pair.decode.leases.check() == []


def test_a_doubled_record_is_counted_and_harmless() -> None:
    pair = Pair(Faults(notify_doubled=1.0))
    pair.handoff(pair.reserve())
    pair.run(0.1)
    assert len(pair.decode.verified) == 1
    assert pair.decode.receiver.refused["lease_id"] == 1
    assert pair.decode.leases.counts_by_state()["verified"] == 1


def test_a_changed_state_is_refused_and_its_memory_free_at_once() -> None:
    pair = Pair(Faults(state_changed=1.0))
    pair.handoff(pair.reserve())
    pair.run(0.1)
    assert pair.decode.verified == []
    assert pair.decode.refused_fields == ["state_checksum"]
    assert sum(pair.decode.leases.counts_by_state().values()) == 0
    assert pair.decode.leases.check() == []


def test_a_state_that_changes_after_it_was_pushed_is_refused() -> None:
    pair = Pair(Faults(delay_s=(0.1, 0.1)))
    pair.handoff(pair.reserve())
    pair.sender.step()
    pair.memory.recurrent[1][2] += 1.0
    pair.run(1.0)
    assert pair.decode.verified == []
    assert pair.decode.refused_fields == ["state_checksum"]


def test_a_spoilt_record_is_refused_and_frees_the_lease_once_its_writer_says_so() -> None:
    pair = Pair(Faults(notify_changed=1.0))
    lease = pair.reserve()
    pair.handoff(lease)
    pair.run(0.1)
    assert pair.decode.verified == []
    assert set(pair.decode.refused_fields) == {"record"}
    pair.decode.leases.writer_quiet(lease.id, EPOCH, "p", record_sent=True)
    pair.run(3.0)
    assert pair.decode.refused_fields[-1] == "expires_at"
    assert sum(pair.decode.leases.counts_by_state().values()) == 0


def test_a_lost_record_ends_in_quarantine_until_the_writer_is_heard() -> None:
    pair = Pair(Faults(notify_lost=1.0))
    lease = pair.reserve()
    pair.handoff(lease)
    pair.run(61.0, tick_s=0.5)
    assert pair.decode.refused_fields == ["expires_at"]
    assert pair.decode.leases.counts_by_state()["quarantined"] == 1
    pair.decode.leases.writer_quiet(lease.id, EPOCH, "p", record_sent=True)
    assert pair.decode.leases.check() == []
    assert sum(pair.decode.leases.counts_by_state().values()) == 0


def test_a_record_after_the_lease_was_aborted_is_refused_and_ends_the_quarantine() -> None:
    pair = Pair(Faults(delay_s=(0.1, 0.1)))
    lease = pair.reserve()
    pair.handoff(lease)
    pair.run(0.05)
    pair.decode.leases.abort(lease.id, "client went away")
    assert pair.decode.leases.counts_by_state()["quarantined"] == 1
    pair.run(1.0)
    assert pair.decode.verified == []
    assert sum(pair.decode.leases.counts_by_state().values()) == 0


def test_long_prefills_do_not_expire_while_their_writes_go_on() -> None:
    pair = Pair()
    lease = pair.reserve(num_prompt=40)
    handoff = pair.sender.begin(grant_of(lease), "r", 1, tuple(range(10)), 2)
    for block in range(10):
        handoff.push_kv(block, block + 1)
        pair.run(40.0, tick_s=10.0)
    handoff.finish(40, 42, pair.clock.now(), pair.results.append)
    pair.run(0.1)
    assert len(pair.decode.verified) == 1


def test_a_failed_write_fails_the_handoff_and_drops_the_pair() -> None:
    pair = Pair(Faults(write_fails=1.0))
    lease = pair.reserve()
    pair.handoff(lease)
    pair.run(0.1)
    [error] = pair.results
    assert isinstance(error, TransferFailed)
    assert pair.decode.verified == []
    with pytest.raises(TransferFailed, match="not connected"):
        pair.sender.begin(grant_of(lease), "r", 2, (3, 9, 5), 2)


def test_a_failed_pair_can_connect_again() -> None:
    pair = Pair(Faults(write_fails=1.0))
    pair.handoff(pair.reserve())
    pair.run(0.1)
    pair.fabric.faults = Faults()
    connected = pair.sender.connect_soon("d", pair.decode.agent.metadata, pair.decode.layout)
    pair.run(0.1)
    connected.result(0)
    pair.handoff(pair.reserve(attempt=2))
    pair.run(0.1)
    assert len(pair.decode.verified) == 1


def test_quiet_is_not_reported_while_a_write_may_land() -> None:
    pair = Pair(Faults(delay_s=(5.0, 5.0)))
    lease = pair.reserve(num_prompt=12)
    handoff = pair.sender.begin(grant_of(lease), "r", 1, (3, 9, 5), 2)
    handoff.push_kv(0, 2)
    pair.run(0.1)
    handoff.abort(lambda: pair.quiet.append("quiet"))
    pair.run(4.5)
    landed = pair.fabric.num_landed_items
    assert pair.quiet == []
    assert landed == 0
    pair.run(1.0)
    assert pair.quiet == ["quiet"]
    assert pair.fabric.num_landed_items == 4
    assert pair.decode.verified == []


def test_nothing_is_posted_after_an_abort() -> None:
    pair = Pair(Faults(delay_s=(0.1, 0.1)))
    lease = pair.reserve(num_prompt=12)
    handoff = pair.sender.begin(grant_of(lease), "r", 1, (3, 9, 5), 2)
    handoff.push_kv(0, 1)
    handoff.abort(lambda: pair.quiet.append("quiet"))
    pair.run(1.0)
    assert pair.fabric.num_landed_items == 0
    assert pair.quiet == ["quiet"]
    with pytest.raises(ValueError, match="aborted before"):
        handoff.push_kv(1, 2)


def test_an_abort_of_what_never_began_is_quiet_at_once() -> None:
    pair = Pair()
    pair.sender.begin(grant_of(pair.reserve()), "r", 1, (3, 9, 5), 2).abort(lambda: pair.quiet.append("quiet"))
    pair.sender.step()
    assert pair.quiet == ["quiet"]


def test_an_abort_between_finish_and_record_sends_no_record() -> None:
    pair = Pair(Faults(delay_s=(1.0, 1.0)))
    lease = pair.reserve()
    handoff = pair.sender.begin(grant_of(lease), "r", 1, (3, 9, 5), 2)
    handoff.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.run(0.5)
    handoff.abort(lambda: pair.quiet.append("quiet"))
    pair.run(2.0)
    assert pair.quiet == ["quiet"]
    assert pair.results == []
    assert pair.decode.verified == []


def test_an_abort_after_the_record_is_quiet_and_changes_nothing() -> None:
    pair = Pair()
    lease = pair.reserve()
    handoff = pair.sender.begin(grant_of(lease), "r", 1, (3, 9, 5), 2)
    handoff.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.run(0.1)
    handoff.abort(lambda: pair.quiet.append("quiet"))
    pair.run(0.1)
    assert pair.quiet == ["quiet"]
    assert len(pair.results) == len(pair.decode.verified) == 1


def test_a_write_that_never_ends_fails_in_time_and_is_never_called_quiet() -> None:
    pair = Pair(Faults(write_hangs=1.0))
    lease = pair.reserve()
    handoff = pair.sender.begin(grant_of(lease), "r", 1, (3, 9, 5), 2)
    handoff.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.run(29.0, tick_s=0.5)
    assert pair.results == []
    pair.run(2.0, tick_s=0.5)
    [error] = pair.results
    assert isinstance(error, TransferFailed)
    assert isinstance(handoff.failure, TransferFailed)
    handoff.abort(lambda: pair.quiet.append("quiet"))
    pair.run(600.0, tick_s=10.0)
    assert pair.quiet == []
    # Until the peer is known to be gone: then nobody is left whose memory could be hurt.
    pair.fabric.kill("d")
    pair.sender.disconnect("d", dead=True)
    pair.sender.step()
    assert pair.quiet == ["quiet"]


def test_after_a_failed_write_quiet_waits_until_the_connection_is_closed_for_a_while() -> None:
    pair = Pair(Faults(write_fails=1.0))
    handoff = pair.sender.begin(grant_of(pair.reserve()), "r", 1, (3, 9, 5), 2)
    handoff.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.run(0.1)
    assert isinstance(handoff.failure, TransferFailed)
    handoff.abort(lambda: pair.quiet.append("quiet"))
    pair.run(0.5)
    assert pair.quiet == []
    pair.run(1.0)
    assert pair.quiet == ["quiet"]


def test_quiet_after_a_failure_waits_for_the_other_writes_on_that_connection() -> None:
    pair = Pair(Faults(delay_s=(5.0, 5.0)))
    slow = pair.sender.begin(grant_of(pair.reserve(num_prompt=12)), "r", 1, (3, 9, 5), 2)
    slow.push_kv(0, 2)
    pair.run(0.1)
    pair.fabric.faults = Faults(write_fails=1.0)
    failing = pair.sender.begin(grant_of(pair.reserve(request_id="f")), "f", 1, (1, 2, 4), 1)
    failing.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.run(0.1)
    slow.abort(lambda: pair.quiet.append("slow"))
    failing.abort(lambda: pair.quiet.append("failing"))
    pair.run(4.5)
    assert pair.quiet == []
    pair.run(2.0)
    assert sorted(pair.quiet) == ["failing", "slow"]


def test_a_handoff_whose_prefill_is_over_goes_before_one_that_still_computes() -> None:
    pair = Pair()
    order: list[str] = []
    first, second = pair.reserve(num_prompt=12), pair.reserve(request_id="s")
    slots = {first.slot: "first", second.slot: "second"}
    conv_0 = pair.decode.layout.firsts[0]
    pair.fabric.on_land = lambda _, index, __: order.append(slots.get(index - conv_0, ""))
    computing = pair.sender.begin(grant_of(first), "r", 1, (3, 9, 5), 2)
    over = pair.sender.begin(grant_of(second), "s", 1, (1, 2, 4), 1)
    computing.push_state(0)
    over.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.sender.step()
    assert [name for name in order if name] == ["second", "first"]


def test_a_failure_reported_before_the_end_reaches_finish() -> None:
    pair = Pair(Faults(write_fails=1.0))
    handoff = pair.sender.begin(grant_of(pair.reserve(num_prompt=12)), "r", 1, (3, 9, 5), 2)
    handoff.push_kv(0, 2)
    pair.run(0.1)
    assert handoff.failure is not None
    handoff.finish(12, 42, pair.clock.now(), pair.results.append)
    pair.sender.step()
    assert pair.results == [handoff.failure]
    handoff.abort(lambda: pair.quiet.append("quiet"))
    pair.run(1.5)
    assert pair.quiet == ["quiet"]


def test_a_dead_decode_worker_fails_its_handoffs_and_frees_the_writers_memory() -> None:
    pair = Pair(Faults(delay_s=(5.0, 5.0)))
    handoff = pair.sender.begin(grant_of(pair.reserve()), "r", 1, (3, 9, 5), 2)
    handoff.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.run(0.1)
    pair.fabric.kill("d")
    pair.sender.disconnect("d", dead=True)
    pair.sender.step()
    [error] = pair.results
    assert isinstance(error, TransferFailed)
    handoff.abort(lambda: pair.quiet.append("quiet"))
    pair.sender.step()
    assert pair.quiet == ["quiet"]


def test_a_leaving_peer_keeps_its_handoffs_and_takes_no_new_ones() -> None:
    pair = Pair(Faults(delay_s=(0.2, 0.2)))
    lease = pair.reserve()
    handoff = pair.sender.begin(grant_of(lease), "r", 1, (3, 9, 5), 2)
    pair.sender.disconnect("d", dead=False)
    pair.run(0.1)
    with pytest.raises(TransferFailed, match="leaving"):
        pair.sender.begin(grant_of(pair.reserve(request_id="r2")), "r2", 1, (1, 2, 4), 1)
    handoff.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.run(1.0)
    assert len(pair.decode.verified) == 1
    with pytest.raises(TransferFailed, match="not connected"):
        pair.sender.begin(grant_of(pair.reserve(request_id="r2")), "r2", 1, (1, 2, 4), 1)


def test_a_peer_that_came_back_under_its_old_name_gets_a_new_connection() -> None:
    pair = Pair(Faults(delay_s=(0.2, 0.2)))
    old = pair.reserve()
    handoff = pair.sender.begin(grant_of(old), "r", 1, (3, 9, 5), 2)
    handoff.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.run(0.05)
    pair.fabric.kill("d")
    reborn = DecodeSide(pair.fabric.agent("d-2"), pair.clock)
    connected = pair.sender.connect_soon("d", reborn.agent.metadata, reborn.layout)
    pair.run(0.5)
    connected.result(0)
    [error] = pair.results
    assert isinstance(error, TransferFailed)
    lease = reborn.leases.reserve(request(), 2, "router", "p")
    pair.decode = reborn
    pair.handoff(lease)
    pair.run(2.0)
    assert len(reborn.verified) == 1


def test_connecting_to_nobody_or_to_a_silent_peer_fails_and_can_be_tried_again() -> None:
    pair = Pair()
    refused = pair.sender.connect_soon("x", b"nobody", pair.decode.layout)
    pair.sender.step()
    with pytest.raises(PeerRefused):
        refused.result(0)
    pair.fabric.faults = Faults(delay_s=(100.0, 100.0))
    other = DecodeSide(pair.fabric.agent("silent"), pair.clock)
    late = pair.sender.connect_soon("s", other.agent.metadata, other.layout, timeout_s=2.0)
    joined = pair.sender.connect_soon("s", other.agent.metadata, other.layout, timeout_s=2.0)
    pair.run(3.0, tick_s=0.5)
    for future in (late, joined):
        with pytest.raises(TransferFailed, match="took too long"):
            future.result(0)
    pair.fabric.faults = Faults()
    again = pair.sender.connect_soon("s", other.agent.metadata, other.layout)
    pair.run(0.1)
    again.result(0)


def test_connecting_twice_is_connecting_once() -> None:
    pair = Pair()
    again = pair.sender.connect_soon("d", pair.decode.agent.metadata, pair.decode.layout)
    pair.sender.step()
    again.result(0)


def test_one_bad_peer_does_not_disturb_another() -> None:
    pair = Pair()
    other = DecodeSide(pair.fabric.agent("d2"), pair.clock)
    connected = pair.sender.connect_soon("d2", other.agent.metadata, other.layout)
    pair.run(0.1)
    connected.result(0)
    lease = other.leases.reserve(request(request_id="o"), 1, "router", "p")
    doomed = pair.sender.begin(grant_of(pair.reserve()), "r", 1, (3, 9, 5), 2)
    healthy = pair.sender.begin(grant_of(lease, "d2"), "o", 1, (1, 2, 4), 1)
    pair.fabric.kill("d")
    doomed.finish(10, 42, pair.clock.now(), pair.results.append)
    healthy.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.run(0.1)
    other.receiver.step()
    assert [type(result) for result in pair.results] in ([TransferFailed, HandoffResult], [HandoffResult, TransferFailed])
    assert len(other.verified) == 1


def test_after_stop_nothing_hangs() -> None:
    pair = Pair(Faults(delay_s=(5.0, 5.0)))
    open_one = pair.sender.begin(grant_of(pair.reserve()), "r", 1, (3, 9, 5), 2)
    waiting = pair.sender.begin(grant_of(pair.reserve(request_id="w")), "w", 1, (1, 2, 4), 1)
    waiting.finish(10, 42, pair.clock.now(), pair.results.append)
    pair.sender.step()
    pair.sender.stop()
    assert not pair.sender.alive
    open_one.finish(10, 42, pair.clock.now(), pair.results.append)
    assert len(pair.results) == 2
    assert all(isinstance(result, TransferFailed) for result in pair.results)
    open_one.abort(lambda: pair.quiet.append("quiet"))
    assert pair.quiet == ["quiet"]
    waiting.abort(lambda: pair.quiet.append("in flight"))
    assert pair.quiet == ["quiet"]  # its write may still land
    with pytest.raises(TransferFailed, match="stopped"):
        pair.sender.begin(grant_of(pair.reserve(request_id="n")), "n", 1, (6,), 0)
    with pytest.raises(TransferFailed, match="stopped"):
        pair.sender.connect_soon("d", b"d", pair.decode.layout).result(0)


# ---- what the receiver is told by somebody who means harm, or is confused ----


def a_record(pair: Pair, lease: Lease, changes: dict[str, object]) -> bytes:
    record = HandoffRecord(
        lease_id=lease.id,
        epoch=EPOCH,
        nonce=lease.nonce,
        request_id="r",
        attempt=1,
        writer_id="p",
        fingerprint=FINGERPRINT,
        layout_digest=pair.layout.digest,
        num_positions=10,
        kv_bytes=3 * SPECS.block_bytes,
        state_bytes=SPECS.slot_bytes,
        state_checksum=0,
        first_token=1,
        compute_done_s=pair.clock.now(),
        clock_id=clock_id(),
    )
    return replace(record, **changes).encode()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("request_id", {"request_id": "other"}),
        ("attempt", {"attempt": 9}),
        ("fingerprint", {"fingerprint": "other"}),
        ("layout_digest", {"layout_digest": "other"}),
        ("num_positions", {"num_positions": 9}),
        ("kv_bytes", {"kv_bytes": 1}),
        ("state_bytes", {"state_bytes": 1}),
        ("first_token", {"first_token": 100}),
        ("compute_done_s", {"compute_done_s": -1.0}),
        ("clock_id", {"clock_id": ""}),
        ("state_checksum", {}),
    ],
)
def test_each_wrong_field_ends_the_lease_and_frees_its_memory(field: str, changes: dict[str, object]) -> None:
    pair = Pair()
    lease = pair.reserve()
    pair.agent.notify("d", a_record(pair, lease, changes))
    pair.decode.receiver.step()
    [(ended, refusal)] = pair.decode.refused
    assert refusal.field == field
    assert ended is not None
    assert ended.state is LeaseState.ABORTED
    assert pair.decode.leases.check() == []
    assert sum(pair.decode.leases.counts_by_state().values()) == 0


@pytest.mark.parametrize(
    ("field", "changes"), [("lease_id", {"lease_id": "x"}), ("epoch", {"epoch": 6}), ("nonce", {"nonce": bytes(16)})]
)
def test_a_record_that_proves_no_lease_touches_none(field: str, changes: dict[str, object]) -> None:
    pair = Pair()
    lease = pair.reserve()
    pair.agent.notify("d", a_record(pair, lease, changes))
    pair.decode.receiver.step()
    assert [(ended, refusal.field) for ended, refusal in pair.decode.refused] == [(None, field)]
    pair.handoff(lease)
    pair.run(0.1)
    assert len(pair.decode.verified) == 1


def test_a_strangers_record_ends_the_lease_but_says_nothing_of_the_writers_writes() -> None:
    pair = Pair()
    lease = pair.reserve()
    pair.agent.notify("d", a_record(pair, lease, {"writer_id": "stranger"}))
    pair.decode.receiver.step()
    assert pair.decode.refused_fields == ["writer_id"]
    assert pair.decode.leases.counts_by_state()["quarantined"] == 1


def test_notices_of_strangers_and_late_notices_are_harmless() -> None:
    pair = Pair()
    lease = pair.reserve()
    for message in (
        b"",
        b"hello",
        WriteNotice("x", EPOCH, bytes(16), True).encode(),
        WriteNotice(lease.id, EPOCH, bytes(16), True).encode(),
    ):
        pair.agent.notify("d", message)
    pair.decode.receiver.step()
    assert pair.decode.leases.get(lease.id, EPOCH).state is LeaseState.RESERVED
    pair.handoff(lease)
    pair.run(0.1)
    pair.agent.notify("d", WriteNotice(lease.id, EPOCH, lease.nonce, True).encode())
    pair.decode.receiver.step()
    assert pair.decode.leases.get(lease.id, EPOCH).state is LeaseState.VERIFIED


def test_a_record_from_another_machine_has_no_exposed_time() -> None:
    pair = Pair()
    pair.handoff(pair.reserve())
    pair.sender.step()
    [(source, data)] = [(s, m) for s, m in pair.fabric.mail_for("d") if isinstance(decode_message(m), HandoffRecord)]
    record = replace(HandoffRecord.decode(data), clock_id="another", compute_done_s=0.0)
    pair.agent.notify("d", record.encode())
    pair.decode.receiver.step()
    [(_, _, exposed_s)] = pair.decode.verified
    assert source == "p"
    assert exposed_s == 0.0


def test_the_receiver_looks_seldom_when_idle_more_when_it_waits_and_often_when_a_record_is_near() -> None:
    pair = Pair()
    idle = pair.decode.receiver.step()
    lease = pair.reserve(num_prompt=12)
    awaiting = pair.decode.receiver.step()
    handoff = pair.sender.begin(grant_of(lease), "r", 1, (3, 9, 5), 2)
    *early, last = SPECS_STATE_LAYERS
    for layer in early:
        handoff.push_state(layer)
        pair.sender.step()
        assert pair.decode.receiver.step() == awaiting
    handoff.push_state(last)
    pair.sender.step()
    near = pair.decode.receiver.step()
    assert idle > awaiting > near > TransferConfig().poll_interval_s
    pair.clock.advance(3.0)
    assert pair.decode.receiver.step() == awaiting


def test_the_sender_sleeps_when_nothing_is_in_flight() -> None:
    pair = Pair(Faults(delay_s=(1.0, 1.0)))
    assert pair.sender.step() is False
    handoff = pair.sender.begin(grant_of(pair.reserve(num_prompt=12)), "r", 1, (3, 9, 5), 2)
    assert pair.sender.step() is False
    handoff.push_kv(0, 2)
    assert pair.sender.step() is True
    pair.clock.advance(2.0)
    pair.sender.step()
    assert pair.sender.step() is False


# ---- everything at once ----


@pytest.mark.parametrize("seed", range(25))
def test_under_all_faults_what_is_verified_is_right_and_what_is_free_is_silent(seed: int) -> None:
    faults = Faults((0.0, 0.3), write_fails=0.03, write_hangs=0.03, notify_lost=0.1, notify_doubled=0.2, notify_changed=0.1)
    pair = Pair(replace(faults, state_changed=0.05), seed, TransferConfig(timeout_s=2.0))
    pair.fabric.on_land = lambda _, index, posted_s: assert_owned(pair, index, posted_s)
    expected = sequence_bytes(pair.memory, (3, 9, 5), 2)
    numbers = itertools.count()
    seen = 0
    for _ in range(30):
        attempt(pair, f"r{next(numbers)}")
        pair.run(0.4, tick_s=0.05)
        for lease, _, _ in pair.decode.verified[seen:]:
            assert sequence_bytes(pair.decode.memory, lease.block_ids[:3], lease.slot) == expected
            pair.decode.leases.start_running(lease.id, EPOCH)
            pair.decode.leases.release(lease.id, EPOCH)
        seen = len(pair.decode.verified)
        assert pair.decode.leases.check() == []
    # The storm is over, and whoever hangs is declared dead: nothing is held for ever.
    pair.fabric.kill("p")
    pair.decode.leases.writer_dead("p")
    pair.decode.receiver.step()
    held = {state: n for state, n in pair.decode.leases.counts_by_state().items() if n}
    assert set(held) <= {"verified"}


def assert_owned(pair: Pair, index: int, posted_s: float) -> None:
    """The rule whose breach nobody would see: what lands belongs to a lease that was there when the write was posted and still
    waits for it; not to free memory, and not to a later owner."""
    layout = pair.decode.layout
    group = max(i for i, first in enumerate(layout.firsts) if first <= index)
    item, kind = index - layout.firsts[group], layout.groups[group].kind
    owners = [
        lease
        for lease in pair.decode.leases._live.values()
        if (item in lease.block_ids if kind == "kv" else item == lease.slot) and lease.history[0].at_s <= posted_s
    ]
    assert [lease.state in (*AWAITED_STATES, LeaseState.QUARANTINED) for lease in owners] == [True]


def attempt(pair: Pair, request_id: str) -> None:
    """One hand-off as a prefill worker drives it: on a failure it aborts, and releases the lease when all is quiet."""
    try:
        lease = pair.reserve(request_id=request_id)
    except NoRoom:
        return
    leases = pair.decode.leases

    def release() -> None:
        try:
            leases.writer_quiet(lease.id, EPOCH, "p")
        except LeaseLost:
            pair.quiet.append("lost")

    def done(result: HandoffResult | HandoffError) -> None:
        if isinstance(result, HandoffResult):
            leases.writer_quiet(lease.id, EPOCH, "p", record_sent=True)
        else:
            handoff.abort(release)

    try:
        handoff = pair.sender.begin(grant_of(lease), request_id, 1, (3, 9, 5), 2)
    except (TransferFailed, HandoffRefused):
        leases.writer_quiet(lease.id, EPOCH, "p")
        pair.sender.connect_soon("d", pair.decode.agent.metadata, pair.decode.layout)
        return
    for layer in SPECS_STATE_LAYERS[:2]:
        handoff.push_state(layer)
    handoff.push_kv(0, 10 // BLOCK)
    handoff.finish(10, 42, pair.clock.now(), done)


def test_a_record_is_near_with_the_last_state_layer_and_without_any_at_the_end_only() -> None:
    def outgoing(specs: CacheSpecs) -> Outgoing:
        layout = CacheLayout.of(CacheMemory.allocate(specs, PoolSizes(num_blocks=4, num_slots=2)))
        plan = TransferPlan.build(layout, layout, ((0, 1), (2, 3)), (0, 1))
        return Outgoing(LeaseGrant("d", "l", EPOCH, bytes(16), (2, 3), 1), plan, "r", 1)

    hybrid = outgoing(SPECS)
    assert [hybrid.is_near_with([hybrid.plan.state(layer)]) for layer in SPECS_STATE_LAYERS] == [False, False, True]
    no_states = outgoing(CacheSpecs(((KV,),)))
    assert not no_states.is_near_with([no_states.plan.kv(0, np.arange(2))])
    no_states.finish = Finish(8, 1, 0, 42, 0.0, lambda _: None)
    assert no_states.is_near_with([no_states.plan.kv(0, np.arange(2))])
