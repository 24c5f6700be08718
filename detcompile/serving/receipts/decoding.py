"""Replay by decoding: an engine draws a receipt's answers again, token by token; needed for receipts of hashes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.block_pool import BLOCK_SIZE
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.serving.receipts.receipt import (
    PlainLogprobs,
    Prompt,
    Receipt,
    Sample,
    commitment,
    params_of,
    plain_logprobs,
    recorded,
    recorded_logprobs,
    recorded_sample,
)
from detcompile.serving.receipts.verdict import Verdict, differs

WANTED = 'give JSON: {"salt": "hex of X-Detcompile-Receipt-Salt", "prompts": [[token ids]], "grammar": source if any}'


class RedrawnSample(NamedTuple):
    """A sample drawn by a replay, equal to the receipt's."""

    token_ids: list[int]
    logprobs: list[PlainLogprobs] | None  # None if not requested
    finish_reason: str | None
    stop_reason: int | str | None


class Redrawn(NamedTuple):
    """A receipt's prompt and the samples that a replay drew for it."""

    token_ids: list[int]
    logprobs: list[PlainLogprobs | None]  # of the prompt's tokens; empty if not requested
    samples: list[RedrawnSample]


class Opening(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a receipt of hashes hides: its salt in hex, the prompts' token ids, and the grammar's source."""

    salt: str
    prompts: list[list[int]]
    grammar: str | None = None

    @property
    def salt_bytes(self) -> bytes:
        """Return the salt.

        Raises:
            InvalidInput: not hexadecimal.
        """
        try:
            return bytes.fromhex(self.salt)
        except ValueError as error:
            raise InvalidInput(f"the salt {self.salt[:40]!r} is not hexadecimal: {WANTED}") from error


def read_opening(path: Path) -> Opening:
    """Return the opening in a file.

    Raises:
        InvalidInput: the file cannot be read or contains no opening.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Opening)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} contains no opening of a receipt: {error}; {WANTED}") from error


def opened(receipt: Receipt, opening: Opening | None) -> list[list[int]] | Verdict:
    """Return the token ids of a receipt's prompts, or a verdict if the opening does not match the receipt.

    Raises:
        InvalidInput: the receipt holds hashes and there is no opening.
    """
    recorded_ids = [prompt.token_ids for prompt in receipt.prompts]
    plain = [ids for ids in recorded_ids if not isinstance(ids, str)]
    if len(plain) == len(recorded_ids):
        return plain
    if opening is None:
        raise InvalidInput(f"the receipt holds hashes of its prompts: {WANTED}")
    hashes = [recorded(ids, opening.salt_bytes) for ids in opening.prompts]
    if hashes == recorded_ids:
        grammar = receipt.grammar
        if grammar is None or not grammar.hashed or opening.grammar is None:
            return opening.prompts
        if grammar.source == commitment(opening.grammar, opening.salt_bytes):
            return opening.prompts
        return differs("grammar", "the salt or the grammar does not match this receipt")
    pairs = enumerate(zip(recorded_ids, hashes))
    at = next((at for at, (expected, actual) in pairs if expected != actual), min(len(recorded_ids), len(hashes)))
    return differs("prompts", "the salt or the prompts do not match this receipt", prompt=at)


def redraw(
    model: CompiledModel,
    receipt: Receipt,
    prompts: Sequence[list[int]],
    grammar: str | None = None,
    adapter: str | None = None,
) -> list[RequestOutput]:
    """Draw answers to the receipt's prompts.

    Args:
        grammar: source of the grammar if the receipt has its hash.
        adapter: name of the adapter that drew them; None for the plain model.

    Raises:
        InvalidInput: unsupported parameters.
        EngineError: an answer failed.
    """
    params = params_of(receipt, grammar)
    most = max((len(ids) for ids in prompts), default=1) + (params.max_tokens or model.max_context)
    blocks = params.n * (-(-min(most, model.max_context) // BLOCK_SIZE) + 1) * max(1, len(model.facts.kv_groups))
    config = EngineConfig(num_blocks=blocks + 2, max_num_seqs=min(params.n, 64), block_size=BLOCK_SIZE)
    outputs = model.engine(config).generate(prompts, params, progress=False, adapter=adapter)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


def recorded_prompt(output: RequestOutput, token_ids: list[int], salt: bytes | None, has_text: bool) -> Prompt:
    """Return an engine's output for a prompt in the receipt's form.

    Args:
        salt: salt of the receipt's hashes; None for plain tokens.
        has_text: the model has a tokenizer.
    """
    redrawn = redrawn_of(output, token_ids)
    samples: list[Sample] = []
    for drawn, sample in zip(output.outputs, redrawn.samples):
        reasons = (sample.finish_reason, sample.stop_reason)
        text = drawn.text if has_text else None
        samples.append(recorded_sample(drawn.index, sample.token_ids, reasons, text, sample.logprobs, salt))
    return Prompt(
        token_ids=recorded(token_ids, salt),
        logprobs=None if output.prompt_logprobs is None else recorded_logprobs(redrawn.logprobs, salt),
        samples=samples,
    )


def redrawn_of(output: RequestOutput, token_ids: list[int]) -> Redrawn:
    """Return what an engine drew for a prompt."""
    of_prompt = [None if entry is None else plain_logprobs(entry) for entry in output.prompt_logprobs or ()]
    samples = [
        RedrawnSample(
            sample.token_ids,
            None if sample.logprobs is None else [plain_logprobs(entry) for entry in sample.logprobs],
            sample.finish_reason,
            sample.stop_reason,
        )
        for sample in output.outputs
    ]
    return Redrawn(token_ids, of_prompt, samples)
