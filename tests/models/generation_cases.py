"""Models, batches and watchers that the tests of generate() share."""

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import detcompile
from detcompile import CompiledModel
from tests.model_cases import VOCAB_SIZE, certified, compiled, random_model

__all__ = [
    "LENGTHS",
    "OTHERS",
    "PAD",
    "QUICK",
    "Recorder",
    "model_of",
    "new_tokens",
    "padded_batch",
    "plain_model",
    "tokenizer",
]

PAD = 0
LENGTHS = (9, 5, 12)
QUICK = ("qwen3", "gpt2")
OTHERS = ("gemma3_text", "llama", "mistral", "granite", "gpt_neox", "opt", "olmo2", "bloom")


@functools.cache
def plain_model(name: str) -> PreTrainedModel:
    return random_model(name, torch.float32)


@functools.cache
def model_of(name: str) -> CompiledModel:
    if name == "qwen3":
        return compiled(name, torch.float32)
    return certified(random_model(name, torch.float32), max_context=256)


@functools.cache
def tokenizer() -> Any:
    """Return the embedded model's tokenizer: its first ids are bytes, which covers every id that these models draw."""
    return detcompile.compile("tiny").tokenizer


def padded_batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB_SIZE, (len(lengths), max(lengths)), generator=generator)
    columns = torch.arange(max(lengths))
    mask = (columns >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return torch.where(mask == 1, ids, PAD), mask


@functools.cache
def new_tokens(name: str) -> tuple[tuple[int, ...], ...]:
    """Return each row's greedy answer; the tests' arguments are chosen to change it."""
    ids, mask = padded_batch()
    actual = plain_model(name).generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=PAD)
    return tuple(map(tuple, actual[:, ids.shape[1] :].tolist()))


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append(["end"])
