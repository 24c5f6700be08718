"""Replay: a receipt's answers against a model, by one teacher-forced pass and the sampler over each position of it."""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.dense.end_tokens import stop_tokens
from detcompile.runtime.requests.admission import Admission
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
    Prompt,
    Receipt,
    Sample,
    commitment,
    decode_receipt,
    params_of,
    recorded_sample,
)
from detcompile.serving.receipts.teacher_forcing import Drawn, PlainLogprobs, teacher_forced
from detcompile.serving.receipts.verdict import Verdict, differs, fingerprint_verdict

__all__ = ["CHUNK", "Replayer", "replay"]

CHUNK = 512  # tokens of a step
HASHED = "the receipt holds hashes of its prompts and answers: give its salt and its prompts (--opening)"
OTHER_LOGPROBS = "the logprobs of the prompt are others"
COMPARED = ("token_ids", "finish_reason", "stop_reason", "text", "logprobs")  # of a sample, in this order


def replay(
    model: CompiledModel,
    envelope: Envelope,
    *,
    key: VerifyKey | None = None,
    chunk: int = CHUNK,
    decode: bool = False,
    opening: Opening | None = None,
    compare: Callable[[Receipt, Sequence[Redrawn]], Verdict | None] | None = None,
) -> Verdict:
    """The verdict on an envelope's receipt.

    Args:
        model: any that has the receipt's fingerprint, on as many ranks as it likes.
        key: signature that the envelope must have; None checks none.
        chunk: tokens of a step at most; it cannot change a bit.
        decode: make the answers again token by token, in place of the one pass.
        opening: salt and prompts of a receipt of hashes, which is decoded then.
        compare: compares something else with what was drawn, where that equals the receipt; returns what differs.

    Raises:
        InvalidInput: no receipt, one that no server gives, or one of hashes without its opening.
    """
    receipt = decode_receipt(payload_of(envelope))
    fault = None if key is None else unsealed(envelope, key)
    if fault is not None:
        return differs("signatures", fault, signature="invalid")
    replayer = Replayer(model, chunk=chunk)
    again = decode or opening is not None
    verdict = replayer.decode(receipt, opening) if again else replayer.check(receipt)
    if compare is not None and verdict.outcome == "equal":
        verdict = compare(receipt, replayer.redrawn) or verdict
    verdict.signature = "unchecked" if key is None else "valid"
    return verdict


class Replayer:
    """Checks receipts against one model.

    Args:
        chunk: tokens of a step at most.
        parts: the model's fingerprint_parts, where they are known already.

    Attributes:
        redrawn: what was drawn for each prompt of the newest receipt that was equal.
    """

    def __init__(self, model: CompiledModel, *, chunk: int = CHUNK, parts: Mapping[str, str] | None = None) -> None:
        if chunk < 1:
            raise InvalidInput(f"chunk {chunk} must be at least 1 token")
        self._model = model
        self._chunk = chunk
        self.redrawn: list[Redrawn] = []
        own = model.fingerprint_parts if parts is None else parts
        self._parts = {name: str(part) for name, part in own.items()}  # torch compares its version as numbers
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
        """The verdict on a receipt, by teacher forcing; other work may go between the steps.

        Raises:
            InvalidInput: a receipt that no server gives, or one of hashes.
        """
        apart = fingerprint_verdict(receipt, self._parts, self._tokenizer)
        if apart is not None:
            return apart
        params = params_of(receipt)
        self.redrawn = []
        num_tokens = 0
        for number, prompt in enumerate(receipt.prompts):
            verdict = yield from self._check(prompt, params)
            if verdict.outcome != "equal":
                verdict.prompt = number
                return verdict
            num_tokens += verdict.num_tokens
        return Verdict(outcome="equal", message=f"all {num_tokens} tokens came out again", num_tokens=num_tokens)

    def check(self, receipt: Receipt) -> Verdict:
        """The verdict on a receipt, by teacher forcing.

        Raises:
            InvalidInput: a receipt that no server gives, or one of hashes.
        """
        steps = self.steps(receipt)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                verdict: Verdict = end.value
                return verdict

    def decode(self, receipt: Receipt, opening: Opening | None = None) -> Verdict:
        """The verdict on a receipt, by answers that an engine makes again.

        Raises:
            InvalidInput: a receipt that no server gives, or one of hashes without its opening.
        """
        apart = fingerprint_verdict(receipt, self._parts, self._tokenizer)
        prompts = opened(receipt, opening) if apart is None else apart
        if isinstance(prompts, Verdict):
            return prompts
        salt = None if receipt.level == "tokens" or opening is None else opening.salt_bytes
        source, has_text = None if opening is None else opening.grammar, self._tokenizer is not None
        outputs = redraw(self._model, receipt, prompts, source)
        made = [recorded_prompt(output, ids, salt, has_text) for output, ids in zip(outputs, prompts)]
        for number, (given, found) in enumerate(zip(receipt.prompts, made)):
            verdict = _prompt_difference(given, found)
            if verdict is not None:
                verdict.prompt = number
                return verdict
        self.redrawn = [redrawn_of(output, ids) for output, ids in zip(outputs, prompts)]
        num_samples = sum(len(prompt.samples) for prompt in made)
        return Verdict(outcome="equal", message=f"all {num_samples} answers came out again")

    def _check(self, prompt: Prompt, params: SamplingParams) -> Generator[None, None, Verdict]:
        answers = [one.token_ids for one in prompt.samples if not isinstance(one.token_ids, str)]
        if isinstance(prompt.token_ids, str) or len(answers) < len(prompt.samples):
            raise InvalidInput(HASHED)
        fault = _other_samples(prompt, params)
        if fault is not None:
            return fault
        request = self._admission.request(
            "receipt", prompt.token_ids, params, arrival=0, priority=0, stream_text=False
        )
        fault = self._misshapen(prompt, request, answers)
        if fault is not None:
            return fault
        logprobs: list[list[PlainLogprobs]] = [[] for _ in answers]
        of_prompt: list[PlainLogprobs | None] = [None]
        for step in teacher_forced(self._model, request, answers, self._chunk):
            for drawn in step:
                fault = _token_difference(drawn, answers)
                if fault is not None:
                    return fault
                if drawn.logprobs is not None:
                    (of_prompt if drawn.sample is None else logprobs[drawn.sample]).append(drawn.logprobs)
            yield
        if params.prompt_logprobs is not None and prompt.logprobs != commitment(of_prompt):
            return differs("prompt_logprobs", OTHER_LOGPROBS, expected=prompt.logprobs, found=commitment(of_prompt))
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
        """What no answer to this request can be; None where it may be one."""
        if (request.params.prompt_logprobs is None) != (prompt.logprobs is None):
            return differs("prompt_logprobs", "it has logprobs of its prompt that were not asked for, or lacks them")
        most = min(self._model.facts.num_token_ids, self._model.facts.num_logits)
        for index, tokens in enumerate(answers):
            place = {"sample": index, "position": len(tokens)}
            if not tokens:
                return differs("token_ids", f"sample {index} has no token", **place)
            if len(request.output.prompt_token_ids) + len(tokens) > self._model.facts.max_context:
                return differs("token_ids", f"sample {index} is longer than the context", **place)
            beyond = next((at for at, token in enumerate(tokens) if token >= most), None)
            if beyond is not None:
                said = f"sample {index}, position {beyond}: {tokens[beyond]} is no token of the model"
                return differs("token_ids", said, sample=index, position=beyond, expected=tokens[beyond])
        return None

    def _read(
        self,
        prompt: Prompt,
        request: Request,
        answers: Sequence[list[int]],
        logprobs: Sequence[list[PlainLogprobs]],
    ) -> Generator[None, None, Verdict]:
        """Whether each sample ended where it had to, with the text and the logprobs that it says."""
        counted = itertools.count(1)  # tokens of all samples
        for sample, tokens, known in zip(prompt.samples, answers, logprobs):
            fault = yield from _finished(request, sample.index, tokens, counted, self._chunk)
            if fault is not None:
                return fault
            output = request.output.outputs[sample.index]
            reasons = (output.finish_reason, output.stop_reason)
            text = None if self._tokenizer is None else output.text
            asked = None if request.params.logprobs is None else known
            fault = _sample_difference(sample, recorded_sample(sample.index, tokens, reasons, text, asked, None))
            if fault is not None:
                return fault
        return Verdict(outcome="equal", num_tokens=sum(map(len, answers)))


def _other_samples(prompt: Prompt, params: SamplingParams) -> Verdict | None:
    """What is wrong where there are not n samples; looked at first, as a request for as many may take all memory."""
    indices, wanted = [sample.index for sample in prompt.samples], list(range(params.n))
    if indices == wanted:
        return None
    return differs("samples", f"there are samples {indices} of n={len(wanted)}", expected=indices, found=wanted)


def _finished(
    request: Request, index: int, tokens: Sequence[int], counted: Iterator[int], chunk: int
) -> Generator[None, None, Verdict | None]:
    """Give a sample its tokens, as an engine does; what is wrong where it ends before them, or not with them."""
    sequence = request.sequences[index]
    for position, token in enumerate(tokens):
        if sequence.finish_reason is not None:
            said = f"sample {index} ended before position {position} ({sequence.finish_reason}), and goes on there"
            return differs("finish_reason", said, sample=index, position=position, found=sequence.finish_reason)
        request.add_token(index, token, None)
        if next(counted) % chunk == 0:
            yield
    if sequence.finish_reason is None:
        said = f"sample {index} stops at position {len(tokens)} without a reason to"
        return differs("finish_reason", said, sample=index, position=len(tokens))
    return None


def _prompt_difference(given: Prompt, found: Prompt) -> Verdict | None:
    """The first field in which a receipt's prompt is another than what was found; None where none is."""
    indices, own = ([sample.index for sample in prompt.samples] for prompt in (given, found))
    if indices != own:
        return differs("samples", f"there are samples {indices}, and {own} here", expected=indices, found=own)
    if given.logprobs != found.logprobs:
        return differs("prompt_logprobs", OTHER_LOGPROBS, expected=given.logprobs, found=found.logprobs)
    every = (_sample_difference(one, other) for one, other in zip(given.samples, found.samples))
    return next((verdict for verdict in every if verdict is not None), None)


def _sample_difference(given: Sample, found: Sample) -> Verdict | None:
    """The first field in which a receipt's sample is another than what was found; None where none is."""
    for field in COMPARED:
        expected, own = getattr(given, field), getattr(found, field)
        if expected != own:
            said = f"sample {given.index}: {field} is {expected!r} in the receipt, and {own!r} here"
            return differs(field, said, sample=given.index, expected=expected, found=own)
    return None


def _token_difference(drawn: Drawn, answers: Sequence[list[int]]) -> Verdict | None:
    if drawn.sample is None or drawn.token == answers[drawn.sample][drawn.position]:
        return None
    expected = answers[drawn.sample][drawn.position]
    said = f"sample {drawn.sample}, position {drawn.position}: token {expected} in the receipt, {drawn.token} is drawn"
    place = {"sample": drawn.sample, "position": drawn.position}
    return differs("token_ids", said, expected=expected, found=drawn.token, **place)
