"""The embedded model's answers come out of what travelled: whole, they are transformers'; damaged, they are wrong.

One cluster in this process, real NIXL and gRPC. For the damage every check of the hand-off is switched off: in the place of the
checksum over the slot stands the damage to it. (The whole state of another prompt does this model no harm, see its card.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tandem.cache.memory import CacheMemory
from tandem.client import AsyncClient
from tandem.config import CacheConfig, ModelSource
from tandem.model.embedded import embedded_checkpoint
from tests.local_cluster import SMALL, local_cluster
from tools.train_embedded.questions import Asked, held_out
from tools.train_embedded.served import ask_cluster, ask_transformers, compare

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NEAR = (32, 128)
Damage = Callable[[CacheMemory, int], object]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    cache = CacheConfig(budget_bytes=64 << 20, max_sequences=8)
    config = replace(SMALL, model=ModelSource(), cache=cache)
    async with local_cluster(config=config) as cluster, AsyncClient(cluster.address) as made:
        yield made


def questions(number: int, *distances: int) -> list[Asked]:
    return held_out(Tokenizer.from_file(str(embedded_checkpoint() / "tokenizer.json")), number, distances)


async def test_the_clusters_answers_are_transformers_answers(client: AsyncClient) -> None:
    """Right or wrong: the same text. `python -m tools.train_embedded.served` does it with hundreds."""
    asked = questions(3, *NEAR, 500)
    found = compare(asked, await ask_cluster(client, asked), ask_transformers(embedded_checkpoint(), asked))
    assert found.differing == []


def nothing(memory: CacheMemory, slot: int) -> None:
    """Checks off, but no harm done."""


def zero_state(memory: CacheMemory, slot: int) -> None:
    for tensor in (*memory.conv.values(), *memory.recurrent.values()):
        tensor[slot].zero_()


def zero_keys_and_values(memory: CacheMemory, slot: int) -> None:
    for tensor in memory.kv.values():
        tensor.zero_()


async def share_right(client: AsyncClient, monkeypatch: pytest.MonkeyPatch, damage: Damage) -> float:
    """Of questions at short distances, one after another, with every hand-off unchecked and damaged."""
    monkeypatch.setattr("transfer.receiver.slot_checksum", damage)
    monkeypatch.setattr("transfer.receiver.verify", lambda record, expected: expected.state_checksum())
    asked = [question for question in questions(10, *NEAR) if question.group.startswith("recall")]
    answers = [(await ask_cluster(client, [question]))[0] for question in asked]
    return sum(question.answer == answer for question, answer in zip(asked, answers, strict=True)) / len(asked)


async def test_undamaged_the_answers_are_right(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await share_right(client, monkeypatch, nothing) >= 0.9


@pytest.mark.parametrize("damage", [zero_state, zero_keys_and_values])
async def test_damaged_they_are_wrong(client: AsyncClient, monkeypatch: pytest.MonkeyPatch, damage: Damage) -> None:
    assert await share_right(client, monkeypatch, damage) <= 0.3
