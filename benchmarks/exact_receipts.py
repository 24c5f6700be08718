"""Sign receipts on one device and replay them on another, in exact arithmetic (docs/exact.md).

    python -m benchmarks.exact_receipts sign FOLDER [--model tiny] [--numerics exact8x16] [--device cuda]
    python -m benchmarks.exact_receipts replay FOLDER [--model tiny] [--device cpu]

`sign` generates an answer of each kind and writes the signed receipts, the public key and the times to FOLDER. `replay`
checks every receipt and a copy of it with one token changed, and prints a table. It fails if a verdict is wrong.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

import detcompile
from benchmarks.cpu import device_name
from benchmarks.receipts import KINDS, Issuer
from detcompile import Numerics
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.receipts.envelope import payload_of, read_envelope, seal
from detcompile.serving.receipts.keys import read_verify_key, write_key_pair
from detcompile.serving.receipts.receipt import decode_receipt, encode_receipt
from detcompile.serving.receipts.replay import replay

DRAWN: dict[str, dict[str, Any]] = {
    **KINDS,
    "greedy with logprobs": {"temperature": 0.0, "logprobs": 3},
    "top-k, min-p, logprobs": {"temperature": 1.1, "top_k": 40, "min_p": 0.02, "logprobs": 2},
    "scored prompt": {"temperature": 0.8, "prompt_logprobs": 2, "n": 2},
    "bias": {"temperature": 1.0, "logit_bias": {13: -50.0, 274: 3.5}},
}
PROMPT = list(range(5, 37))


def sign(folder: Path, model: Any, tokens: int) -> None:
    """Write a receipt of each kind, the public key and the times."""
    with tempfile.TemporaryDirectory() as private:
        key = write_key_pair(Path(private) / "key")
    (folder / "key.pub").write_text(key.public.pem)
    engine, issuer = model.engine(detcompile.EngineConfig(max_num_seqs=8)), Issuer(model)
    seconds = {}
    for number, (kind, settings) in enumerate(DRAWN.items()):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=7 + number, **settings)
        start = time.perf_counter()
        (output,) = engine.generate([PROMPT], params, progress=False)
        seconds[kind] = round(time.perf_counter() - start, 3)
        envelope = seal(encode_receipt(issuer.receipt(output, params)), key)
        (folder / f"receipt{number}.json").write_bytes(msgspec.json.encode(envelope))
        print(f"{kind}: drawn in {seconds[kind]} s", flush=True)
    about = {"machine": device_name(model.device), "seconds": seconds, "fingerprint": model.fingerprint}
    (folder / "signed.json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"{len(DRAWN)} receipts signed on {about['machine']}; fingerprint {model.fingerprint}")


def check(folder: Path, model: Any) -> int:
    """Replay the receipts and a changed copy of each. Return 1 if a verdict is wrong, else 0."""
    signed, key = json.loads((folder / "signed.json").read_text()), read_verify_key(folder / "key.pub")
    print(f"signed on {signed['machine']}, replayed on {device_name(model.device)}; fingerprint {model.fingerprint}")
    print("| kind | drawn there, s | replayed here, s | verdict | with another token |\n|---|---|---|---|---|")
    wrong = 0
    for number, (kind, seconds) in enumerate(signed["seconds"].items()):
        envelope = read_envelope((folder / f"receipt{number}.json").read_bytes())
        start = time.perf_counter()
        verdict = replay(model, envelope, key=key)
        spent = time.perf_counter() - start
        receipt = decode_receipt(payload_of(envelope))
        tokens: Any = receipt.prompts[0].samples[-1].token_ids
        tokens[len(tokens) // 2] ^= 1
        forged = replay(model, seal(encode_receipt(receipt), None))
        named = forged.outcome == "differs" and forged.position == len(tokens) // 2
        wrong += verdict.outcome != "equal" or verdict.signature != "valid" or not named
        outcome = f"{verdict.outcome}, signature {verdict.signature}"
        print(f"| {kind} | {seconds} | {spent:.3f} | {outcome} | {forged.outcome}: {forged.message} |", flush=True)
    return 1 if wrong else 0


def arguments_of(actions: tuple[str, str], tokens: int, text: str | None) -> argparse.Namespace:
    """Parse the command line; the first action creates FOLDER.

    Args:
        tokens: default of --tokens.
        text: description in --help.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=actions)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--numerics", help="default: exact8x16, or as in the folder")
    parser.add_argument("--device", help="cpu or cuda; default: a GPU if there is one")
    parser.add_argument("--tokens", type=int, default=tokens)
    arguments = parser.parse_args()
    if arguments.action == actions[0]:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    return arguments


def main() -> int:
    """Sign or replay."""
    arguments = arguments_of(("sign", "replay"), 64, __doc__)
    chosen = arguments.numerics or "exact8x16"
    if arguments.action == "replay" and arguments.numerics is None:
        envelope = read_envelope((arguments.folder / "receipt0.json").read_bytes())
        chosen = decode_receipt(payload_of(envelope)).fingerprint_parts["numerics"]
    model = detcompile.compile(arguments.model, device=arguments.device, numerics=Numerics(arithmetic=chosen))
    if arguments.action == "replay":
        return check(arguments.folder, model)
    sign(arguments.folder, model, arguments.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
