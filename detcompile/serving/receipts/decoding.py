"""Decoding: a receipt's answers made again token by token, by an engine: what a receipt of hashes can be checked by."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.block_pool import BLOCK_SIZE
from detcompile.runtime.requests.outputs import Logprobs, RequestOutput
from detcompile.serving.receipts.receipt import (
    Prompt,
    Receipt,
    Sample,
    commitment,
    params_of,
    recorded,
    recorded_sample,
)
from detcompile.serving.receipts.teacher_forcing import PlainLogprobs
from detcompile.serving.receipts.verdict import Verdict, differs

__all__ = ["Opening", "Redrawn", "RedrawnSample", "opened", "read_opening", "recorded_prompt", "redraw", "redrawn_of"]

WANTED = 'give JSON: {"salt": "hex of X-Detcompile-Receipt-Salt", "prompts": [[token ids]], "grammar": source if any}'


class RedrawnSample(NamedTuple):
    """One sample that a replay drew, equal to the receipt's."""

    token_ids: list[int]
    logprobs: list[PlainLogprobs] | None  # None where none were asked for
    finish_reason: str | None
    stop_reason: int | str | None


class Redrawn(NamedTuple):
    """A prompt of a receipt, and the samples that a replay drew for it."""

    token_ids: list[int]
    logprobs: list[PlainLogprobs | None]  # of the prompt's tokens; empty where none were asked for
    samples: list[RedrawnSample]


class Opening(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a receipt of hashes hides: its salt in hex, the token ids of its prompts, and its grammar's source."""

    salt: str
    prompts: list[list[int]]
    grammar: str | None = None

    @property
    def salt_bytes(self) -> bytes:
        """The salt.

        Raises:
            InvalidInput: it is no hex.
        """
        try:
            return bytes.fromhex(self.salt)
        except ValueError as error:
            raise InvalidInput(f"the salt {self.salt[:40]!r} is no hex: {WANTED}") from error


def read_opening(path: Path) -> Opening:
    """The opening in a file.

    Raises:
        InvalidInput: the file cannot be read, or holds none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Opening)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} holds no opening of a receipt: {error}; {WANTED}") from error


def opened(receipt: Receipt, opening: Opening | None) -> list[list[int]] | Verdict:
    """Token ids of a receipt's prompts; or what is wrong, where the opening is not that of this receipt.

    Raises:
        InvalidInput: the receipt holds hashes, and there is no opening.
    """
    given = [prompt.token_ids for prompt in receipt.prompts]
    plain = [ids for ids in given if not isinstance(ids, str)]
    if len(plain) == len(given):
        return plain
    if opening is None:
        raise InvalidInput(f"the receipt holds hashes of its prompts: {WANTED}")
    found = [recorded(ids, opening.salt_bytes) for ids in opening.prompts]
    if found == given:
        grammar = receipt.grammar
        if grammar is None or not grammar.hashed or opening.grammar is None:
            return opening.prompts
        if grammar.source == commitment(opening.grammar, opening.salt_bytes):
            return opening.prompts
        return differs("grammar", "the salt or the grammar is not that of this receipt")
    at = next((at for at, (one, own) in enumerate(zip(given, found)) if one != own), min(len(given), len(found)))
    return differs("prompts", "the salt or the prompts are not those of this receipt", prompt=at)


def redraw(
    model: CompiledModel,
    receipt: Receipt,
    prompts: Sequence[list[int]],
    grammar: str | None = None,
) -> list[RequestOutput]:
    """Return answers to the receipt's prompts that are made now.

    Args:
        grammar: source of the grammar, where the receipt has a hash of it.

    Raises:
        InvalidInput: parameters that cannot be served. EngineError: an answer failed.
    """
    params = params_of(receipt, grammar)
    most = max((len(ids) for ids in prompts), default=1) + (params.max_tokens or model.max_context)
    blocks = params.n * (-(-min(most, model.max_context) // BLOCK_SIZE) + 1) * max(1, len(model.facts.kv_groups))
    config = EngineConfig(num_blocks=blocks + 2, max_num_seqs=min(params.n, 64), block_size=BLOCK_SIZE)
    outputs = model.engine(config).generate(prompts, params, progress=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


def recorded_prompt(output: RequestOutput, token_ids: list[int], salt: bytes | None, has_text: bool) -> Prompt:
    """Return a prompt as a receipt has it, of an engine's output.

    Args:
        salt: hides it as the receipt's are; None where these are plain.
        has_text: whether the model has a tokenizer.
    """
    redrawn = redrawn_of(output, token_ids)
    samples: list[Sample] = []
    for own, sample in zip(output.outputs, redrawn.samples):
        reasons = (sample.finish_reason, sample.stop_reason)
        text = own.text if has_text else None
        samples.append(recorded_sample(own.index, sample.token_ids, reasons, text, sample.logprobs, salt))
    return Prompt(
        token_ids=recorded(token_ids, salt),
        logprobs=None if output.prompt_logprobs is None else commitment(redrawn.logprobs, salt or b""),
        samples=samples,
    )


def redrawn_of(output: RequestOutput, token_ids: list[int]) -> Redrawn:
    """Return what an engine drew for a prompt."""
    of_prompt = [None if entry is None else _plain(entry) for entry in output.prompt_logprobs or ()]
    samples = [
        RedrawnSample(
            own.token_ids,
            None if own.logprobs is None else [_plain(entry) for entry in own.logprobs],
            own.finish_reason,
            own.stop_reason,
        )
        for own in output.outputs
    ]
    return Redrawn(token_ids, of_prompt, samples)


def _plain(entry: Logprobs) -> PlainLogprobs:
    return entry.token_id, entry.logprob, list(entry.top.items())
