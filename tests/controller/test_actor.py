"""Workers as Ray actors: errors, deaths and frozen processes come out as the controller expects them."""

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from controller import launch  # first: it sets what Ray reads when it is imported
from controller.launcher import WorkerDied, WorkerHandle
from tandem.errors import CheckpointError
from tandem.patience import Patience
from tandem.v1 import worker_pb2
from tandem.worker_process import find_process, process_identity
from tests.standstill import stand_still

NUMBERS = itertools.count()

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("default::ResourceWarning")]


async def test_an_owner_is_not_gone_because_nothing_here_ran() -> None:
    """The actor's own method, without Ray: `up` asks every second, and was paused with everything else."""
    kind: Any = launch.ControllerActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    controller, ended = object.__new__(kind), asyncio.Event()

    async def shutdown() -> None:
        ended.set()
        await asyncio.Event().wait()

    controller.shutdown, controller._controller = shutdown, SimpleNamespace(overview=lambda: None)
    controller._owner, controller._owner_timeout_s = Patience(0.2), 0.2
    watching = asyncio.create_task(controller._watch_owner())
    await asyncio.sleep(0.02)
    stand_still(0.6)
    await asyncio.sleep(0.02)
    await controller.overview()
    await asyncio.sleep(0.1)
    assert not ended.is_set()
    async with asyncio.timeout(2):
        await ended.wait()  # since then it did not ask
    watching.cancel()


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Any]:
    import ray

    from tandem.config import ClusterConfig

    launch._start_local(ClusterConfig(max_prefill=1, max_decode=1))
    yield ray
    ray.shutdown()


@pytest.fixture
async def worker(ray_here: Any, monkeypatch: pytest.MonkeyPatch) -> WorkerHandle:
    from controller import ray_workers

    @ray_here.remote
    class Scripted:
        def __init__(self, worker_id: str, config_json: str) -> None:
            self._worker_id = worker_id

        async def start(self) -> bytes:
            if self._worker_id == "broken":
                raise CheckpointError("config.json is missing")
            if self._worker_id == "buggy":
                raise KeyError("oops")
            return worker_pb2.WorkerDescription(
                worker_id=self._worker_id, pid=os.getpid(), address="127.0.0.1:1"
            ).SerializeToString()

        async def identify(self) -> tuple[str, int, int]:
            import ray

            return (ray.get_runtime_context().get_node_id(), *process_identity())

        async def progress(self) -> tuple[int, int]:
            return (1, 2)

        async def wait_stopped(self) -> str:
            await asyncio.Event().wait()
            return ""

    monkeypatch.setattr(ray_workers, "_actor_class", lambda role: Scripted)
    return await ray_workers.RayLauncher().launch("prefill", f"good-{next(NUMBERS)}", "{}")


async def started(worker: WorkerHandle) -> int:
    return worker_pb2.WorkerDescription.FromString(await worker.start()).pid


async def test_a_users_error_comes_out_as_it_was_raised(worker: WorkerHandle) -> None:
    from controller.ray_workers import RayLauncher

    await worker.kill()  # right after its launch; its unit must be free for the next
    broken = await RayLauncher().launch("prefill", "broken", "{}")
    with pytest.raises(CheckpointError, match=r"^config.json is missing$"):
        await broken.start()
    await broken.kill()
    buggy = await RayLauncher().launch("prefill", "buggy", "{}")
    with pytest.raises(WorkerDied, match="KeyError: 'oops'"):
        await buggy.start()
    await buggy.kill()


async def test_the_death_of_a_process_ends_the_wait_with_one_line(worker: WorkerHandle) -> None:
    pid = await started(worker)
    waiting = asyncio.ensure_future(worker.wait_stopped())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as died:
        await waiting
    assert "\n" not in str(died.value)
    assert len(str(died.value)) < 300
    with pytest.raises(WorkerDied):
        await worker.progress()


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_frozen_process_is_gone_when_kill_returns(
    worker: WorkerHandle, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from controller import burial

    if elsewhere:  # as from another node: by a task on the process's own
        monkeypatch.setattr(burial, "_is_here", lambda process: False)
    pid = await started(worker)
    os.kill(pid, signal.SIGSTOP)
    await worker.kill()
    assert find_process(pid) is None or find_process(pid)[1] == "Z"  # type: ignore[index]
    with pytest.raises(WorkerDied):
        await worker.progress()


async def test_units_offered_are_those_of_the_nodes(ray_here: Any) -> None:
    from controller.ray_workers import RayLauncher

    (node,) = await RayLauncher().nodes()
    assert node.units == {"prefill": 1, "decode": 1}
    assert (node.id, node.address) == (ray_here.get_runtime_context().get_node_id(), "127.0.0.1")
