"""A public load generator against `tandem up`, and whether what it measures is what our own metrics say.

    python -m bench.loadgen [--tool aiperf] [--model FOLDER] [--requests 60] [--concurrency 2] [--json FILE]

The tool is NVIDIA's AIPerf (`pip install aiperf`, in an environment of its own: it pins much), found on the PATH or named by
its file. It sends streamed completions over HTTP; what it says of the time to first token and between tokens, at the mean,
stands beside what the sums and counts on /metrics grew by meanwhile. Exit 1: the two differ by more than a tenth, or a request
failed.

Every token of these answers is a letter (a bias sees to it), so that each is text that the tool can see when it comes. The
model is the 121 M one, whose work takes the time: on few cores the tool's own processes delay what they see by tens of
milliseconds, which is much of a tiny model's time to first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench.checkpoints import bench_checkpoint
from bench.up import UpCluster, up_cluster
from tandem.v1 import inference_pb2 as pb

__all__ = ["Agreement", "Load", "grown_means", "measure", "tool_means"]

# Its name → ours.
METRICS = {
    "time_to_first_token": "tandem_time_to_first_token_seconds",
    "inter_token_latency": "tandem_inter_token_latency_seconds",
}
_MOST_OFF = 0.10
_TOOL_S = 600.0
_LETTER = ord("a")
_WARM_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """model: a folder of a byte tokenizer. requests: in all, `concurrency` at a time, of so many tokens each."""

    model: Path
    requests: int
    concurrency: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Seconds at the mean, as the tool saw them and as /metrics has them."""

    name: str
    tool_s: float
    ours_s: float

    @property
    def ratio(self) -> float:
        return self.tool_s / self.ours_s

    @property
    def is_close(self) -> bool:
        return abs(self.ratio - 1) <= _MOST_OFF


async def measure(cluster: UpCluster, tool: str, load: Load) -> list[Agreement]:
    """Raises RuntimeError: the tool failed, or not all of its requests were served."""
    await asyncio.gather(*(_warm(cluster, load) for _ in range(_WARM_REQUESTS)))
    before = await asyncio.to_thread(_exposition, cluster.url)
    with tempfile.TemporaryDirectory() as folder:
        result = await asyncio.to_thread(_run_tool, _command(tool, cluster.url, load, folder), Path(folder))
    ours = grown_means(before, await asyncio.to_thread(_exposition, cluster.url))
    theirs = tool_means(result, load.requests)
    return [Agreement(name, theirs[name], ours[name]) for name in METRICS]


async def _warm(cluster: UpCluster, load: Load) -> None:
    prompt = pb.TokenIds(ids=[_LETTER] * load.prompt_tokens)
    async for _ in cluster.stub.Generate(pb.GenerateRequest(token_ids=prompt, max_new_tokens=8, ignore_eos=True)):
        pass


def _command(tool: str, url: str, load: Load, folder: str) -> list[str]:
    extra = {"ignore_eos": True, "temperature": 0, "logit_bias": {str(_LETTER): 100}}
    options: dict[str, object] = {
        "--model": load.model.name,
        "--tokenizer": load.model,
        "--url": url,
        "--endpoint-type": "completions",
        "--concurrency": load.concurrency,
        "--request-count": load.requests,
        "--isl": load.prompt_tokens,
        "--osl": load.answer_tokens,
        "--extra-inputs": json.dumps(extra),
        "--artifact-dir": folder,
        "--random-seed": 1,
        "--ui": "none",
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [tool, "profile", *words, "--streaming", "--use-server-token-count"]


def _run_tool(command: list[str], folder: Path) -> dict[str, Any]:
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not end within {_TOOL_S:.0f} s") from None
    found = sorted(folder.rglob("profile_export_aiperf.json"))
    if ended.returncode or not found:
        raise RuntimeError(f"{command[0]} ended with {ended.returncode}:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(found[0].read_text())
    return result


def tool_means(result: Mapping[str, Any], num_requests: int) -> dict[str, float]:
    """Seconds. Raises RuntimeError: it did not finish all its requests."""
    finished = (result.get("request_count") or {}).get("avg", 0)
    if finished != num_requests:
        raise RuntimeError(f"only {finished:.0f} of {num_requests} requests were served")
    return {name: result[name]["avg"] / {"ms": 1e3, "us": 1e6, "ns": 1e9, "s": 1}[result[name]["unit"]] for name in METRICS}


def _exposition(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        return str(reply.read().decode())


def grown_means(before: str, after: str) -> dict[str, float]:
    """Mean of what was observed between two expositions, over all labels, by the tool's names."""
    first, last = _sums(before), _sums(after)

    def grown(sample: str) -> float:
        return last[sample] - first.get(sample, 0.0)

    return {name: grown(f"{ours}_sum") / grown(f"{ours}_count") for name, ours in METRICS.items()}


def _sums(exposition: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        if family.name in METRICS.values():
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def _main(args: argparse.Namespace, tool: str) -> list[Agreement]:
    load = Load(args.model or bench_checkpoint(), args.requests, args.concurrency, args.prompt_tokens, args.answer_tokens)
    async with up_cluster("--model", str(load.model), "--memory-gib", "0.5") as cluster:
        return await measure(cluster, tool, load)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="aiperf", metavar="FILE", help="the program (default %(default)s, on the PATH)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="default: the 121 M checkpoint of the benchmarks")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    tool = shutil.which(args.tool)
    if tool is None:
        sys.stderr.write(
            f"{args.tool} is not there; pip install aiperf into an environment of its own and name it with --tool\n"
        )
        return 2
    found = asyncio.run(_main(args, tool))
    print(f"{'mean':<24}{'tool':>12}{'/metrics':>12}{'ratio':>8}")
    for each in found:
        print(f"{each.name:<24}{each.tool_s * 1000:>9.2f} ms{each.ours_s * 1000:>9.2f} ms{each.ratio:>8.3f}")
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    return 0 if all(each.is_close for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
