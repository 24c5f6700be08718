"""Compare the cost of checking answers, by teacher-forced steps over many of them, with the cost of drawing them.

    python -m benchmarks.receipts --commit $(git rev-parse --short HEAD) [--model tiny] [--receipts 64] [--tokens 128]

An engine draws some answers one after the other, the others together; a replayer then checks the receipts of all, and
some of them one by one. All run the same compiled model in one process, on prompts of 32 random tokens. Every figure is
the median of some rounds, in seconds an answer. The replayer is built once, as an audit does; it reads every weight for
the fingerprint, and those seconds are reported separately. The script fails if a verdict is not "equal", or if the
change of one token is not named.

Writes receipts-<device>-<commit>.json to --out, by default benchmarks/results.
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import detcompile
from benchmarks.model import build
from detcompile.digests import fingerprint
from detcompile.runtime.engine import Engine
from detcompile.runtime.kv.block_pool import BLOCK_SIZE
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.plain_tokenizer import plain_tokenizer, tokenizer_digest
from detcompile.serving.receipts.decoding import recorded_prompt
from detcompile.serving.receipts.receipt import Receipt, Served, written_params
from detcompile.serving.receipts.replay import CHUNK, Replayer

RESULTS = Path(__file__).parent / "results"
NUM_PROMPT_TOKENS = 32
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.9, "top_p": 0.9},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "four samples": {"temperature": 0.9, "top_p": 0.9, "n": 4},
}


class Issuer:
    """Makes the receipts that a server would issue."""

    def __init__(self, model: detcompile.CompiledModel) -> None:
        self._parts = {name: str(part) for name, part in model.fingerprint_parts.items()}
        tokenizer = model.tokenizer
        self._tokenizer = None if tokenizer is None else tokenizer_digest(plain_tokenizer(tokenizer))

    def receipt(self, output: Any, params: SamplingParams) -> Receipt:
        """Return the receipt of an answer."""
        parts, tokenizer = self._parts, self._tokenizer
        return Receipt(
            id="cmpl-1",
            created=0,
            model="benchmark",
            level="tokens",
            fingerprint=fingerprint(parts),
            fingerprint_parts=parts,
            served=Served(detcompile=detcompile.__version__, tokenizer=tokenizer, chat_template=None),
            params=written_params(params),
            seed=str(params.seed),
            prompts=[recorded_prompt(output, output.prompt_token_ids, None, tokenizer is not None)],
        )


def measure(
    engine: Engine, replayers: dict[int, Replayer], issuer: Issuer, kind: str, given: argparse.Namespace
) -> dict[str, float]:
    """Return the median costs of some rounds after a warmup, in seconds an answer.

    Args:
        replayers: by their tokens per step; the first also checks answers one by one.

    Raises:
        SystemExit: a verdict is wrong.
    """
    draw = random.Random(kind)
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True, seed=7, **KINDS[kind])
    num_prompts, num_alone = -(-given.receipts // params.n), -(-given.alone // params.n)
    prompts = [[draw.randrange(5, 1000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num_prompts)]
    first = next(iter(replayers.values()))
    costs: list[dict[str, float]] = []
    for number in range(given.rounds + 1):
        alone = prompts[:1] if number == 0 else prompts[:num_alone]
        times = [time.perf_counter()]
        outputs = [engine.generate([prompt], params, progress=False)[0] for prompt in alone]
        times.append(time.perf_counter())
        outputs += engine.generate(prompts[len(alone) :], params, progress=False)
        times.append(time.perf_counter())
        cost = {
            "drawn alone": (times[1] - times[0]) / len(alone) / params.n,
            "drawn together": (times[2] - times[1]) / max(1, len(prompts) - len(alone)) / params.n,
        }
        receipts = [issuer.receipt(output, params) for output in outputs]
        begun = time.perf_counter()
        verdicts: list[Any] = [first.check(receipt) for receipt in receipts[: len(alone)]]
        cost["checked alone"] = (time.perf_counter() - begun) / len(alone) / params.n
        for chunk, replayer in replayers.items():
            begun = time.perf_counter()
            verdicts += [verdict for _, verdict in replayer.check_all(receipts)]
            cost[f"checked together, {chunk} tokens a step"] = (time.perf_counter() - begun) / len(receipts) / params.n
        costs.append(cost)
        wrong = [verdict for verdict in verdicts if getattr(verdict, "outcome", None) != "equal"]
        if wrong:
            raise SystemExit(f"{kind}: {wrong[0]}")
    receipts[-1].prompts[0].samples[-1].token_ids[given.tokens // 2] ^= 1  # type: ignore[index, operator]
    [(_, verdict)] = [pair for pair in first.check_all(receipts) if getattr(pair[1], "outcome", None) != "equal"]
    if getattr(verdict, "position", None) != given.tokens // 2:
        raise SystemExit(f"{kind}: a changed token: {verdict}")
    return {name: statistics.median(cost[name] for cost in costs[1:]) for name in costs[0]}


def main() -> None:
    """Measure every kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--model", default="tiny", help="a name, or a number of layers of Qwen3-8B's shape")
    parser.add_argument("--receipts", type=int, default=64, help="answers")
    parser.add_argument("--alone", type=int, default=8, help="answers that are drawn and checked one by one")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--chunks", type=int, nargs="+", default=[CHUNK], help="tokens of a replay's step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    name = arguments.model
    model = detcompile.compile(build(int(name)) if name.isdigit() else name)
    assert isinstance(model, detcompile.CompiledModel)
    start = time.perf_counter()
    replayers = {arguments.chunks[0]: Replayer(model, chunk=arguments.chunks[0])}
    ready = round(time.perf_counter() - start, 4)
    print(f"ready after {ready} s", flush=True)
    replayers |= {chunk: Replayer(model, chunk=chunk) for chunk in arguments.chunks[1:]}
    num_blocks = arguments.receipts * -(-(NUM_PROMPT_TOKENS + arguments.tokens) // BLOCK_SIZE) + 1  # leaves room
    config = detcompile.EngineConfig(max_num_seqs=arguments.receipts, num_blocks=num_blocks)
    engine, issuer = model.engine(config), Issuer(model)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()}-cores"
    result: dict[str, Any] = {"commit": arguments.commit, "device": device, "model": name, "ready, s": ready}
    result |= {key: getattr(arguments, key) for key in ("receipts", "alone", "tokens", "rounds")}
    rows: list[dict[str, Any]] = []
    for kind in arguments.kinds.split(","):
        costs = measure(engine, replayers, issuer, kind, arguments)
        ratios = {f"drawn alone / {name}": costs["drawn alone"] / costs[name] for name in costs if "checked" in name}
        rows.append({"kind": kind} | {key: float(f"{value:.4g}") for key, value in (costs | ratios).items()})
        print(json.dumps(rows[-1]), flush=True)
        file = arguments.out / f"receipts-{device.lower().replace(' ', '-')}-{arguments.commit}.json"
        file.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
