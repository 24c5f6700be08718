"""The engine process: reads commands from the front end, steps an engine, and sends tokens. It ends with the front end.

Run as ``python -m detcompile.serving.engines.engine_process FD``, where FD is its end of a socket pair, or with
``--dial HOST:PORT`` instead of FD and the front end's secret in DETCOMPILE_ENGINE_SECRET.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from transformers.utils import logging as transformers_logging

from detcompile.api import Compiled
from detcompile.config import engine_secret, show_gpus
from detcompile.digests import fingerprint
from detcompile.errors import DetcompileError, EngineError, InvalidInput
from detcompile.models.checkpoints import read_weights
from detcompile.models.pooling import CompiledClassifier, CompiledEmbedder
from detcompile.models.spec import ModelSpec
from detcompile.offline.llm_options import configured_params
from detcompile.orders.numerics import Numerics
from detcompile.passes.warm.program_key import cpu_facts
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.metrics import StepRecord
from detcompile.runtime.requests.outputs import CompletionOutput, RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.serving.engines.command_loop import HEARTBEAT_SECONDS, CommandLoop, Wire
from detcompile.serving.engines.controls import Controls, require_whole
from detcompile.serving.engines.engine_verifications import Verifications
from detcompile.serving.engines.handshake import front_of
from detcompile.serving.engines.pooling_server import PoolingServer
from detcompile.serving.engines.protocol import (
    VERSION,
    AdapterFile,
    Add,
    Broken,
    Cancel,
    Control,
    Delta,
    EngineSpec,
    Heartbeat,
    Hello,
    Holding,
    PoolingFacts,
    Refused,
    SampleDelta,
    Statistics,
    Step,
    Token,
    Tokens,
    Verify,
)
from detcompile.serving.plain_tokenizer import plain_tokenizer
from detcompile.serving.receipts.receipt import plain_logprobs

Compile = Callable[[ModelSpec, int, int], Compiled]
MOST_STEPS = 160  # per heartbeat
COUNTS = [name for name in Statistics.__struct_fields__ if name != "busy_seconds"]  # of EngineStats


class EngineServer(CommandLoop):
    """Serves one engine to one front end.

    Args:
        engine: runs the requests.
        wire: connection to the front end.
        verifications: receipts to replay between steps.
        controls: changes between steps.
    """

    def __init__(self, engine: Engine, wire: Wire, verifications: Verifications, controls: Controls) -> None:
        super().__init__(wire)
        self._engine = engine
        self._verifications = verifications
        self._controls = controls
        self._counts: tuple[Statistics, Sequence[StepRecord], list[Holding]] = (Statistics(), (), [])
        self._num_reported = 0  # steps
        self._counted = 0.0  # time of the last _count
        self._busy_seconds = 0.0

    def step(self) -> bool:
        """Run a unit of a receipt's replay, and a step of the engine.

        Raises:
            EngineError: the engine failed.
        """
        if self._controls.step():
            return True
        verifies = self._verifications.step()
        if not self._engine.has_unfinished_requests:
            if not verifies:
                self._count()
            return verifies
        start = time.monotonic()
        deltas = [delta_of(output) for output in self._engine.step()]
        self._busy_seconds += time.monotonic() - start
        if deltas:
            self.wire.send(Tokens(deltas))
        if time.monotonic() - self._counted > HEARTBEAT_SECONDS:
            self._count()
        return True

    def take(self, command: Any) -> None:
        """Handle a request, a receipt or a cancellation."""
        if isinstance(command, Add):
            self._add(command)
        elif isinstance(command, Verify):
            self._verifications.add(command)
        elif isinstance(command, Cancel):
            self._engine.cancel(command.request_id)
            self._verifications.cancel(command.request_id)
        elif isinstance(command, Control):
            self._controls.add(command)

    def _count(self) -> None:
        stats = self._engine.stats
        counts = {name: getattr(stats, name) for name in COUNTS}
        holdings = [Holding(name, num_blocks) for name, num_blocks in stats.num_held_blocks.items()]
        self._counts = Statistics(busy_seconds=self._busy_seconds, **counts), stats.recent, holdings
        self._counted = time.monotonic()

    def _add(self, command: Add) -> None:
        try:
            self._engine.add_request(
                {"prompt_token_ids": command.prompt, "cache_salt": command.cache_salt},
                SamplingParams(**command.params),
                request_id=command.request_id,
                priority=command.priority,
                resume=command.resume,
                output_kind="delta",
                adapter=command.adapter or None,
            )
        except InvalidInput as error:
            self.wire.send(Refused(command.request_id, str(error)))
        except EngineError:
            return  # reported by the stepping thread
        except Exception as error:  # fails this request only; the thread must keep reading
            message = f"request {command.request_id} cannot be added: {error!r}"
            self.wire.send(Tokens([Delta(command.request_id, [], True, None, message, 0, None)]))

    def heartbeat(self) -> Heartbeat:
        """Return the statistics, and the steps since the last heartbeat."""
        statistics, recent, holdings = self._counts  # consistent: the other thread replaces all three at once
        num_new = min(statistics.num_steps - self._num_reported, MOST_STEPS, len(recent))
        steps = [_step(recent, place) for place in range(len(recent) - num_new, len(recent))]
        self._num_reported = statistics.num_steps
        return Heartbeat(statistics, steps, holdings)


def delta_of(output: RequestOutput) -> Delta:
    """Return an engine's delta in the protocol's form."""
    known, metrics = output.prompt_logprobs, output.metrics
    first = None if metrics is None else metrics.first_scheduled
    return Delta(
        output.request_id,
        [_sample(sample) for sample in output.outputs],
        output.finished,
        None if known is None else [None if entry is None else Token(*plain_logprobs(entry)) for entry in known],
        None if output.error is None else str(output.error),
        output.num_cached_tokens,
        None if metrics is None or first is None else first - metrics.arrival,
        0 if metrics is None else metrics.num_preemptions,
        isinstance(output.error, InvalidInput),
    )


def hello_of(model: Compiled, config: EngineConfig, num_blocks: int, name: str, defaults: dict[str, Any]) -> Hello:
    """Return the facts about a model that the front end needs.

    Args:
        name: name or path it was loaded by.
        defaults: default sampling parameters by the names of SamplingParams.

    Raises:
        UnsupportedModel: the tokenizer needs Python code of its own.
    """
    parts, tokenizer = model.fingerprint_parts, model.tokenizer
    template = getattr(tokenizer, "chat_template", None)
    templates = template if isinstance(template, dict) else {"default": template}  # by transformers' names
    special = getattr(tokenizer, "special_tokens_map", None) or {}
    return Hello(
        name=name,
        fingerprint=fingerprint(parts),
        fingerprint_parts={key: str(part) for key, part in parts.items()},
        certificate=model.certificate.to_json(),
        max_context=model.max_context,
        vocab_size=model.vocab_size,
        num_blocks=num_blocks,
        block_size=config.block_size,
        token_budget=config.max_num_batched_tokens,
        default_params=defaults,
        dtype=str(model.dtype),
        tokenizer=None if tokenizer is None else plain_tokenizer(tokenizer),
        special_ids=[] if tokenizer is None else list(tokenizer.all_special_ids),
        special_tokens={key: str(token) for key, token in special.items() if isinstance(token, str)},
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        tokenizer_class=None if tokenizer is None else type(tokenizer).__name__,
        split_special_tokens=bool(getattr(tokenizer, "split_special_tokens", False)),
        pooling=_pooling_facts(model) if isinstance(model, (CompiledClassifier, CompiledEmbedder)) else None,
    )


def _pooling_facts(model: CompiledClassifier | CompiledEmbedder) -> PoolingFacts:
    config = model.config.get_text_config()
    classes = model.config.id2label if isinstance(model, CompiledClassifier) else {}
    return PoolingFacts(
        task="classify" if isinstance(model, CompiledClassifier) else "embed",
        num_columns=len(classes) or config.hidden_size,
        labels=[str(classes[index]) for index in sorted(classes)],
        each_alone=len(classes) == 1 or model.config.problem_type == "multi_label_classification",
        reads_token_types="token_type_ids" in getattr(model.tokenizer, "model_input_names", ()),
    )


def _sample(sample: CompletionOutput) -> SampleDelta:
    logprobs = None if sample.logprobs is None else [Token(*plain_logprobs(entry)) for entry in sample.logprobs]
    return SampleDelta(sample.index, sample.token_ids, logprobs, sample.finish_reason, sample.stop_reason)


def _step(records: Sequence[StepRecord], place: int) -> Step:
    record = records[place]
    start = record.launched - record.host_seconds
    if place:
        start = max(start, records[place - 1].finished)
    return Step(record.finished - start, record.num_prefill_tokens, record.num_decodes, record.num_waiting)


def _start(spec: EngineSpec, wire: Wire, compile: Compile) -> tuple[Hello, CommandLoop]:
    if spec.version != VERSION:
        versions = f"the front end has protocol version {spec.version}, this engine {VERSION}"
        raise InvalidInput(f"{versions}: install the same detcompile on both machines")
    config = EngineConfig(**spec.config, restarts=0)  # the fleet restarts engines; checked before compiling
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    loaded = ModelSpec(
        spec.model,
        spec.random,
        spec.dtype,
        spec.device,
        Numerics().tp_sizes if spec.tp_sizes is None else tuple(spec.tp_sizes),
        spec.revision,
        spec.token,
        spec.trust_remote_code,
        spec.task,
        spec.dequantize,
        spec.numerics or "float",
        spec.max_lora_rank,
    )
    model = compile(loaded, spec.tp, spec.pp)
    if isinstance(model, (CompiledClassifier, CompiledEmbedder)):
        if spec.max_lora_rank is not None:
            raise InvalidInput("adapters by name need a model that generates text: leave --max-lora-rank out")
        return hello_of(model, config, 0, spec.model, {}), PoolingServer(model, wire)
    if spec.weights is not None:
        new = read_weights(Path(spec.weights))
        require_whole(model, new)
        model.update_weights(new)
    speculation = None if spec.speculation == "off" else SpeculationConfig(switch=spec.speculation)
    engine = model.engine(config, speculation=speculation)
    adapters = {name: _load_adapter(engine, name, file) for name, file in spec.adapters.items()}
    defaults = configured_params(model) if spec.generation_config == "auto" else {}
    hello = hello_of(model, config, engine.stats.num_blocks, spec.model, defaults)
    hello = msgspec.structs.replace(hello, adapters=adapters)
    verifications = Verifications(model, hello.fingerprint_parts, wire.send)
    return hello, EngineServer(engine, wire, verifications, Controls(model, engine, verifications, wire.send))


def _load_adapter(engine: Engine, name: str, file: AdapterFile) -> str:
    """Load an adapter and return its sha256.

    Raises:
        InvalidInput: it cannot be loaded, or has changed.
    """
    digest = engine.load_adapter(file.loaded_as, file.path)
    if file.digest not in ("", digest):
        raise InvalidInput(f"adapter {name!r}: {file.path} has changed since it was loaded")
    return digest


def main() -> None:
    """Serve until the front end is gone; exit 1 if the model cannot be served or the engine failed."""
    serve(front_of(sys.argv[1:], engine_secret()))


def serve(front: socket.socket, compile: Compile = ModelSpec.compile_any, end_code: int = 0) -> None:
    """Serve a front end until it is gone; exit 1 if the model cannot be served or the engine failed.

    Args:
        compile: compiles a model, given its spec, tp and pp.
        end_code: exit code when the front end is gone.
    """
    wire = Wire(front, end_code)
    threading.Thread(target=cpu_facts, daemon=True).start()  # while a spare process waits
    spec = wire.receive()
    if not isinstance(spec, EngineSpec):
        sys.exit(end_code)
    if spec.visible_devices is not None:
        show_gpus(spec.visible_devices)
    try:
        hello, loop = _start(spec, wire, compile)
        wire.send(hello)
        loop.serve()
    except DetcompileError as error:
        wire.send(Broken(type(error).__name__, str(error)))
        sys.exit(1)
    except Exception as error:
        wire.send(Broken(type(error).__name__, f"{type(error).__name__}: {error}"))
        raise


if __name__ == "__main__":
    main()
