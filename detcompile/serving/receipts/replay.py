"""Replay: verifies a receipt's answers with a model, by one teacher-forced pass and the sampler at each position."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from detcompile.errors import DetcompileError, InvalidInput
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
from detcompile.serving.receipts.teacher_forcing import Drawn, ForcedAnswers, TeacherForcing
from detcompile.serving.receipts.verdict import Verdict, differs, fingerprint_verdict

CHUNK = 2048  # tokens per step
HASHED = "the receipt holds hashes of its prompts and answers: give its salt and its prompts (--opening)"
OTHER_LOGPROBS = "the logprobs of the prompt differ"
Pause = Literal["waits", "busy"]  # a check waits for a step, or has read a chunk of tokens
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
    """Verifies receipts with one model, several in a step.

    Args:
        chunk: maximum tokens per step, and between two pauses of a check.
        parts: the model's fingerprint_parts, if already known.
        folders: weights of other versions; the model takes them to check the tokens that they drew.

    Attributes:
        forcing: runs the steps; ``steps`` of all receipts wait for it.
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
        self._num_read = 0  # tokens of all answers
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
        self._reference = self._parts  # whatever weights other receipts need
        self.forcing = TeacherForcing(model, chunk, self._use)
        tokenizer, facts = model.tokenizer, model.facts
        self._tokenizer = None if tokenizer is None else tokenizer_digest(plain_tokenizer(tokenizer))
        self._admission = Admission(
            tokenizer,
            max_context=facts.max_context,
            vocab_size=facts.num_token_ids,
            num_logits=facts.num_logits,
            end_tokens=lambda: stop_tokens(model.model),
        )

    def steps(self, receipt: Receipt) -> Generator[Pause, None, Verdict]:
        """Return the verdict on a receipt by teacher forcing.

        Yields "waits" until the next step of ``forcing``, which the caller runs, and "busy" to go on after a pause.

        Raises:
            InvalidInput: a receipt that no server issues, or one of hashes.
        """
        weights = receipt.fingerprint_parts.get("weights", "")
        adapter = self._adapter(receipt)
        mismatch = self._mismatch(receipt, adapter) or self._absent_weights(receipt)
        if mismatch is not None:
            return mismatch
        params = params_of(receipt)
        checks = [_Check(self._check(prompt, params, weights, adapter)) for prompt in receipt.prompts]
        try:
            verdict = yield from self._in_order(checks)
        finally:
            for check in checks:
                check.steps.close()
        if verdict is not None:
            return verdict
        self.redrawn = [check.redrawn for check in checks if check.redrawn is not None]
        num_tokens = sum(check.num_tokens for check in checks)
        message = f"all {num_tokens} tokens were reproduced{self._other_sources(receipt)}"
        return Verdict(outcome="equal", message=message, num_tokens=num_tokens)

    def _in_order(self, checks: "Sequence[_Check]") -> Generator[Pause, None, Verdict | None]:
        """Advance the checks of a receipt's prompts; return the first verdict, in their order, that is not "equal"."""
        waiting, running = deque(enumerate(checks)), deque[tuple[int, _Check]]()
        while waiting or running:
            while waiting and (not running or self.forcing.has_room):
                running.append(waiting.popleft())
                yield from running[-1][1].advanced()
            for _, check in running:
                yield from check.advanced()
            while running and running[0][1].has_ended:
                number, check = running.popleft()
                if check.result().outcome != "equal":
                    check.result().prompt = number
                    return check.result()
            if running:
                yield "waits"
        return None

    def check(self, receipt: Receipt) -> Verdict:
        """Return the verdict on a receipt by teacher forcing.

        Raises:
            InvalidInput: a receipt that no server issues, or one of hashes.
        """
        ((_, verdict),) = self.check_all([receipt])
        if isinstance(verdict, DetcompileError):
            raise verdict
        return verdict

    def check_all(self, receipts: Iterable[Receipt]) -> Iterator[tuple[int, Verdict | DetcompileError]]:
        """Yield the number and the verdict of each receipt by teacher forcing, in the order in which they end.

        The steps hold tokens of several receipts, which cannot change a verdict. A receipt that cannot be checked gets
        an exception, as from ``check``.
        """
        waiting, running = iter(enumerate(receipts)), dict[int, Generator[Pause, None, Verdict]]()
        try:
            while True:
                while not running or self.forcing.has_room:
                    number, receipt = next(waiting, (-1, None))
                    if receipt is None:
                        break
                    running[number] = self.steps(receipt)
                    yield from self._advanced(running, number)
                if not running:
                    return
                self.forcing.step()
                for number in list(running):
                    yield from self._advanced(running, number)
        finally:
            for steps in running.values():
                steps.close()

    def _advanced(
        self, running: dict[int, Generator[Pause, None, Verdict]], number: int
    ) -> Iterator[tuple[int, Verdict | DetcompileError]]:
        """Advance a receipt's check until it waits; yield what it ended with."""
        try:
            while next(running[number]) == "busy":
                continue
            return
        except StopIteration as end:
            verdict: Verdict | DetcompileError = end.value
        except DetcompileError as error:
            verdict = error
        del running[number]
        yield number, verdict

    def decode(self, receipt: Receipt, opening: Opening | None = None) -> Verdict:
        """Return the verdict on a receipt by drawing the answers again with an engine.

        Raises:
            InvalidInput: not a receipt that a server can issue, or one of hashes without opening.
        """
        samples = [sample for prompt in receipt.prompts for sample in prompt.samples]
        weights = receipt.fingerprint_parts.get("weights", "")
        if any(span.weights != weights for sample in samples for span in sample.drawn_by or ()):
            raise InvalidInput("weights of several versions drew this answer: replay it without --decode and --opening")
        adapter = self._adapter(receipt)
        mismatch = self._mismatch(receipt, adapter)
        if mismatch is None:
            self._use(weights)
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
        same = receipt.fingerprint_parts.get("source") == self._reference.get("source")
        return "" if same else f"; sources differ, bits version equal ({self._reference['bits_version']})"

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
        parts, weights = self._reference, receipt.fingerprint_parts.get("weights", "")
        parts = {**parts, "weights": weights} if weights in self._weights else parts
        parts = parts if adapter is None else {**parts, "adapter": adapter.digest}
        return fingerprint_verdict(receipt, parts, self._tokenizer)

    def _absent_weights(self, receipt: Receipt) -> Verdict | None:
        """Return a verdict if weights that drew some tokens are not here; those of the fingerprint are."""
        here = receipt.fingerprint_parts.get("weights")
        for number, prompt in enumerate(receipt.prompts):
            for sample in prompt.samples:
                for span in sample.drawn_by or ():
                    if span.weights not in (here, *self._weights):
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
                            parts=[("weights", span.weights, here)],
                        )
        return None

    def _check(
        self, prompt: Prompt, params: SamplingParams, weights: str, adapter: Adapter | None
    ) -> Generator[Pause, None, tuple[Verdict, Redrawn | None]]:
        answers = [one.token_ids for one in prompt.samples if not isinstance(one.token_ids, str)]
        if isinstance(prompt.token_ids, str) or len(answers) < len(prompt.samples):
            raise InvalidInput(HASHED)
        fault = _other_samples(prompt, params)
        if fault is not None:
            return fault, None
        how: dict[str, Any] = {"arrival": 0, "priority": 0, "stream_text": False, "adapter": adapter}
        request = self._admission.request("receipt", prompt.token_ids, params, **how)
        fault = self._misshapen(prompt, request, answers)
        if fault is not None:
            return fault, None
        drawers = [_drawers(sample, len(tokens), weights) for sample, tokens in zip(prompt.samples, answers)]
        fault = next((drawer for drawer in drawers if isinstance(drawer, Verdict)), None)
        if fault is not None:
            return fault, None
        by_position = [drawer for drawer in drawers if not isinstance(drawer, Verdict)]
        known: list[dict[int, PlainLogprobs]] = [{} for _ in answers]  # by position
        of_prompt: list[PlainLogprobs | None] = [None]
        for used in dict.fromkeys(itertools.chain.from_iterable(by_position)):
            wants = functools.partial(_is_drawn_by, by_position, used)
            fault = yield from self._forced(ForcedAnswers(request, answers, used, wants), known, of_prompt)
            if fault is not None:
                return fault, None
        logprobs = [[entries[position] for position in sorted(entries)] for entries in known]
        prompt_commitment = recorded_logprobs(of_prompt, None)
        if params.prompt_logprobs is not None and prompt.logprobs != prompt_commitment:
            return differs("prompt_logprobs", OTHER_LOGPROBS, expected=prompt.logprobs, found=prompt_commitment), None
        verdict = yield from self._read(prompt, request, answers, logprobs)
        if verdict.outcome != "equal":
            return verdict, None
        kept = logprobs if params.logprobs is not None else [None] * len(answers)
        samples = [
            RedrawnSample(tokens, known, given.finish_reason, given.stop_reason)
            for given, tokens, known in zip(prompt.samples, answers, kept)
        ]
        return verdict, Redrawn(prompt.token_ids, [] if params.prompt_logprobs is None else of_prompt, samples)

    def _forced(
        self, given: ForcedAnswers, known: list[dict[int, PlainLogprobs]], of_prompt: list[PlainLogprobs | None]
    ) -> Generator[Pause, None, Verdict | None]:
        """Draw answers again, and keep their log-probabilities; return the first difference."""
        self.forcing.add(given)
        try:
            while not given.is_done or given.draws:
                for drawn in given.taken():
                    fault = _token_difference(drawn, given.answers)
                    if fault is not None:
                        return fault
                    if drawn.logprobs is not None and drawn.sample is None:
                        of_prompt.append(drawn.logprobs)
                    elif drawn.logprobs is not None and drawn.sample is not None:
                        known[drawn.sample][drawn.position] = drawn.logprobs
                if not given.is_done:
                    yield "waits"
            return None
        finally:
            self.forcing.drop(given)

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
    ) -> Generator[Pause, None, Verdict]:
        """Check each sample's end, text and logprobs."""
        for sample, tokens, known in zip(prompt.samples, answers, logprobs):
            fault = yield from self._finished(request, sample.index, tokens)
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

    def _finished(self, request: Request, index: int, tokens: Sequence[int]) -> Generator[Pause, None, Verdict | None]:
        """Feed a sample its tokens, as an engine does; return a verdict if it ends too early or not at all."""
        sequence = request.sequences[index]
        for position, token in enumerate(tokens):
            if sequence.finish_reason is not None:
                reason = sequence.finish_reason
                message = f"sample {index} ended before position {position} ({reason}) but has more tokens"
                return differs("finish_reason", message, sample=index, position=position, found=reason)
            request.add_token(index, token, None)
            self._num_read += 1
            if self._num_read % self._chunk == 0:
                yield "busy"
        if sequence.finish_reason is None:
            message = f"sample {index} stops at position {len(tokens)} without a reason"
            return differs("finish_reason", message, sample=index, position=len(tokens))
        return None


class _Check:
    """The check of one prompt of a receipt.

    Attributes:
        has_ended: True if there is a result.
        redrawn: what was drawn, if the verdict is "equal".
    """

    def __init__(self, steps: Generator[Pause, None, tuple[Verdict, Redrawn | None]]) -> None:
        self.steps = steps
        self.has_ended = False
        self.redrawn: Redrawn | None = None
        self._result: Verdict | Exception | None = None

    @property
    def num_tokens(self) -> int:
        """Number of drawn tokens that were equal."""
        return self.result().num_tokens

    def advanced(self) -> Iterator[Pause]:
        """Advance until the check waits or ends; yield when it is busy."""
        try:
            while not self.has_ended and next(self.steps) == "busy":
                yield "busy"
            return
        except StopIteration as end:
            self._result, self.redrawn = end.value
        except Exception as error:
            self._result = error
        self.has_ended = True

    def result(self) -> Verdict:
        """Return the verdict.

        Raises:
            Exception: the exception that ended the check.
        """
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result


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


def _is_drawn_by(by_position: Sequence[Sequence[str]], weights: str, sample: int | None, position: int) -> bool:
    """Return whether these weights draw a position; those of the first token also give the prompt's logprobs."""
    return (by_position[0][0] if sample is None else by_position[sample][position]) == weights


def _other_samples(prompt: Prompt, params: SamplingParams) -> Verdict | None:
    """Return a verdict unless there are n samples.

    Checked first: a request for many samples could use up the memory.
    """
    indices, expected = [sample.index for sample in prompt.samples], list(range(params.n))
    if indices == expected:
        return None
    message = f"the receipt has samples {indices}, but n={len(expected)} were requested"
    return differs("samples", message, expected=indices, found=expected)


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
