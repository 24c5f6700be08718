"""Replay: verifies a receipt's answers with a model, by one teacher-forced pass and the sampler at each position."""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from detcompile.errors import InvalidInput
from detcompile.models.certified import WeightSource
from detcompile.models.checkpoints import read_weights
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.adapters import Adapter
from detcompile.runtime.requests.admission import Admission
from detcompile.runtime.requests.plain_values import stop_tokens
from detcompile.runtime.requests.request import Request
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.plain_tokenizer import plain_tokenizer, tokenizer_digest
from detcompile.serving.receipts.decoding import (
    Opening,
    Redrawn,
    RedrawnSample,
    opened,
    recorded_prompt,
    redraw,
    redrawn_of,
)
from detcompile.serving.receipts.envelope import Envelope, payload_of, unsealed
from detcompile.serving.receipts.keys import VerifyKey
from detcompile.serving.receipts.receipt import (
    PlainLogprobs,
    Prompt,
    Receipt,
    Sample,
    decode_receipt,
    params_of,
    recorded_logprobs,
    recorded_sample,
)
from detcompile.serving.receipts.teacher_forcing import Drawn, teacher_forced
from detcompile.serving.receipts.verdict import Verdict, differs, fingerprint_verdict

CHUNK = 512  # tokens per step
HASHED = "the receipt holds hashes of its prompts and answers: give its salt and its prompts (--opening)"
OTHER_LOGPROBS = "the logprobs of the prompt differ"
COMPARED = ("token_ids", "finish_reason", "stop_reason", "text", "logprobs")  # fields of a sample, in this order


def replay(
    model: CompiledModel,
    envelope: Envelope,
    *,
    key: VerifyKey | None = None,
    chunk: int = CHUNK,
    decode: bool = False,
    opening: Opening | None = None,
    compare: Callable[[Receipt, Sequence[Redrawn]], Verdict | None] | None = None,
    folders: Iterable[Path] = (),
) -> Verdict:
    """Return the verdict on an envelope's receipt.

    Args:
        model: a model with the receipt's fingerprint, on any number of ranks. Adapters that drew answers are loaded.
        key: required signer; None checks no signature.
        chunk: maximum tokens per step; cannot change a bit.
        decode: draw the answers token by token instead of in one pass.
        opening: salt and prompts of a receipt of hashes, which is always decoded.
        compare: an additional check of a receipt that was reproduced; returns a difference or None.
        folders: see Replayer.

    Raises:
        InvalidInput: not a receipt, not one that a server can issue, or one of hashes without opening.
    """
    receipt = decode_receipt(payload_of(envelope))
    fault = None if key is None else unsealed(envelope, key)
    if fault is not None:
        return differs("signatures", fault, signature="invalid")
    replayer = Replayer(model, chunk=chunk, folders=folders)
    again = decode or opening is not None
    try:
        verdict = replayer.decode(receipt, opening) if again else replayer.check(receipt)
    finally:
        replayer.restore()
    if compare is not None and verdict.outcome == "equal":
        verdict = compare(receipt, replayer.redrawn) or verdict
    verdict.signature = "unchecked" if key is None else "valid"
    return verdict


class Replayer:
    """Verifies receipts with one model.

    Args:
        chunk: maximum tokens per step.
        parts: the model's fingerprint_parts, if already known.
        folders: weights of other versions; the model takes them to check the tokens that they drew.

    Attributes:
        redrawn: what was drawn for each prompt of the last receipt that was equal.

    Raises:
        InvalidInput: a folder cannot be read, or does not fit; the model has its earlier weights.
    """

    def __init__(
        self,
        model: CompiledModel,
        *,
        chunk: int = CHUNK,
        parts: Mapping[str, str] | None = None,
        folders: Iterable[Path] = (),
    ) -> None:
        if chunk < 1:
            raise InvalidInput(f"chunk {chunk} must be at least 1 token")
        self._model = model
        self._chunk = chunk
        self.redrawn: list[Redrawn] = []
        all_parts = model.fingerprint_parts if parts is None else parts
        self._parts = {name: str(part) for name, part in all_parts.items()}  # torch compares its version as numbers
        self._weights: dict[str, Path | WeightSource] = {}  # by fingerprint part
        self._first = ""  # fingerprint part of the weights that the model came with
        try:
            for folder in folders:
                if not self._weights:
                    self._first = self._parts["weights"]
                    self._weights[self._first] = _copy_of(model)
                self._write(read_weights(folder))
                self._weights.setdefault(self._parts["weights"], folder)
        except BaseException:
            self.restore()
            raise
        tokenizer, facts = model.tokenizer, model.facts
        self._tokenizer = None if tokenizer is None else tokenizer_digest(plain_tokenizer(tokenizer))
        self._admission = Admission(
            tokenizer,
            max_context=facts.max_context,
            vocab_size=facts.num_token_ids,
            num_logits=facts.num_logits,
            end_tokens=lambda: stop_tokens(model.model),
        )

    def steps(self, receipt: Receipt) -> Generator[None, None, Verdict]:
        """Return the verdict on a receipt by teacher forcing; yields between steps.

        Raises:
            InvalidInput: a receipt that no server issues, or one of hashes.
        """
        self._use(receipt.fingerprint_parts.get("weights", ""))
        adapter = self._adapter(receipt)
        mismatch = self._mismatch(receipt, adapter) or self._absent_weights(receipt)
        if mismatch is not None:
            return mismatch
        params = params_of(receipt)
        self.redrawn = []
        num_tokens = 0
        for number, prompt in enumerate(receipt.prompts):
            verdict = yield from self._check(prompt, params, receipt.fingerprint_parts.get("weights", ""), adapter)
            if verdict.outcome != "equal":
                verdict.prompt = number
                return verdict
            num_tokens += verdict.num_tokens
        message = f"all {num_tokens} tokens were reproduced{self._other_sources(receipt)}"
        return Verdict(outcome="equal", message=message, num_tokens=num_tokens)

    def check(self, receipt: Receipt) -> Verdict:
        """Return the verdict on a receipt by teacher forcing.

        Raises:
            InvalidInput: a receipt that no server issues, or one of hashes.
        """
        steps = self.steps(receipt)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                verdict: Verdict = end.value
                return verdict

    def decode(self, receipt: Receipt, opening: Opening | None = None) -> Verdict:
        """Return the verdict on a receipt by drawing the answers again with an engine.

        Raises:
            InvalidInput: not a receipt that a server can issue, or one of hashes without opening.
        """
        if any(sample.drawn_by for prompt in receipt.prompts for sample in prompt.samples):
            raise InvalidInput("weights of several versions drew this answer: replay it without --decode and --opening")
        self._use(receipt.fingerprint_parts.get("weights", ""))
        adapter = self._adapter(receipt)
        mismatch = self._mismatch(receipt, adapter)
        prompts = opened(receipt, opening) if mismatch is None else mismatch
        if isinstance(prompts, Verdict):
            return prompts
        salt = None if receipt.level == "tokens" or opening is None else opening.salt_bytes
        source, has_text = None if opening is None else opening.grammar, self._tokenizer is not None
        outputs = redraw(self._model, receipt, prompts, source, adapter and adapter.name)
        made = [recorded_prompt(output, ids, salt, has_text) for output, ids in zip(outputs, prompts)]
        for number, (given, drawn) in enumerate(zip(receipt.prompts, made)):
            verdict = _prompt_difference(given, drawn)
            if verdict is not None:
                verdict.prompt = number
                return verdict
        self.redrawn = [redrawn_of(output, ids) for output, ids in zip(outputs, prompts)]
        num_samples = sum(len(prompt.samples) for prompt in made)
        message = f"all {num_samples} answers were reproduced{self._other_sources(receipt)}"
        return Verdict(outcome="equal", message=message)

    def _other_sources(self, receipt: Receipt) -> str:
        """Return a remark if the receipt's sources differ, which the bits version allows."""
        same = receipt.fingerprint_parts.get("source") == self._parts.get("source")
        return "" if same else f"; sources differ, bits version equal ({self._parts['bits_version']})"

    def restore(self) -> None:
        """Give the model the weights that it came with."""
        if self._first:
            self._use(self._first)

    def _use(self, weights: str) -> None:
        """Give the model weights of ``folders``, if they are there and not in use.

        Raises:
            InvalidInput: the folder has changed, or lacks weights.
        """
        source = self._weights.get(weights)
        if source is not None and self._parts["weights"] != weights:
            self._write(read_weights(source) if isinstance(source, Path) else source)
            if self._parts["weights"] != weights:
                raise InvalidInput(f"--weights {source} has changed meanwhile, or lacks weights: give whole ones")

    def _write(self, source: WeightSource) -> None:
        self._model.update_weights(source)
        self._parts = {name: str(part) for name, part in self._model.fingerprint_parts.items()}

    def _adapter(self, receipt: Receipt) -> Adapter | None:
        """Return the loaded adapter that a receipt names by its digest."""
        slots, digest = self._model.adapters, receipt.fingerprint_parts.get("adapter")
        return None if slots is None or digest is None else slots.with_digest(digest)

    def _mismatch(self, receipt: Receipt, adapter: Adapter | None) -> Verdict | None:
        parts = self._parts if adapter is None else {**self._parts, "adapter": adapter.digest}
        return fingerprint_verdict(receipt, parts, self._tokenizer)

    def _absent_weights(self, receipt: Receipt) -> Verdict | None:
        """Return a verdict if weights that drew some tokens are not here."""
        for number, prompt in enumerate(receipt.prompts):
            for sample in prompt.samples:
                for span in sample.drawn_by or ():
                    if span.weights not in (self._parts.get("weights"), *self._weights):
                        message = (
                            f"sample {sample.index}: the tokens from position {span.start} on were drawn by weights"
                            f" {span.version!r}, which are not here: give their folder with --weights"
                        )
                        return Verdict(
                            outcome="incomparable",
                            field="drawn_by",
                            message=message,
                            prompt=number,
                            sample=sample.index,
                            position=span.start,
                            parts=[("weights", span.weights, self._parts.get("weights"))],
                        )
        return None

    def _check(
        self, prompt: Prompt, params: SamplingParams, weights: str, adapter: Adapter | None
    ) -> Generator[None, None, Verdict]:
        answers = [one.token_ids for one in prompt.samples if not isinstance(one.token_ids, str)]
        if isinstance(prompt.token_ids, str) or len(answers) < len(prompt.samples):
            raise InvalidInput(HASHED)
        fault = _other_samples(prompt, params)
        if fault is not None:
            return fault
        how: dict[str, Any] = {"arrival": 0, "priority": 0, "stream_text": False, "adapter": adapter}
        request = self._admission.request("receipt", prompt.token_ids, params, **how)
        fault = self._misshapen(prompt, request, answers)
        if fault is not None:
            return fault
        drawers = [_drawers(sample, len(tokens), weights) for sample, tokens in zip(prompt.samples, answers)]
        fault = next((drawer for drawer in drawers if isinstance(drawer, Verdict)), None)
        if fault is not None:
            return fault
        by_position = [drawer for drawer in drawers if not isinstance(drawer, Verdict)]
        known: list[dict[int, PlainLogprobs]] = [{} for _ in answers]  # by position
        of_prompt: list[PlainLogprobs | None] = [None]
        for used in dict.fromkeys(itertools.chain.from_iterable(by_position)):
            self._use(used)
            for step in teacher_forced(self._model, request, answers, self._chunk):
                for drawn in step:
                    drawer = by_position[0][0] if drawn.sample is None else by_position[drawn.sample][drawn.position]
                    if drawer != used:
                        continue
                    fault = _token_difference(drawn, answers)
                    if fault is not None:
                        return fault
                    if drawn.logprobs is not None and drawn.sample is None:
                        of_prompt.append(drawn.logprobs)
                    elif drawn.logprobs is not None and drawn.sample is not None:
                        known[drawn.sample][drawn.position] = drawn.logprobs
                yield
        logprobs = [[entries[position] for position in sorted(entries)] for entries in known]
        prompt_commitment = recorded_logprobs(of_prompt, None)
        if params.prompt_logprobs is not None and prompt.logprobs != prompt_commitment:
            return differs("prompt_logprobs", OTHER_LOGPROBS, expected=prompt.logprobs, found=prompt_commitment)
        verdict = yield from self._read(prompt, request, answers, logprobs)
        if verdict.outcome == "equal":
            kept = logprobs if params.logprobs is not None else [None] * len(answers)
            samples = [
                RedrawnSample(tokens, known, given.finish_reason, given.stop_reason)
                for given, tokens, known in zip(prompt.samples, answers, kept)
            ]
            of_prompt = [] if params.prompt_logprobs is None else of_prompt
            self.redrawn.append(Redrawn(prompt.token_ids, of_prompt, samples))
        return verdict

    def _misshapen(self, prompt: Prompt, request: Request, answers: Sequence[list[int]]) -> Verdict | None:
        """Return why this cannot be an answer to the request, or None if it can."""
        if (request.params.prompt_logprobs is None) != (prompt.logprobs is None):
            return differs("prompt_logprobs", "logprobs of the prompt are present but not requested, or missing")
        most = min(self._model.facts.num_token_ids, self._model.facts.num_logits)
        for index, tokens in enumerate(answers):
            place = {"sample": index, "position": len(tokens)}
            if not tokens:
                return differs("token_ids", f"sample {index} has no token", **place)
            if len(request.output.prompt_token_ids) + len(tokens) > self._model.facts.max_context:
                return differs("token_ids", f"sample {index} is longer than the context", **place)
            beyond = next((at for at, token in enumerate(tokens) if token >= most), None)
            if beyond is not None:
                message = f"sample {index}, position {beyond}: {tokens[beyond]} is not a token of the model"
                return differs("token_ids", message, sample=index, position=beyond, expected=tokens[beyond])
        return None

    def _read(
        self,
        prompt: Prompt,
        request: Request,
        answers: Sequence[list[int]],
        logprobs: Sequence[list[PlainLogprobs]],
    ) -> Generator[None, None, Verdict]:
        """Check each sample's end, text and logprobs."""
        counted = itertools.count(1)  # tokens of all samples
        for sample, tokens, known in zip(prompt.samples, answers, logprobs):
            fault = yield from _finished(request, sample.index, tokens, counted, self._chunk)
            if fault is not None:
                return fault
            output = request.output.outputs[sample.index]
            reasons = (output.finish_reason, output.stop_reason)
            text = None if self._tokenizer is None else output.text
            requested = None if request.params.logprobs is None else known
            fault = _sample_difference(sample, recorded_sample(sample.index, tokens, reasons, text, requested, None))
            if fault is not None:
                return fault
        return Verdict(outcome="equal", num_tokens=sum(map(len, answers)))


def _copy_of(model: CompiledModel) -> dict[str, Tensor]:
    """Return a copy of a model's parameters and buffers.

    Raises:
        InvalidInput: they are in other processes or in an archive.
    """
    if not isinstance(model.model, nn.Module):
        raise InvalidInput("weights of several versions can only be used with a model in this process: leave out --tp")
    module = model.model
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in module.state_dict()}
    return {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *buffers.items())}


def _drawers(sample: Sample, num_tokens: int, weights: str) -> list[str] | Verdict:
    """Return the fingerprint part of the weights that drew each token of a sample; a verdict if spans are invalid.

    Args:
        weights: the receipt's.
    """
    spans = sample.drawn_by
    if not spans:
        return [weights] * num_tokens
    starts = [span.start for span in spans]
    names = [span.weights for span in spans]
    ends = [*starts[1:], num_tokens]
    if starts[0] != 0 or not all(start < end for start, end in zip(starts, ends)):
        return differs("drawn_by", f"sample {sample.index}: drawn_by does not divide its tokens", sample=sample.index)
    return [name for start, end, name in zip(starts, ends, names) for _ in range(end - start)]


def _other_samples(prompt: Prompt, params: SamplingParams) -> Verdict | None:
    """Return a verdict unless there are n samples.

    Checked first: a request for many samples could use up the memory.
    """
    indices, expected = [sample.index for sample in prompt.samples], list(range(params.n))
    if indices == expected:
        return None
    message = f"the receipt has samples {indices}, but n={len(expected)} were requested"
    return differs("samples", message, expected=indices, found=expected)


def _finished(
    request: Request, index: int, tokens: Sequence[int], counted: Iterator[int], chunk: int
) -> Generator[None, None, Verdict | None]:
    """Feed a sample its tokens, as an engine does; return a verdict if it ends too early or not at all."""
    sequence = request.sequences[index]
    for position, token in enumerate(tokens):
        if sequence.finish_reason is not None:
            message = f"sample {index} ended before position {position} ({sequence.finish_reason}) but has more tokens"
            return differs("finish_reason", message, sample=index, position=position, found=sequence.finish_reason)
        request.add_token(index, token, None)
        if next(counted) % chunk == 0:
            yield
    if sequence.finish_reason is None:
        message = f"sample {index} stops at position {len(tokens)} without a reason"
        return differs("finish_reason", message, sample=index, position=len(tokens))
    return None


def _prompt_difference(given: Prompt, drawn: Prompt) -> Verdict | None:
    """Return the first difference between a receipt's prompt and a drawn one; None if they are equal."""
    indices, drawn_indices = ([sample.index for sample in prompt.samples] for prompt in (given, drawn))
    if indices != drawn_indices:
        message = f"the receipt has samples {indices}, the replay {drawn_indices}"
        return differs("samples", message, expected=indices, found=drawn_indices)
    if given.logprobs != drawn.logprobs:
        return differs("prompt_logprobs", OTHER_LOGPROBS, expected=given.logprobs, found=drawn.logprobs)
    every = (_sample_difference(one, other) for one, other in zip(given.samples, drawn.samples))
    return next((verdict for verdict in every if verdict is not None), None)


def _sample_difference(given: Sample, drawn: Sample) -> Verdict | None:
    """Return the first difference between a receipt's sample and a drawn one; None if they are equal."""
    for field in COMPARED:
        expected, actual = getattr(given, field), getattr(drawn, field)
        if expected != actual:
            message = f"sample {given.index}: {field} is {expected!r} in the receipt, {actual!r} in the replay"
            return differs(field, message, sample=given.index, expected=expected, found=actual)
    return None


def _token_difference(drawn: Drawn, answers: Sequence[list[int]]) -> Verdict | None:
    if drawn.sample is None or drawn.token == answers[drawn.sample][drawn.position]:
        return None
    expected = answers[drawn.sample][drawn.position]
    place = {"sample": drawn.sample, "position": drawn.position}
    where = f"sample {drawn.sample}, position {drawn.position}"
    message = f"{where}: token {expected} in the receipt, {drawn.token} in the replay"
    return differs("token_ids", message, expected=expected, found=drawn.token, **place)
