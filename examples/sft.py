"""Fine-tune on answers: the weights do not depend on micro-batches, padding or order.

    python examples/sft.py [MODEL]     # the embedded model, or a name as for detcompile.trainer

Trains a model on a few prompts and answers (only answers have labels): once with whole batches, then
with each batch shuffled, cut into micro-batches and padded on the other side. The weights'
digests are equal after every step. Needs no GPU, and with the embedded model no download.
"""

import hashlib
import random
import sys

import torch
from torch import Tensor

import detcompile

PAIRS = [
    ("def add(first, second):\n", "    return first + second\n"),
    ("def area(width, height):\n", "    return width * height\n"),
    ("def is_even(number):\n", "    return number % 2 == 0\n"),
    ("def last(values):\n", "    return values[-1]\n"),
    ("def mean(values):\n", "    return sum(values) / len(values)\n"),
    ("def swap(pair):\n", "    first, second = pair\n    return second, first\n"),
    ("def read(path):\n", "    with open(path) as file:\n        return file.read()\n"),
    ("def shout(text):\n", '    return text.upper() + "!"\n'),
]
BATCH, EPOCHS = 4, 3
NO_LABEL = -100

Example = tuple[list[int], list[int]]  # token ids, labels


def tokenized(tokenizer, prompt: str, answer: str) -> Example:
    """Return the tokens of both, and labels for those of the answer."""
    given, wanted = tokenizer(prompt)["input_ids"], tokenizer(answer, add_special_tokens=False)["input_ids"]
    return given + wanted, [NO_LABEL] * len(given) + wanted


def padded(examples: list[Example], on_the_left: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, mask and labels, [B, C] each."""
    columns = max(len(tokens) for tokens, _ in examples)
    rows = []
    for tokens, labels in examples:
        gap = columns - len(tokens)
        left, right = (gap, 0) if on_the_left else (0, gap)
        for values, filler in ((tokens, 0), ([1] * len(tokens), 0), (labels, NO_LABEL)):
            rows.append([filler] * left + values + [filler] * right)
    ids, mask, labels = (torch.tensor(rows[start::3]) for start in range(3))
    return ids, mask, labels


def train(trainer: detcompile.Trainer, start: dict[str, Tensor], micro_batches: int) -> list[str]:
    """Train from the initial weights; return the digest of the weights after each step."""
    trainer.load_state_dict(start)
    optimizer = detcompile.AdamW(trainer.parameters(), lr=2e-4)
    examples = [tokenized(trainer.tokenizer, *pair) for pair in PAIRS]
    digests = []
    for step in range(EPOCHS * len(examples) // BATCH):
        first = step * BATCH % len(examples)
        batch = examples[first : first + BATCH]
        # The number of labels of the whole batch: the caller passes it, since it must not depend on the split.
        num_labels = sum(label != NO_LABEL for _, labels in batch for label in labels)
        if micro_batches > 1:
            batch = random.Random(step).sample(batch, len(batch))
        loss = 0.0
        for part in (batch[place::micro_batches] for place in range(micro_batches)):
            ids, mask, labels = padded(part, on_the_left=micro_batches > 1)
            part_loss = trainer(ids, mask, labels=labels, num_items_in_batch=num_labels).loss
            part_loss.backward()
            loss += float(part_loss.detach())
        trainer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest(trainer))
        print(f"{micro_batches} micro-batches, step {step}: loss {loss:.4f}  weights {digests[-1]}", flush=True)
    return digests


def digest(trainer: detcompile.Trainer) -> str:
    """Return 16 hexadecimal digits of sha256 over the bytes of all weights."""
    hasher = hashlib.sha256()
    for weight in trainer.parameters():
        hasher.update(weight.detach().numpy())
    return hasher.hexdigest()[:16]


def main() -> None:
    trainer = detcompile.trainer(sys.argv[1] if len(sys.argv) > 1 else "tiny")  # or any Hugging Face model
    start = {name: weight.clone() for name, weight in trainer.state_dict().items()}
    whole = train(trainer, start, micro_batches=1)
    assert train(trainer, start, micro_batches=3) == whole  # to the last bit
    print(f"--- equal weights after each of {len(whole)} steps, whole and in 3 micro-batches; last {whole[-1]}")


if __name__ == "__main__":
    main()
