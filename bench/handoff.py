"""What a hand-off costs the client: bytes and seconds per kind, and the exposed time, with and without overlap.

    python -m bench.handoff [--model FOLDER] [--lengths 512 2048 8192] [--repeats 5] [--next-turn]

Exposed = from the prefill worker's last compute (first token sampled) to the sequence being verified on the decode worker: the
only part of the transfer that a client can feel. Both workers run in processes of their own with real NIXL, one thread each.

--next-turn: a prompt that begins with an earlier one and has 64 tokens more, where the prefill worker finds the earlier one in
its cache; with and without the decode worker keeping the earlier one's blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from dataclasses import replace

from bench.checkpoints import bench_checkpoint
from bench.pair import Outcome, WorkerPair, worker_pair
from tandem.config import CacheConfig, ModelSource, PrefillConfig, TransferConfig, WorkerConfig
from tandem.request import Request, SamplingParams, StopRules

_GOAL = 0.02
_NEXT_TURN_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="checkpoint folder; default: the 121 M benchmark checkpoint, made once")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each worker")
    parser.add_argument("--next-turn", action="store_true")
    args = parser.parse_args()
    asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> None:
    most_tokens = max(args.lengths) + 2 * _NEXT_TURN_TOKENS
    model = ModelSource(path=args.model or str(bench_checkpoint()), max_context_tokens=most_tokens)
    base = WorkerConfig(
        model=model,
        cache=CacheConfig(budget_bytes=2 << 30, max_sequences=4),
        prefill=PrefillConfig(chunk_tokens=args.chunk_tokens),
        threads=args.threads,
    )
    off = replace(base, transfer=replace(TransferConfig(), overlap=False))
    if args.next_turn:
        off = replace(base, decode=replace(base.decode, keep_prefixes=False))
    # Both modes at once and in turns: what drifts on the machine drifts for both.
    async with worker_pair(base) as with_it, worker_pair(off) as without:
        print(f"transport: {with_it.prefill.transport}; {args.threads} thread(s) per worker; {args.repeats} runs, medians")
        what = "kept" if args.next_turn else "overlap"
        print(f"{'prompt':>7} {what:>8} {'prefill':>10} {'KV':>18} {'state':>18} {'exposed':>11} {'of prefill':>10}")
        for length in args.lengths:
            runs: dict[bool, list[Outcome]] = {True: [], False: []}
            for number in range(args.repeats + 1):
                for is_on, pair in ((True, with_it), (False, without)):
                    outcome = await _once(pair, length, number)
                    if args.next_turn:
                        outcome = await _once(pair, length, number, _NEXT_TURN_TOKENS)
                    if number:  # the first run of a length warms caches up
                        runs[is_on].append(outcome)
            for is_on, outcomes in runs.items():
                print(_row(length + args.next_turn * _NEXT_TURN_TOKENS, is_on, outcomes))


async def _once(pair: WorkerPair, length: int, number: int, num_more: int = 0) -> Outcome:
    """num_more: the same prompt with so many tokens after it."""
    rng = random.Random(length * 1000 + number)
    vocab = pair.prefill.model.vocab_size
    request = Request(
        request_id=f"{length}-{number}-{num_more}",
        prompt=tuple(rng.randrange(vocab) for _ in range(length + num_more)),
        sampling=SamplingParams(),
        stop=StopRules(max_new_tokens=4),
    )
    outcome = await pair.generate(request)
    if outcome.failed is not None:
        raise SystemExit(f"the request failed: {outcome.failed.reason}")
    return outcome


def _row(length: int, is_on: bool, outcomes: list[Outcome]) -> str:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    prefill_s = median([o.first_token.prefill_seconds for o in outcomes if o.first_token])
    exposed_s = median([o.ready.handoff_exposed_seconds for o in outcomes if o.ready])
    sent = [o.handoff for o in outcomes if o.handoff]
    kv = f"{sent[0].kv_bytes / 2**20:.2f} MiB {median([h.kv_seconds for h in sent]) * 1e3:6.1f} ms"
    state = f"{sent[0].state_bytes / 2**20:.2f} MiB {median([h.state_seconds for h in sent]) * 1e3:6.1f} ms"
    share = exposed_s / prefill_s
    mark = "" if not is_on else " goal met" if share < _GOAL else f" above {_GOAL:.0%}"
    return (
        f"{length:7d} {'on' if is_on else 'off':>8} {prefill_s * 1e3:7.1f} ms {kv:>18} {state:>18} "
        f"{exposed_s * 1e3:8.2f} ms {share:9.2%}{mark}"
    )


if __name__ == "__main__":
    main()
