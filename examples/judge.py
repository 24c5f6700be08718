"""Judge answers by their log-probabilities, in several batches: neither verdicts nor scores depend on the batch.

    python examples/judge.py smollm2     # after `detcompile fetch smollm2`
    python examples/judge.py             # the embedded model: no download; it knows Python, but not capitals

Of two answers to a question, the likelier one wins. With plain transformers a score may move with the batch
that its answer is in, by model, machine and threads; where two answers are close, so does the verdict. Needs no GPU.
"""

import itertools
import random
import sys

import torch
from transformers import PreTrainedModel

import detcompile
from detcompile import Engine, EngineConfig, SamplingParams

QUESTIONS = (
    "The capital of Norway is",
    "The largest city of South America is",
    "The city on my ticket is",
    "I always wanted to live in",
)
ANSWERS = (
    " Oslo", " Paris", " Rome", " Lima", " Cairo", " Tokyo", " London", " Berlin", " Madrid", " Athens", " Vienna",
    " Dublin", " Chicago", " Boston", " Sydney", " Santiago",
)  # fmt: skip
Row = tuple[list[int], int]  # the tokens of a question and its answer, and the index at which the answer begins


@torch.no_grad()
def plain_scores(model: PreTrainedModel, batch: list[Row]) -> list[float]:
    """Score with transformers' own forward over a padded batch."""
    longest = max(len(tokens) for tokens, _ in batch)
    input_ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in batch])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens, _ in batch])
    logits = model(input_ids.to(model.device), mask.to(model.device)).logits
    scores = []
    for row, (tokens, start) in zip(logits.float().log_softmax(-1), batch):
        scores.append(sum(row[at - 1, tokens[at]].item() for at in range(start, len(tokens))))
    return scores


def our_scores(engine: Engine, batch: list[Row]) -> list[float]:
    """Score with the engine, which reports the log-probabilities of prompt tokens."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = engine.generate([tokens for tokens, _ in batch], params, progress=False)
    scores = []
    for output, (_, start) in zip(outputs, batch):
        scores.append(sum(entry.logprob for entry in output.prompt_logprobs[start:]))
    return scores


def batchings(count: int) -> list[list[list[int]]]:
    """Return batchings of the same rows: one by one, all together, and in random batches."""
    ways = [[[row] for row in range(count)], [list(range(count))]]
    for size in (3, 8):
        order = random.Random(size).sample(range(count), count)
        ways.append([order[at : at + size] for at in range(0, count, size)])
    return ways


def judge(name: str, score, rows: list[Row]) -> tuple[int, int]:
    """Return how many scores, compared by bytes, and how many verdicts change with the batch."""
    by_way: list[dict[int, float]] = []  # by row, for each way
    for way in batchings(len(rows)):
        by_way.append({at: value for batch in way for at, value in zip(batch, score([rows[at] for at in batch]))})
    scores = sum(len({way[at].hex() for way in by_way}) > 1 for at in range(len(rows)))
    questions = [range(at, at + len(ANSWERS)) for at in range(0, len(rows), len(ANSWERS))]
    pairs = [pair for group in questions for pair in itertools.combinations(group, 2)]
    verdicts = sum(len({way[a] > way[b] for way in by_way}) > 1 for a, b in pairs)
    print(f"--- {name}: {scores} of {len(rows)} scores and {verdicts} of {len(pairs)} verdicts move with the batch")
    return scores, verdicts


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "tiny"  # or any Hugging Face model
    plain, model = detcompile.load_model(name), detcompile.compile(name)
    rows = []
    for question, answer in itertools.product(QUESTIONS, ANSWERS):
        question_ids, answer_ids = model.tokenizer(question)["input_ids"], model.tokenizer(answer)["input_ids"]
        rows.append((question_ids + answer_ids, len(question_ids)))
    engine = model.engine(EngineConfig(num_blocks=128))
    judge("plain transformers", lambda batch: plain_scores(plain, batch), rows)
    assert judge("detcompile", lambda batch: our_scores(engine, batch), rows) == (0, 0)
    print(f"--- equal in every batch; fingerprint {model.fingerprint}")


if __name__ == "__main__":
    main()
