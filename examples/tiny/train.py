"""Train the embedded model `tiny` on the Python sources of this machine, within a budget of wall-clock minutes.

    python examples/tiny/train.py --out DIR --minutes 9

Writes a Hugging Face model folder (bf16 safetensors, tokenizer) with metrics.json and samples.txt. corpus.py says which
sources are taken and which are held out; metrics.json lists them.

B sequences of a batch, T tokens of a sequence, V vocabulary.
"""

import argparse
import copy
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from corpus import Source, collect_corpus, packages_of

START = time.monotonic()
END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
# Qwen2's split, so that a loader that rebuilds a Qwen tokenizer from its class arrives at the same tokens.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLE_PROMPTS = (
    "import os\n\n\ndef read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def test_sum_of_squares():\n    values = [1, 2, 3]\n",
)


def say(message: str) -> None:
    print(f"[{time.monotonic() - START:6.1f}s] {message}", flush=True)


# Tokens


def train_tokenizer(sources: list[Source], vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Train byte-level BPE on a sample of about 40 MB."""
    texts = [source.text for source in random.Random(0).sample(sources, len(sources))]
    sizes = np.cumsum([len(text) for text in texts])
    texts = texts[: int(np.searchsorted(sizes, 40_000_000)) + 1]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PAD, model_max_length=2048, padding_side="left"
    )


def encode(tokenizer: transformers.PreTrainedTokenizerFast, sources: list[Source]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all files as one shuffled stream with end tokens, int32, and the first index of each file."""
    texts = [source.text for source in random.Random(1).sample(sources, len(sources))]
    pieces, eos = [], tokenizer.eos_token_id
    for i in range(0, len(texts), 2048):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts[i : i + 2048], add_special_tokens=False):
            pieces.append(np.array([*encoding.ids, eos], dtype=np.int32))
    starts = np.cumsum([0] + [len(piece) for piece in pieces[:-1]])
    return torch.from_numpy(np.concatenate(pieces)), torch.from_numpy(starts)


def draw(tokens: torch.Tensor, starts: torch.Tensor, sequences: int, length: int) -> torch.Tensor:
    """Return [B, T+1] int64 windows at random offsets, a quarter of them moved back to where their file begins."""
    at = torch.randint(tokens.numel() - length - 1, (sequences,), device=tokens.device)
    first = starts[torch.searchsorted(starts, at, right=True) - 1]
    at = torch.where(torch.arange(sequences, device=at.device) % 4 == 0, first, at)
    return tokens[at[:, None] + torch.arange(length + 1, device=at.device)].long()


# Model


def build_model(tokenizer: transformers.PreTrainedTokenizerFast, layers: int) -> transformers.Qwen3ForCausalLM:
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.AttentionInterface.register("causal", causal_attention)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="causal", dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))
    return model


def causal_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Run SDPA without a mask tensor, so that the flash kernel is used; the norms leave query and key in fp32."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def language_loss(model: torch.nn.Module, window: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def train(model: torch.nn.Module, tokens: torch.Tensor, starts: torch.Tensor, args: argparse.Namespace, save) -> dict:
    """Train until `args.reserve` seconds before `args.minutes`; the learning rate follows the clock."""
    device = tokens.device
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    loss_fn = torch.compile(language_loss, dynamic=False) if device.type == "cuda" else language_loss
    step, fraction, begin, saved, recent = 0, 0.0, None, 0, []
    while fraction < 1.0 and step != args.max_steps:
        rate = args.lr * min(1.0, (step + 1) / 150) * (0.5 + 0.5 * math.cos(math.pi * fraction))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_fn(model, draw(tokens, starts, args.sequences, args.length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 8 and step > 1:
            continue
        # Reading the loss waits for the device: without it the clock would run ahead of the steps.
        recent.append(loss.item())
        begin = begin or time.monotonic()  # after the first step, which compiles
        end = START + 60 * args.minutes - args.reserve
        fraction = (time.monotonic() - begin) / max(1.0, end - begin)
        if step == 1 or step % args.log_every == 0:
            speed = (step - 1) * args.sequences * args.length / max(1e-9, time.monotonic() - begin)
            say(f"step {step} {fraction:.1%} loss {np.mean(recent):.4f} lr {rate:.1e} {speed / 1e6:.2f} M tokens/s")
            recent = []
        if int(fraction * 4) > saved:
            saved = int(fraction * 4)
            save(model)
    seconds = round(time.monotonic() - begin, 1)
    return {"steps": step, "tokens_seen": step * args.sequences * args.length, "seconds": seconds}


# What came out


@torch.inference_mode()
def evaluate(model: torch.nn.Module, tokens: torch.Tensor, num_bytes: int, length: int) -> dict:
    """Return the held-out loss over windows of `length`; every token but the first is predicted once."""
    buckets = [(a, b) for a, b in ((0, 256), (256, 512), (512, 1024), (1024, 2048)) if b <= length]
    count = (tokens.numel() - 1) // length
    windows = tokens[: count * length + 1].unfold(0, length + 1, length)
    losses = torch.zeros(length, dtype=torch.float64, device=tokens.device)
    for window in windows.split(32):
        window = window.long()
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten(), reduction="none")
        losses += loss.view(window.shape[0], length).double().sum(0)
    nats = losses.sum().item() / (count * length)
    return {
        "nats_per_token": round(nats, 4),
        "bits_per_byte": round(nats * tokens.numel() / math.log(2) / num_bytes, 4),
        "tokens": count * length,
        "bytes_per_token": round(num_bytes / tokens.numel(), 4),
        "nats_per_token_by_position": {
            f"{a}-{b}": round(losses[a:b].sum().item() / (count * (b - a)), 4) for a, b in buckets
        },
    }


def write_samples(model, tokenizer, path: Path, num_tokens: int) -> None:
    """Write greedy and temperature 0.8 continuations of SAMPLE_PROMPTS."""
    torch.manual_seed(0)
    parts = []
    for prompt in SAMPLE_PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
        for name, options in (("greedy", {"do_sample": False}), ("0.8", {"do_sample": True, "temperature": 0.8})):
            out = model.generate(**inputs, max_new_tokens=num_tokens, **options)
            parts.append(f"=== {name}\n{tokenizer.decode(out[0], skip_special_tokens=True)}\n")
    path.write_text("\n".join(parts))
    print(path.read_text(), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=9.0, help="wall-clock budget of the whole script")
    parser.add_argument("--reserve", type=float, default=40.0, help="seconds of it kept for evaluation and samples")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=64, help="B")
    parser.add_argument("--length", type=int, default=2048, help="T")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--max-files", type=int, default=None, help="for a smoke test")
    parser.add_argument("--sample-tokens", type=int, default=160)
    parser.add_argument("--log-every", type=int, default=200)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = collect_corpus(args.max_files)
    packages = packages_of(corpus)
    say("  ".join(f"{name} {entry['megabytes']}" for name, entry in packages.items()))
    say(f"held out: {sorted({source.package for source in corpus.held_out})}")
    tokenizer = train_tokenizer(corpus.train, args.vocab)
    say("tokenizer trained")
    tokens, starts = (tensor.to(device) for tensor in encode(tokenizer, corpus.train))
    held_out_tokens = encode(tokenizer, corpus.held_out)[0].to(device)
    held_out_bytes = sum(len(source.text.encode()) for source in corpus.held_out)
    say(f"{tokens.numel() / 1e6:.1f} M tokens to train on, {held_out_tokens.numel() / 1e6:.2f} M held out")
    torch.manual_seed(0)
    model = build_model(tokenizer, args.layers).to(device)

    def save(model) -> None:
        half = copy.deepcopy(model).to(torch.bfloat16)
        half.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)

    training = train(model, tokens, starts, args, save)
    save(model)
    say(f"trained and saved: {training}")
    del model
    model = transformers.AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16).to(device).eval()
    metrics = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out": evaluate(model, held_out_tokens, held_out_bytes, args.length),
        "training": training | {"tokens": tokens.numel(), "files": len(corpus.train), "lr": args.lr},
        "held_out_packages": sorted({source.package for source in corpus.held_out}),
        "packages": packages,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    say(json.dumps(metrics["held_out"]))
    write_samples(model, tokenizer, args.out / "samples.txt", args.sample_tokens)
    say("done")


if __name__ == "__main__":
    main()
