"""Train drafters for the embedded model: a small model and Medusa heads, both distilled from it.

    python examples/tiny/train_draft.py --out DIR --minutes 12

Writes DIR/draft (a Hugging Face folder with the target's tokenizer) and DIR/medusa (heads for its hidden states), both
bf16, and metrics. Sources and held-out packages are those of corpus.py. One pass of the
target over the windows teaches both students. A part of them is text that the target wrote itself, as drafts meet no
other (Zhou et al., "DistillSpec", ICLR 2024).

B sequences of a batch, T tokens of a sequence, V vocabulary, H hidden size.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from corpus import collect_corpus
from torch import Tensor, nn
from train import draw, encode, say

import detcompile
from detcompile.runtime.speculation.medusa_heads import MedusaHeads

PROMPT_TOKENS = 32  # of a corpus file that the target continues
GENERATED_LENGTH = 256  # tokens of a generated text, including its prompt
GENERATED_BATCH = 96
TEMPERATURES = (0.0, 0.8, 0.8, 1.0)


def generated_text(target: nn.Module, tokens: Tensor, starts: Tensor, seconds: float) -> Tensor:
    """Return [N, GENERATED_LENGTH] continuations of pieces of files, greedy and sampled."""
    end, parts = time.monotonic() + seconds, []
    while time.monotonic() < end or not parts:
        temperature = TEMPERATURES[len(parts) % len(TEMPERATURES)]
        options = {"do_sample": temperature > 0} | ({"temperature": temperature, "top_k": 0} if temperature else {})
        at = starts[torch.randint(len(starts) - 1, (GENERATED_BATCH,), device=tokens.device)]
        at = (at + torch.randint(0, 400, at.shape, device=tokens.device)).clamp_max(len(tokens) - PROMPT_TOKENS)
        prompts = tokens[at[:, None] + torch.arange(PROMPT_TOKENS, device=tokens.device)].long()
        written = target.generate(
            prompts,
            min_length=GENERATED_LENGTH,
            max_length=GENERATED_LENGTH,
            attention_mask=torch.ones_like(prompts),
            **options,
        )
        parts.append(written)
    return torch.cat(parts)


def build_draft(target: nn.Module, args: argparse.Namespace) -> transformers.Qwen3ForCausalLM:
    """Build a Qwen3 with the target's vocabulary, its embedding initialized from the target's principal directions."""
    config = transformers.Qwen3Config.from_dict(
        target.config.to_dict()
        | {
            "hidden_size": args.hidden,
            "intermediate_size": 3 * args.hidden,
            "num_hidden_layers": args.layers,
            "layer_types": ["full_attention"] * args.layers,
            "num_attention_heads": args.hidden // 32,
            "num_key_value_heads": max(1, args.hidden // 64),
        }
    )
    draft = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    embedding = target.get_input_embeddings().weight.detach()
    _, _, directions = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False)
    with torch.no_grad():
        reduced = embedding @ directions[: args.hidden].T
        draft.get_input_embeddings().weight.copy_(reduced * (0.05 / reduced.std()))
    return draft


def taught(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross entropy with the teacher's distribution, from logits and teacher logits [.., V]."""
    return -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def heads_loss(heads: MedusaHeads, lm_head: Tensor, hidden: Tensor, window: Tensor, every: int) -> Tensor:
    """Return the loss of the heads; head k predicts k tokens past the next one, with less weight, as in Medusa.

    Args:
        hidden: [B, T, H] of the target. window: [B, T] tokens. every: of so many positions one is learned from.
    """
    loss = hidden.new_zeros(())
    for index, rows in enumerate(heads.hidden(hidden[:, : -heads.num_heads - 1 : every])):
        wanted = window[:, index + 2 :: every][:, : rows.shape[1]]
        loss = loss + 0.8**index * F.cross_entropy((rows @ lm_head.T).float().flatten(0, 1), wanted.flatten().long())
    return loss


@torch.no_grad()
def states_of(target: nn.Module, windows: Tensor, seconds: float) -> Tensor:
    """Return the target's last hidden states [N', T, H] in bf16 for as many windows [N, T] as time allows.

    They are computed once, however often a window is used in training.
    """
    end, parts = time.monotonic() + seconds, []
    for batch in windows.split(8):
        if time.monotonic() > end and parts:
            break
        with torch.autocast(windows.device.type, dtype=torch.bfloat16):
            parts.append(target.model(input_ids=batch.long(), use_cache=False).last_hidden_state.bfloat16())
    return torch.cat(parts)


def train(target, draft, heads, windows: Tensor, states: Tensor, args: argparse.Namespace, end: float) -> dict:
    """Train until ``end``; the learning rates follow the clock.

    Args:
        windows: [N, T] tokens. states: [N, T, H] of the target over them.
    """
    groups = {"draft": (draft, args.lr), "heads": (heads, args.head_lr)}
    parameters = [{"params": list(groups[s][0].parameters()), "rate": groups[s][1]} for s in args.students]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01)
    lm_head = target.get_output_embeddings().weight.detach()
    begin, step, recent, fraction = time.monotonic(), 0, [], 0.0
    while fraction < 1.0:
        warm = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * fraction)))
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * warm
        chosen = torch.randint(len(windows), (args.sequences,), device=windows.device)
        hidden = states[chosen].float()
        losses = {"draft": hidden.new_zeros(()), "heads": hidden.new_zeros(())}
        with torch.autocast(windows.device.type, dtype=torch.bfloat16):
            if "draft" in args.students:
                teacher = (hidden @ lm_head.T).float()
                guessed = draft(input_ids=windows[chosen].long(), use_cache=False).logits.float()
                losses["draft"] = taught(guessed, teacher)
            if "heads" in args.students:
                losses["heads"] = heads_loss(heads, lm_head, hidden, windows[chosen], args.head_stride)
        sum(losses.values()).backward()
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        recent.append([loss.item() for loss in losses.values()])
        fraction = (time.monotonic() - begin) / max(1e-9, end - begin)
        if step % 100 == 0:
            mean = [round(sum(column) / len(column), 3) for column in zip(*recent)]
            say(f"step {step} {fraction:.0%} draft {mean[0]} heads {mean[1]}")
            recent = []
    return {"steps": step, "tokens_seen": step * windows[:1].numel() * args.sequences, "seconds": round(end - begin)}


@torch.inference_mode()
def agreement(target, draft, heads, window: Tensor, students: list[str]) -> dict:
    """Return how often a student's likeliest token is the target's, over [N, T] tokens."""
    hidden = target.model(input_ids=window, use_cache=False).last_hidden_state
    lm_head = target.get_output_embeddings().weight
    wanted = (hidden @ lm_head.T).argmax(-1)
    guesses = {"draft": (0, draft(input_ids=window, use_cache=False).logits.argmax(-1))} if "draft" in students else {}
    if "heads" in students:
        states = enumerate(heads.hidden(hidden), start=1)
        guesses |= {f"head {k}": (k, (rows @ lm_head.T).argmax(-1)) for k, rows in states}
    return {
        name: round((wanted[:, k:] == guess[:, : guess.shape[1] - k]).float().mean().item(), 4)
        for name, (k, guess) in guesses.items()
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--students", nargs="+", choices=["draft", "heads"], default=["draft", "heads"])
    parser.add_argument("--minutes", type=float, default=12.0, help="wall-clock budget of the whole script")
    parser.add_argument("--own-minutes", type=float, default=2.0, help="for text that the target generates")
    parser.add_argument("--state-minutes", type=float, default=2.0, help="for the target's hidden states")
    parser.add_argument("--windows", type=int, default=2000, help="most windows of T tokens from the corpus")
    parser.add_argument("--max-files", type=int, default=3000, help="most files to read")
    parser.add_argument("--train-files", type=int, default=1500, help="of the others")
    parser.add_argument("--hidden", type=int, default=128, help="of the draft model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-layers", type=int, default=2)
    parser.add_argument("--head-stride", type=int, default=2, help="heads learn from every n-th position")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--head-lr", type=float, default=5e-3)
    parser.add_argument("--sequences", type=int, default=4, help="B")
    parser.add_argument("--length", type=int, default=256, help="T")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    end = time.monotonic() + 60 * args.minutes - 15  # evaluation and saving
    torch.manual_seed(0)
    target = detcompile.load_model("tiny", dtype=torch.float32).requires_grad_(False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target.name_or_path)
    corpus = collect_corpus(args.max_files)
    files = random.Random(2).sample(corpus.train, min(args.train_files, len(corpus.train)))
    tokens, starts = (tensor.to(target.device) for tensor in encode(tokenizer, files))
    apart = encode(tokenizer, corpus.held_out)[0].to(target.device)
    say(f"{len(tokens) / 1e6:.1f} M tokens to train on, {len(apart) / 1e6:.2f} M held out")
    generated = generated_text(target, tokens, starts, 60 * args.own_minutes)[:, : args.length]
    say(f"the target wrote {generated.numel() / 1e6:.2f} M tokens")
    windows = torch.cat([generated.int(), draw(tokens, starts, args.windows, args.length - 1).int()])
    windows = windows[torch.randperm(len(windows), device=windows.device)]
    states = states_of(target, windows, 60 * args.state_minutes)
    windows = windows[: len(states)]
    say(f"{windows.numel() / 1e6:.2f} M hidden states")
    draft = build_draft(target, args).to(target.device)
    heads = MedusaHeads(target.config.hidden_size, args.heads, num_layers=args.head_layers).to(target.device)
    students = {"draft": draft, "heads": heads}
    sizes = {name: sum(p.numel() for p in students[name].parameters()) for name in args.students}
    say(str(sizes))
    training = train(target, draft, heads, windows, states, args, end)
    window = apart[: len(apart) // args.length * args.length].view(-1, args.length)[:64].long()
    metrics = {
        "parameters": sizes,
        "training": training | {"own_tokens": generated.numel(), "files": len(corpus.train)},
        "agreement_held_out": agreement(target, draft, heads, window, args.students),
        "held_out_packages": sorted({source.package for source in corpus.held_out}),
        "arguments": {key: value for key, value in vars(args).items() if key != "out"},
    }
    if "draft" in args.students:
        draft.to(torch.bfloat16).save_pretrained(args.out / "draft")
        tokenizer.save_pretrained(args.out / "draft")
    if "heads" in args.students:
        heads.to(torch.bfloat16).save(args.out / "medusa")
    (args.out / f"{'_'.join(args.students)}_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    say(json.dumps(metrics["agreement_held_out"]))


if __name__ == "__main__":
    main()
