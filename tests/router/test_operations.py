"""Operators' wishes, from the command line through a router to a controller whose workers are no processes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest

from controller.controller import Controller
from controller.fake_launcher import FakeLauncher
from controller.life import Timing
from controller.membership import MembershipServer
from router.callers import Callers
from router.fake_workers import FakeWorkerHandle
from router.fleet import Fleet
from router.membership import follow
from router.operations import OperationsService
from router.server import HealthReporter, InferenceService, build_server
from router.state import WorkerTable
from tandem.cli import main as cli
from tandem.rpc import bind, create_channel, create_internal_channel
from tandem.v1 import operations_pb2 as pb
from tandem.v1 import operations_pb2_grpc as pb_grpc
from tandem.v1 import worker_pb2_grpc
from tests.router.tools import SERVED, TRUST, Bench, until

TIMING = Timing(look_s=30, progress_s=0, ping_s=30, stop_s=1, shutdown_s=0.01, kill_s=0.01, answer_s=1, connect_s=1)
OPERATOR, READER = "sk-operator-0123456789", "sk-reader-0123456789"


@dataclass
class Bed:
    """A router and its controller. operations: the router's service, as a client sees it."""

    address: str
    operations: pb_grpc.OperationsStub
    controller: Controller
    server: MembershipServer
    launcher: FakeLauncher
    folder: Path


def by_key(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    (tmp_path / "keys").write_text(f"boss {OPERATOR}\nguest {READER}\n")
    launcher = FakeLauncher({"prefill": 3, "decode": 3})
    controller = Controller(launcher, {"prefill": 1, "decode": 1}, "{}", timing=TIMING)
    running = asyncio.create_task(controller.run())
    membership = await MembershipServer.start(controller, "127.0.0.1", TRUST)
    pipeline = Bench(callers=Callers.load(str(tmp_path / "keys"))).pipeline
    table = WorkerTable()
    fleet = Fleet(table, FakeWorkerHandle, lambda path: SERVED.tokenizer)
    channel = create_internal_channel(membership.address, TRUST)
    following = asyncio.create_task(follow(membership.address, "router-1", TRUST, fleet))
    control = worker_pb2_grpc.ControlStub(channel)
    service = OperationsService(pipeline, fleet, table, control, frozenset({"boss"}))
    server = build_server(InferenceService(pipeline, fleet), service, HealthReporter(table), 1 << 20)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    await controller.wait_ready(1, 1)
    await until(lambda: table.can_serve)
    async with create_channel(f"127.0.0.1:{port}") as client:
        yield Bed(f"127.0.0.1:{port}", pb_grpc.OperationsStub(client), controller, membership, launcher, tmp_path)
    following.cancel()
    await asyncio.wait([following])
    await server.stop(None)
    await channel.close()
    await controller.shutdown()
    await running
    await membership.stop()


async def refusal(call: grpc.aio.UnaryUnaryCall) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


async def test_a_wish_reaches_the_controller_and_its_reason_comes_back(bed: Bed) -> None:
    reply = await bed.operations.Scale(pb.ScaleRequest(wanted={"decode": 5}), metadata=by_key(OPERATOR))
    assert (reply.pools["decode"].wanted, reply.pools["decode"].offered) == (5, 3)
    assert reply.pools["decode"].reason == "5 wanted, nodes offer 3 units"
    assert set(reply.pools) == {"decode"}
    await bed.controller.wait_ready(1, 3)

    async def status() -> pb.Status:
        return await bed.operations.GetStatus(pb.GetStatusRequest(), metadata=by_key(READER))

    async with asyncio.timeout(5):
        while (await status()).pools["decode"].ready < 3:  # noqa: ASYNC110 - it comes over gRPC
            await asyncio.sleep(0.01)
    told = await status()
    assert [event.text for event in told.events if event.kind == "scaled"] == ["decode scaled from 1 to 5"]
    assert told.pools["decode"].reason == "5 wanted, nodes offer 3 units"


async def test_a_drain_and_a_replacement_reach_the_controller(bed: Bed) -> None:
    (prefill,), (decode,) = bed.launcher.of("prefill"), bed.launcher.of("decode")
    await bed.operations.Drain(pb.DrainRequest(worker_id=decode.worker_id, timeout_s=3), metadata=by_key(OPERATOR))
    await until(lambda: "stop 3" in decode.calls)
    reply = await bed.operations.Replace(pb.ReplaceRequest(pool="prefill"), metadata=by_key(OPERATOR))
    assert list(reply.worker_ids) == [prefill.worker_id]
    await until(lambda: "stop" in prefill.calls)


async def test_what_is_wrong_with_a_wish_is_told_by_name(bed: Bed) -> None:
    def ask(request: pb.ScaleRequest) -> grpc.aio.UnaryUnaryCall:
        return bed.operations.Scale(request, metadata=by_key(OPERATOR))

    assert await refusal(ask(pb.ScaleRequest(wanted={"decode": -1}))) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "wanted[decode]: must be from 0 to 4096, not -1",
    )
    assert (await refusal(ask(pb.ScaleRequest(wanted={"gpu": 1}))))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert (await refusal(ask(pb.ScaleRequest())))[1] == "wanted: names no pool"
    drain = bed.operations.Drain(pb.DrainRequest(worker_id="decode-9"), metadata=by_key(OPERATOR))
    assert (await refusal(drain))[0] is grpc.StatusCode.NOT_FOUND


async def test_only_operators_change_the_pools(bed: Bed) -> None:
    for key, code in ((READER, grpc.StatusCode.PERMISSION_DENIED), ("sk-nobody-0123456789", grpc.StatusCode.UNAUTHENTICATED)):
        for call in (
            bed.operations.Scale(pb.ScaleRequest(wanted={"decode": 0}), metadata=by_key(key)),
            bed.operations.Drain(pb.DrainRequest(worker_id="decode-1"), metadata=by_key(key)),
            bed.operations.Replace(pb.ReplaceRequest(pool="decode"), metadata=by_key(key)),
        ):
            assert (await refusal(call))[0] is code
    assert bed.controller.roster.pools["decode"].wanted == 1


async def test_a_controller_that_is_away_is_told_as_that(bed: Bed) -> None:
    await bed.server.stop()
    code, details = await refusal(bed.operations.Scale(pb.ScaleRequest(wanted={"decode": 2}), metadata=by_key(OPERATOR)))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "the controller does not answer" in details
    status = await bed.operations.GetStatus(pb.GetStatusRequest(), metadata=by_key(READER))
    assert status.pools["decode"].ready == 1


# ---- the command line ----


async def command(bed: Bed, *words: str) -> int:
    (bed.folder / "key").write_text(OPERATOR)
    return await asyncio.to_thread(cli.main, [*words, "--address", bed.address, "--api-key-file", str(bed.folder / "key")])


async def test_scale_waits_until_it_is_so(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command(bed, "scale", "decode=2", "prefill=2", "--wait", "20") == 0
    assert capsys.readouterr().out == "decode    2 of 2 ready\nprefill   2 of 2 ready\n"


async def test_scale_to_all_follows_what_nodes_offer(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command(bed, "scale", "decode=all", "--wait", "20") == 0
    assert capsys.readouterr().out == "decode    3 of 3 ready\n"
    assert bed.controller.roster.pools["decode"].wanted is None


async def test_drain_waits_for_the_end_and_says_how_it_was(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    (decode,) = bed.launcher.of("decode")
    assert await command(bed, "drain", decode.worker_id, "--timeout", "5") == 0
    assert capsys.readouterr().out.startswith(f"{decode.worker_id} has ended in order after ")
    assert await command(bed, "drain", decode.worker_id) == 1
    assert "no worker" in capsys.readouterr().err


async def test_a_host_is_drained_and_may_have_workers_again(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    old = {worker.worker_id for worker in bed.launcher.workers}
    assert await command(bed, "drain", "--node", "host-1", "--timeout", "5") == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == old
    status = await bed.operations.GetStatus(pb.GetStatusRequest(), metadata=by_key(READER))
    assert list(status.cordoned) == ["10.0.0.1"]
    assert not status.workers
    assert await command(bed, "drain", "--node", "host-1") == 0
    assert capsys.readouterr().out == "host-1 has no workers, and gets none\n"
    assert await command(bed, "drain", "--node", "host-1", "--undo") == 0
    assert capsys.readouterr().out == "host-1 may have workers again\n"
    assert await command(bed, "scale", "decode=1", "--wait", "20") == 0
    assert await command(bed, "drain", "--node", "nowhere") == 1
    assert "no node 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["w-1", "--node", "h"], ["w-1", "--undo"]])
def test_drain_takes_a_worker_or_a_host(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain", *words]) == 2
    assert capsys.readouterr().err.startswith("tandem: ")


async def test_replace_waits_for_the_new_workers(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command(bed, "replace", "decode") == 0
    assert capsys.readouterr().out == "decode    1 of 1 ready\n"
    assert len(bed.launcher.of("decode")) == 2


async def test_the_controllers_refusal_of_the_arguments_exits_with_2(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command(bed, "scale", "decode=5000") == 2
    assert capsys.readouterr().err == "tandem: wanted[decode]: must be from 0 to 4096, not 5000\n"
