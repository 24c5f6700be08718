"""A request that raises ends alone with its error; the others keep their bytes, and the engine continues."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from detcompile.errors import EngineError, InvalidInput
from detcompile.runtime import step_work
from detcompile.runtime.engine import Engine
from detcompile.runtime.policies import NextStep
from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.runtime.requests.queues import Queues
from detcompile.runtime.requests.request import Request
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling import plan as sampling_plan
from detcompile.runtime.step import worker
from tests.model_cases import VOCAB_SIZE
from tests.runtime.engine_cases import OVERLAP, config_of, engine_of, prompt_of, tiny_model

VICTIM = 424242  # its seed
NUM_TOP = 7  # its prompt_logprobs, which no neighbor has
ASKS_MUCH = {
    "max_tokens": 8,
    "logprobs": 2,
    "repetition_penalty": 1.2,
    "logit_bias": {3: 1.0},
    "min_tokens": 2,
    "top_p": 0.9,
    "stop": ("eeeee",),
    "stop_token_ids": (159,),
}
NEIGHBORS = [
    SamplingParams(max_tokens=10, temperature=0.0, prompt_logprobs=1, logprobs=3),
    SamplingParams(seed=7, n=2, **ASKS_MUCH),
]


def seed_of(value: Any) -> int | None:
    """Of the request that a call is about, if it is about one."""
    for name in ("params", "sampling", "_params"):
        value = getattr(value, name, value)
    return value.seed if isinstance(value, SamplingParams) else None


def is_victims(arguments: tuple[Any, ...]) -> bool:
    return any(
        seed_of(getattr(value, "sequence", value)) == VICTIM or getattr(value, "num_top", None) == NUM_TOP
        for value in arguments
    )


class Fault:
    """Raises at the victim's calls from the ``after``-th on, once armed."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.armed = self.raised = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.armed and is_victims(arguments):
                self.left -= 1
                if self.left < 0:
                    self.raised = True
                    raise LookupError("planted")
            return function(*arguments, **options)

        return call


def methods_of(kind: type) -> list[tuple[Any, str]]:
    """Every method and property, those to come included."""
    actual = [name for name, value in vars(kind).items() if inspect.isfunction(value) or isinstance(value, property)]
    return [(kind, name) for name in actual if not name.startswith("__") and name != "fail"]  # fail() is the way out


POINTS: list[tuple[Any, str]] = [
    *methods_of(Request),
    *methods_of(Sequence),
    *methods_of(Detokenizer),
    (sampling_plan, "_bias"),
    (sampling_plan, "_needs"),
    (worker, "_cut"),
    (worker.Worker, "_prompt_logprobs"),
    (NextStep, "chunk"),
    (Queues, "urgency"),
    (step_work, "SampleRow"),
]


@contextlib.contextmanager
def planted(place: Any, name: str, fault: Fault) -> Iterator[None]:
    actual = vars(place)[name]
    broken = property(fault.around(actual.fget)) if isinstance(actual, property) else fault.around(actual)
    with mock.patch.object(place, name, broken):
        yield


def serve(engine: Engine, victim: SamplingParams | None, fault: Fault | None = None) -> dict[str, Any]:
    """The finished outputs; the victim comes in the middle."""
    engine.add_request(prompt_of(40, 1), NEIGHBORS[0], request_id="first")
    if victim is not None:
        engine.add_request(prompt_of(50, 2), victim, request_id="victim", stream_text=True)
    engine.add_request(prompt_of(30, 3), NEIGHBORS[1], request_id="second")
    if fault is not None:
        fault.armed = True
    outputs = {}
    for _ in range(100):
        if not engine.has_unfinished_requests:
            break
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check()
    assert not engine.has_unfinished_requests and engine.stats.num_free_blocks == engine.stats.num_blocks
    return outputs


@OVERLAP
@pytest.mark.parametrize("after", [0, 4])
def test_a_request_that_raises_at_any_call_ends_alone(after, overlap, device):
    model = tiny_model(device)
    victim = SamplingParams(seed=VICTIM, n=2, prompt_logprobs=NUM_TOP, **ASKS_MUCH)
    config = config_of(overlap=overlap, max_num_batched_tokens=48)
    expected = serve(engine_of(model, config), None)
    num_raised = 0
    for place, name in POINTS:
        where, fault = f"{getattr(place, '__name__', place)}.{name}", Fault(after)
        engine = engine_of(model, config)
        with planted(place, name, fault):
            outputs = serve(engine, victim, fault)
        assert not engine.failed, where
        for neighbor in ("first", "second"):
            assert outputs[neighbor].outputs == expected[neighbor].outputs, where
            assert outputs[neighbor].prompt_logprobs == expected[neighbor].prompt_logprobs, where
        if fault.raised:
            num_raised += 1
            assert isinstance(outputs["victim"].error, EngineError), where
            assert "victim" in str(outputs["victim"].error) and "planted" in str(outputs["victim"].error), where
            assert any(sample.finish_reason == "error" for sample in outputs["victim"].outputs), where
        again = serve(engine, None)
        assert again["second"].outputs == expected["second"].outputs, where
    assert num_raised >= 20, "the sweep reaches the calls that it names"


def test_a_cancelled_request_that_raises_is_gone_too(device):
    engine = engine_of(tiny_model(device), config_of())
    engine.add_request(prompt_of(9), SamplingParams(seed=VICTIM, max_tokens=50), request_id="mine")
    engine.step()
    engine.cancel("mine")
    with mock.patch.object(Request, "end", side_effect=LookupError("planted")):
        [output] = engine.step()
    assert isinstance(output.error, EngineError) and output.finished
    assert engine.add_request(prompt_of(9), SamplingParams(max_tokens=1), request_id="mine") == "mine"  # free again
    for _ in range(3):  # a GPU's results arrive a step later
        engine.step()
    assert not engine.has_unfinished_requests and engine.stats.num_free_blocks == engine.stats.num_blocks


def test_ids_that_the_model_cannot_draw_end_nothing_and_are_named(device, caplog):
    model = tiny_model(device)
    params = SamplingParams(max_tokens=6, min_tokens=3, seed=1)
    [expected] = engine_of(model, config_of()).generate(prompt_of(9), params, progress=False)
    engine = engine_of(model, config_of(), eos_token_ids=(VOCAB_SIZE, 99999, -1))
    assert "[160, 99999, -1]" in caplog.text
    [output] = engine.generate(prompt_of(9), params, progress=False)
    assert output.outputs == expected.outputs
    with pytest.raises(InvalidInput, match="stop_token_ids holds token"):
        engine.add_request([1], SamplingParams(stop_token_ids=[99999]))


@pytest.mark.parametrize(
    "given",
    [{"priority": None}, {"priority": 1.0}, {"priority": True}, {"request_id": 7}, {"stream_text": 1}],
    ids=str,
)
def test_request_arguments_are_checked_by_name(given, device):
    engine = engine_of(tiny_model(device), config_of())
    with pytest.raises(InvalidInput, match=next(iter(given))):
        engine.add_request([1], **given)
    with pytest.raises(InvalidInput, match="params 5 is an int: give SamplingParams"):
        engine.add_request([1], 5)
    assert not engine.has_unfinished_requests


def test_nobody_changes_the_parameters_of_a_request_that_runs(device):
    model = tiny_model(device)
    bias = {3: 1.0}
    params = SamplingParams(max_tokens=8, seed=1, logit_bias=bias)
    expected = engine_of(model, config_of()).generate(prompt_of(9), params, progress=False)[0].outputs
    engine = engine_of(model, config_of())
    engine.add_request(prompt_of(9), params)
    params.logit_bias[99999] = "no number"
    finished = []
    while engine.has_unfinished_requests:
        finished += [output for output in engine.step() if output.finished]
    assert finished[0].outputs == expected
