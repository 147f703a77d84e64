from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from tests.model.variants import VARIANTS, Variant, make


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny matrices: a second thread only spins."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Variant]:
    """Makes each variant once per session."""
    return cache(lambda name: make(tmp_path_factory.mktemp("checkpoint") / "model", VARIANTS[name]))


@pytest.fixture
def tokens_500() -> list[int]:
    return torch.randint(0, 96, (500,), generator=torch.Generator().manual_seed(3)).tolist()
