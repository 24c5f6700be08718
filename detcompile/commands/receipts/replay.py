"""`detcompile replay`: runs a receipt's answers again on this machine."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from detcompile.commands.inspection.fingerprint_differences import part_differences
from detcompile.commands.inspection.recordings import Recording
from detcompile.commands.loading_options import Random
from detcompile.commands.options import Json, Loading, compile_model, logs
from detcompile.commands.receipts.whole_answers import answer_difference, require_known, uncovered
from detcompile.errors import DetcompileError, InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.models.spec import ARCHIVE_SUFFIX, ModelSpec
from detcompile.offline.llm_options import MAX_LORA_RANK
from detcompile.orders.exact import ARITHMETICS
from detcompile.runtime.engine_config import EngineConfig
from detcompile.serving.engines.engine_process import hello_of
from detcompile.serving.receipts.decoding import Opening, Redrawn, read_opening
from detcompile.serving.receipts.envelope import Envelope, payload_of, read_answer, unsealed
from detcompile.serving.receipts.keys import VerifyKey, read_verify_key
from detcompile.serving.receipts.receipt import Receipt, decode_receipt
from detcompile.serving.receipts.replay import CHUNK, replay
from detcompile.serving.receipts.verdict import Verdict, differs
from detcompile.serving.tokenizer_pool import TokenizerPool

UNREADABLE = 3  # exit code
Adapters = Annotated[
    list[Path] | None, typer.Option("--adapter", help="Folder of a LoRA adapter that drew answers; repeat it.")
]
MaxLoraRank = Annotated[int | None, typer.Option(help="The server's --max-lora-rank; 16 with --adapter, else none.")]
TOKENIZER = "another tokenizer, which decodes tokens and finds stop strings"


def command(
    receipt: Annotated[Path, typer.Argument(help="A receipt, or an answer that came with one.")],
    model: Annotated[str | None, typer.Argument(help="Model to run it on; default: as the receipt names it.")] = None,
    key: Annotated[Path | None, typer.Option(help="Public key that must have signed it.")] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Draw token by token, not in one pass.")] = False,
    opening: Annotated[Path | None, typer.Option(help="JSON with salt and prompts of a receipt of hashes.")] = None,
    weights: Annotated[
        list[Path] | None, typer.Option(help="Folder of weights that drew some of the tokens; repeat it.")
    ] = None,
    adapter: Adapters = None,
    max_lora_rank: MaxLoraRank = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks, each in a process.")] = 1,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a step at most.")] = CHUNK,
    json_output: Json = False,
    random: Random = False,
    *,
    loading: Loading,
) -> None:
    """Run a receipt's answers again, all positions at once; exit 1: differs, 2: other model, 3: bad file."""
    try:
        envelope, answer, verify_key, hidden = _read(receipt, key, opening)
        decoded = decode_receipt(payload_of(envelope))
        fault = None if verify_key is None else unsealed(envelope, verify_key)
        if fault is None:
            spec = spec_of(decoded, model, loading, random)
            compiled = compile_with(spec, tp, adapter or [], max_lora_rank)
            compare = functools.partial(_compare, answer, envelope, compiled, hidden) if answer else None
            options: dict[str, Any] = {"chunk": chunk, "decode": decode, "opening": hidden, "folders": weights or ()}
            verdict = replay(compiled, envelope, key=verify_key, compare=compare, **options)
            verdict.uncovered = uncovered(answer) if answer else []
        else:
            verdict = differs("signatures", fault, signature="invalid")
    except DetcompileError as error:
        logs.print(f"{type(error).__name__}: {error}", markup=False, highlight=False)
        raise typer.Exit(UNREADABLE) from error
    print(msgspec.json.encode(verdict).decode() if json_output else "\n".join(_lines(decoded, verdict)))
    raise typer.Exit(verdict.exit_code)


def spec_of(receipt: Receipt, given: str | None, loading: Loading, random: bool) -> ModelSpec:
    """Return the model to replay a receipt on, in its exact arithmetic unless --numerics names another one.

    Args:
        given: the model's name; None takes the receipt's.

    Raises:
        InvalidInput: no model was given, and the receipt names an adapter, or an archive. An archive holds code: it
            must be named.
    """
    if given is None and "adapter" in receipt.fingerprint_parts:
        raise InvalidInput(f"the receipt is of LoRA adapter {receipt.model!r}: name the model under it as MODEL")
    if given is None and receipt.model.endswith(ARCHIVE_SUFFIX):
        raise InvalidInput(f"the receipt is of {receipt.model!r}, an archive, which holds code: name it as MODEL")
    name, signed = receipt.model if given is None else given, receipt.fingerprint_parts.get("numerics")
    if loading.numerics is None and signed in ARITHMETICS and not name.endswith(ARCHIVE_SUFFIX):
        loading = replace(loading, numerics=signed)
    return loading.spec(name, random)


def compile_with(spec: ModelSpec, tp: int, adapters: Sequence[Path], max_lora_rank: int | None) -> CompiledModel:
    """Compile a model with room for adapters, and load them."""
    if adapters and max_lora_rank is None:
        max_lora_rank = MAX_LORA_RANK
    compiled = compile_model(replace(spec, max_lora_rank=max_lora_rank), tp)
    for folder in dict.fromkeys(adapters):
        slots = compiled.adapters
        if slots is None:
            raise InvalidInput("--adapter needs a model in this process, from its checkpoint: no archive, --tp 1")
        slots.load(str(folder), folder)
    return compiled


def _compare(
    answer: dict[str, Any],
    envelope: Envelope,
    model: CompiledModel,
    opening: Opening | None,
    receipt: Receipt,
    redrawn: Sequence[Redrawn],
) -> Verdict | None:
    """Return the difference between a whole answer and the replay; None if they are equal."""
    texts = TokenizerPool(hello_of(model, EngineConfig(), 0, receipt.model, {}))
    grammar = None if opening is None else opening.grammar
    try:
        return answer_difference(answer, envelope, receipt, redrawn, texts, grammar)
    finally:
        texts.stop()


def _read(
    receipt: Path, key: Path | None, opening: Path | None
) -> tuple[Envelope, dict[str, Any], VerifyKey | None, Opening | None]:
    try:
        envelope, answer = read_answer(receipt.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{receipt} cannot be read: {error.strerror}") from error
    if answer:
        require_known(answer)
    hidden = None if opening is None else read_opening(opening)
    return envelope, answer, None if key is None else read_verify_key(key), hidden


def _lines(receipt: Receipt, verdict: Verdict) -> Iterator[str]:
    yield f"{receipt.id} of {receipt.model!r}, fingerprint {receipt.fingerprint}; signature {verdict.signature}"
    if verdict.parts:
        yield from _part_lines(verdict)
    where = "" if verdict.prompt is None or not verdict.prompt else f"prompt {verdict.prompt}, "
    field = "" if verdict.field is None else f"{verdict.field}: "
    yield f"{verdict.outcome}: {field}{where}{verdict.message}"
    if verdict.uncovered and verdict.outcome == "equal":
        yield f"so are the answer's other fields, except those that no receipt covers: {', '.join(verdict.uncovered)}"


def _part_lines(verdict: Verdict) -> Iterator[str]:
    """Yield the parts that differ, as `detcompile diff` prints them: A is the receipt, B this machine."""
    sides = [{name: value for name, *values in verdict.parts if (value := values[side]) is not None} for side in (0, 1)]
    for side in sides:
        side.pop("tokenizer", None)
    for part in part_differences(Recording(Path("A"), sides[0]), Recording(Path("B"), sides[1])):
        yield f"{part.part} differs: {part.meaning}"
        yield from (f"  {name}: {str(value)[:160]}" for name, value in (("receipt", part.a), ("here", part.b)))
    if any(name == "tokenizer" for name, _, _ in verdict.parts):
        yield f"tokenizer differs: {TOKENIZER}"
