"""`tandem up` for real: Ray, NIXL and gRPC processes, from the ready line to the last process gone."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from bench.up import words_of
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.collector import Collector, collector
from tests.monitoring.live import RATE_INTERVAL_S, alerts_that_fire, nans, scrape_configuration, unanswered
from tests.monitoring.prometheus import prometheus
from tests.traces import PARTS, TRACEPARENT

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

READY_S = 150
PROMPT = "One day Mia went to the"


def tandem(*words: str) -> list[str]:
    return [sys.executable, "-m", "tandem.cli.main", *words]


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(tandem(*words), capture_output=True, text=True, timeout=60, check=False)


def eventually(condition: Callable[[], Any], seconds: float) -> Any:
    """The condition's first true value; the last one when time is up."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


class Up:
    """One `tandem up`, and all that it ever started."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self._stderr = folder / "stderr"
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                tandem("up", "--grpc-port", "0", "--http-port", "0", "--memory-gib", "0.5", *words),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **environment},
            )
        self._seen: dict[int, psutil.Process] = {}

    def ready_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready"), self.stderr()
        return line

    def stderr(self) -> str:
        return self._stderr.read_text()

    def note_descendants(self) -> list[psutil.Process]:
        """Remember every process that there is now below `up`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[process.pid] = process
        return list(self._seen.values())

    def terminate_descendants(self) -> None:
        """A signal to every process below `up`, not to itself."""
        for process in self.note_descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()

    def left_over(self) -> list[psutil.Process]:
        return [p for p in self._seen.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def status(address: str) -> dict[str, Any]:
    done = call("status", "--json", "--address", address)
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def answer(address: str) -> list[int]:
    done = call("generate", PROMPT, "--max-new-tokens", "12", "--json", "--address", address)
    assert done.returncode == 0, done.stderr
    token_ids: list[int] = json.loads(done.stdout)["token_ids"]
    return token_ids


@pytest.fixture(scope="module")
def traces() -> Iterator[Collector]:
    with collector() as it:
        yield it


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, traces: Collector) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"worker": {"metrics_port": -1, "decode": {"local_prefill_tokens": 2}}}))
    options = ("--config", str(settings), "--otlp-endpoint", traces.endpoint)
    cluster = Up(folder, *options, OTEL_BSP_SCHEDULE_DELAY="200")
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def ready(up: Up) -> str:
    return up.ready_line()


@pytest.fixture(scope="module")
def address(ready: str) -> str:
    return ready.split()[2]


@pytest.fixture(scope="module")
def http_address(ready: str) -> str:
    return ready.split()[5].removeprefix("http://").rstrip(":")


def test_a_ready_cluster_answers_and_shows_both_pools(up: Up, address: str) -> None:
    assert len(answer(address)) == 12
    data = status(address)
    assert [worker["role"] for worker in data["workers"]] == ["prefill", "decode"]
    assert {worker["state"] for worker in data["workers"]} == {"ready"}
    assert data["model"]["name"]
    assert data["model"]["fingerprint"]


def test_a_request_is_one_trace_of_three_processes(up: Up, address: str, traces: Collector) -> None:
    words = "Whispering marmalade lighthouse"
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        message = inference_pb2.GenerateRequest(text=words, max_new_tokens=6, ignore_eos=True)
        answers = list(stub.Generate(message, metadata=(("traceparent", TRACEPARENT),), timeout=60))
    _, trace_id, client_id, _ = TRACEPARENT.split("-")
    assert eventually(lambda: len(traces.trace(trace_id)) == len(PARTS), 10), traces.trace(trace_id)
    spans = {span.name: span for span in traces.trace(trace_id)}
    names = {span.span_id: span.name for span in spans.values()} | {client_id: None}
    assert {name: names[span.parent_id] for name, span in spans.items()} == PARTS
    finished = answers[-1].finished
    assert (spans["tandem.transfer"].service, spans["tandem.transfer"].instance) == ("tandem-prefill", finished.prefill_worker)
    assert (spans["tandem.decode"].service, spans["tandem.decode"].instance) == ("tandem-decode", finished.decode_worker)
    assert spans["tandem.request"].service == "tandem-router"
    said = [*words.split(), *(answer.text for answer in answers if answer.text.strip())]
    assert not [word for word in said if len(word) > 3 and any(word in span.text for span in spans.values())]


def test_one_scrape_configuration_finds_all_and_every_query_has_an_answer(
    up: Up, address: str, http_address: str, tmp_path: Path
) -> None:
    def load() -> None:
        for words in (("a", "--max-new-tokens", "12"), (PROMPT * 8, "--max-new-tokens", "24")):
            assert call("generate", *words, "--address", address).returncode == 0

    with prometheus(tmp_path, scrape_configuration(http_address)) as it:
        load()
        assert eventually(lambda: it.query('sum(tandem_requests_total{outcome="length"}) > 0'), 20)
        load()  # what was counted before the first look is no rate
        found = [target["labels"]["instance"] for target in it.targets()]
        assert set(found) == {http_address, *(worker["id"] for worker in status(address)["workers"])}
        assert {target["health"] for target in it.targets()} == {"up"}
        assert eventually(lambda: not unanswered(it), 15) or unanswered(it) == {}
        assert alerts_that_fire(it) == {}
        time.sleep(RATE_INTERVAL_S)  # until the last rate is 0: nothing else tells an idle cluster
        assert nans(it) == {}
        assert alerts_that_fire(it) == {}


def test_a_chat_answers_from_what_it_was_told(up: Up, address: str) -> None:
    told = "Tom has the blue hat. Anna has the red key. The lamp is in the attic. What does Anna have?"
    done = subprocess.run(
        tandem("chat", "--temperature", "0", "--address", address),
        input=f"{told}\nWhere is the lamp?\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["Anna has the red key.", "The lamp is in the attic."], done.stderr


def test_nothing_listens_beyond_this_machine(up: Up, address: str) -> None:
    listening = [
        (process.name(), connection.laddr.ip)
        for process in up.note_descendants()
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert [(name, ip) for name, ip in listening if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback] == []


def test_a_short_prompt_is_answered_while_there_is_no_prefill_worker(up: Up, address: str, http_address: str) -> None:
    up.note_descendants()
    ids = {worker["role"]: (worker["id"], worker["pid"]) for worker in status(address)["workers"]}
    psutil.Process(ids["prefill"][1]).kill()

    def told() -> inference_pb2.Finished:
        with grpc.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            message = inference_pb2.GenerateRequest(text="a", max_new_tokens=4, ignore_eos=True)
            finished: inference_pb2.Finished = list(stub.Generate(message, timeout=60))[-1].finished
        return finished

    def answered_by_decode() -> inference_pb2.Finished | None:
        finished = told()
        return finished if finished.prefill_worker == finished.decode_worker == ids["decode"][0] else None

    finished = eventually(answered_by_decode, 10)
    assert finished, up.stderr()
    assert (finished.usage.completion_tokens, finished.timings.handoff_exposed) == (4, 0.0)
    with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=10) as answered:
        assert re.search(r'tandem_prompts_placed_total{where="local"} [1-9]', answered.read().decode())


@pytest.mark.parametrize(("role", "how", "told"), [("decode", signal.SIGKILL, "lost"), ("prefill", signal.SIGTERM, "drained")])
def test_a_worker_that_ends_is_replaced_under_a_new_id_and_answers_stay_the_same(
    up: Up, address: str, role: str, how: signal.Signals, told: str
) -> None:
    up.note_descendants()
    before, (victim,) = answer(address), [w for w in status(address)["workers"] if w["role"] == role]
    psutil.Process(victim["pid"]).send_signal(how)

    def replaced() -> list[Any]:
        workers = [w for w in status(address)["workers"] if w["role"] == role and w["state"] == "ready"]
        return [w for w in workers if w["id"] != victim["id"]]

    assert eventually(replaced, 60), up.stderr()
    assert answer(address) == before
    kinds = [event["kind"] for event in status(address)["events"] if event["subject"] == victim["id"]]
    assert [kind for kind in kinds if kind in ("lost", "drained")] == [told]


def test_a_killed_router_comes_back_at_its_address(up: Up, address: str) -> None:
    (router,) = [p for p in up.note_descendants() if "router" in words_of(p)]
    router.kill()
    assert eventually(lambda: call("generate", "a", "--max-new-tokens", "1", "--address", address).returncode == 0, 60)
    assert "the router ended (signal 9); started again" in up.stderr()


def test_sigterm_ends_with_0_and_leaves_no_process(up: Up, address: str) -> None:
    up.note_descendants()
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(60) == 0
    assert eventually(lambda: not up.left_over(), 10), up.left_over()
    assert up.process.stdout is not None
    assert up.process.stdout.read() == ""  # one line on stdout, no more
    assert "Traceback" not in up.stderr()


@pytest.fixture
def one_up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*words: str) -> Up:
        started.append(Up(tmp_path, *words))
        return started[-1]

    yield start
    for cluster in started:
        cluster.end()


def test_a_killed_up_takes_everything_with_it(one_up: Callable[..., Up]) -> None:
    cluster = one_up()
    cluster.ready_line()
    assert len(cluster.note_descendants()) >= 6
    cluster.process.kill()
    assert eventually(lambda: not cluster.left_over(), 10), cluster.left_over()


def test_a_signal_to_everything_ends_it_as_soon(one_up: Callable[..., Up]) -> None:
    """As `timeout` and service managers do: Ray's processes get it too, and Ray cannot be asked for anything any more."""
    cluster = one_up()
    cluster.ready_line()
    cluster.terminate_descendants()
    cluster.process.terminate()
    assert cluster.process.wait(25) == 0, cluster.stderr()
    assert eventually(lambda: not cluster.left_over(), 10), cluster.left_over()
    assert "Traceback" not in cluster.stderr()


def test_where_all_but_it_was_ended_it_says_so_and_ends(one_up: Callable[..., Up]) -> None:
    """Nobody starts Ray again, so there is nothing to wait for."""
    cluster = one_up()
    cluster.ready_line()
    cluster.terminate_descendants()
    assert cluster.process.wait(45) == 1, cluster.stderr()
    assert "Ray's processes here have ended" in cluster.stderr()
    assert eventually(lambda: not cluster.left_over(), 10), cluster.left_over()


def test_a_signal_while_it_starts_ends_with_0_and_leaves_no_process(one_up: Callable[..., Up]) -> None:
    cluster = one_up()
    assert eventually(lambda: len(cluster.note_descendants()) >= 4, 60)
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(90) == 0, cluster.stderr()
    cluster.note_descendants()
    assert eventually(lambda: not cluster.left_over(), 10), cluster.left_over()
    assert "Traceback" not in cluster.stderr()


def test_a_broken_checkpoint_ends_it_with_one_sentence(one_up: Callable[..., Up], tmp_path: Path) -> None:
    from tandem.model.embedded import embedded_checkpoint

    folder = tmp_path / "broken"
    shutil.copytree(embedded_checkpoint(), folder)
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:4096])
    cluster = one_up("--model", str(folder))
    assert cluster.process.wait(READY_S) == 1
    sentence = cluster.stderr().splitlines()[-1]
    assert sentence.startswith("tandem: ")
    assert str(folder) in sentence
    assert "Traceback" not in cluster.stderr()


def test_a_budget_that_holds_no_sequence_ends_it_with_one_sentence(one_up: Callable[..., Up]) -> None:
    cluster = one_up("--memory-gib", "0.001")
    assert cluster.process.wait(READY_S) == 1
    assert cluster.stderr().splitlines()[-1].startswith("tandem: ")
    assert "Traceback" not in cluster.stderr()
