"""Compare the cost of checking an answer, one teacher-forced pass, with the cost of decoding it.

    python -m benchmarks.receipts --commit $(git rev-parse --short HEAD) [--model tiny] [--tokens 256] [--rounds 5]

An engine draws each answer alone, and the replay of its receipt checks every token; the two take turns. Both run the
same compiled model in one process. The replayer is built once, as an audit does; it reads every weight for the
fingerprint, and those seconds are reported separately. The script fails if a verdict is not "equal".

Writes benchmarks/results/receipts-<device>-<commit>.json.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import detcompile
from benchmarks.model import build
from detcompile.digests import fingerprint
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.plain_tokenizer import plain_tokenizer, tokenizer_digest
from detcompile.serving.receipts.decoding import recorded_prompt
from detcompile.serving.receipts.receipt import Receipt, Served, written_params
from detcompile.serving.receipts.replay import Replayer

RESULTS = Path(__file__).parent / "results"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.9, "top_p": 0.9},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "four samples": {"temperature": 0.9, "top_p": 0.9, "n": 4},
}


def receipt_of(model: Any, prompt: list[int], params: SamplingParams, output: Any) -> Receipt:
    """Return the receipt that a server would issue for an answer."""
    parts = {name: str(part) for name, part in model.fingerprint_parts.items()}
    tokenizer = None if model.tokenizer is None else tokenizer_digest(plain_tokenizer(model.tokenizer))
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
        prompts=[recorded_prompt(output, prompt, None, tokenizer is not None)],
    )


def main() -> int:
    """Measure every kind. Return 1 if an answer was not reproduced, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--model", default="tiny", help="a name, or a number of layers of Qwen3-8B's shape")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    name = arguments.model
    model = detcompile.compile(build(int(name)) if name.isdigit() else name)
    engine = model.engine(detcompile.EngineConfig(max_num_seqs=8))
    prompt = list(range(5, 37))
    start = time.perf_counter()
    replayer = Replayer(model)
    ready = round(time.perf_counter() - start, 4)
    print(f"ready after {ready} s", flush=True)
    rows: list[dict[str, Any]] = []
    for kind, settings in KINDS.items():
        params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, seed=7, **settings)
        drawing, checking = [], []
        for number in range(arguments.rounds + 1):
            start = time.perf_counter()
            (output,) = engine.generate([prompt], params, progress=False)
            drawn = time.perf_counter()
            receipt = receipt_of(model, prompt, params, output)
            begun = time.perf_counter()
            verdict = replayer.check(receipt)
            checked = time.perf_counter()
            if verdict.outcome != "equal":
                print(f"{kind}: {verdict}", file=sys.stderr)
                return 1
            if number:  # the first is a warm-up
                drawing.append(drawn - start)
                checking.append(checked - begun)
        row = {"kind": kind, "draw, s": statistics.median(drawing), "check, s": statistics.median(checking)}
        row["ratio"] = row["draw, s"] / row["check, s"]
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
        print(json.dumps(rows[-1]), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()}-cores"
    result = {"commit": arguments.commit, "device": device, "model": name, "tokens": arguments.tokens}
    result |= {"ready, s": ready, "rows": rows}
    file = f"receipts-{device.lower().replace(' ', '-')}-{arguments.commit}.json"
    (RESULTS / file).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
