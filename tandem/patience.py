"""How long another may be silent, in time in which one could have heard it."""

from __future__ import annotations

import asyncio
from types import TracebackType

__all__ = ["Patience"]

_LOOKS = 8


class Patience:
    """Ends what waits inside with TimeoutError once `seconds` have passed without `heard()`, at most an eighth later.

        async with Patience(3.0) as patience:
            async for message in stream:
                patience.heard()

    A pause of this process counts for next to nothing, however long: whoever was stopped with its machine, or held up by a step
    that kept the event loop, has heard nothing and so knows nothing of the others. Silence is therefore counted in looks: at
    each of them everything that has come meanwhile has had its turn.
    """

    def __init__(self, seconds: float) -> None:
        self._look_s = seconds / _LOOKS
        self._num_silent = 0
        self._limit = asyncio.timeout(None)

    def heard(self) -> None:
        """The wait begins anew."""
        self._num_silent = 0

    async def __aenter__(self) -> Patience:
        await self._limit.__aenter__()
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._looking.cancel()
        await self._limit.__aexit__(kind, error, traceback)

    async def _look(self) -> None:
        # One more than the looks of `seconds`: what was heard last came somewhere between two of them.
        while self._num_silent <= _LOOKS:
            await asyncio.sleep(self._look_s)
            self._num_silent += 1
        self._limit.reschedule(asyncio.get_running_loop().time())
