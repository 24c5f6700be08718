"""Programs that copy a cache shared by KV groups are rejected; plain graphs do not copy it."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch._functorch.aot_autograd import make_boxed_func

import detcompile
from detcompile.commands.axes import Configuration, score
from detcompile.errors import UnsupportedModel
from detcompile.passes import program_source
from detcompile.passes.programs.binding import example_step, require_cache_writes
from detcompile.step import KVGroup
from tests.bits import assert_bitwise_equal
from tests.model_cases import certified, random_model

NAMED = r"after a step, k_caches\[0\], v_caches\[0\] lack the step's tokens\. Layers of 2 KV groups share these caches"


def two_groups():
    """A layer with a window and one without."""
    return random_model("gemma2", torch.float32)


def test_a_graph_that_copies_its_caches_is_refused() -> None:
    """As Inductor compiles it where it finds no way to write in place: the functional graph, as it is."""
    copying = mock.patch.object(program_source, "compile_fx_inner", lambda gm, *_, **__: make_boxed_func(gm.forward))
    with copying, pytest.raises(UnsupportedModel, match=NAMED):
        detcompile.compile(two_groups())


def test_a_plain_graph_keeps_its_caches_from_step_to_step() -> None:
    model = certified(two_groups(), max_context=512)
    target = tuple(torch.randint(0, 160, (90,), generator=torch.Generator().manual_seed(3)).tolist())
    alone = score(model, Configuration((target,)))
    assert_bitwise_equal(score(model, Configuration((target,), steps=(((0, 41),), ((0, 49),)))), alone)


@pytest.mark.parametrize(("cache", "layer"), [("k", 0), ("k", 3), ("v", 2)])
def test_the_cache_of_one_layer_is_missed_and_named(cache: str, layer: int) -> None:
    """Of two groups of two layers, in a step that leaves out one write, or all but the last row."""
    groups = (KVGroup((0, 2), 8), KVGroup((1, 3), 0))

    def forward(input_ids, position_ids, step, logits_to_keep, rows: int = 0) -> None:
        for group, slots in zip(groups, step.slot_mappings):
            for index in group.layers:
                for name, caches in (("k", step.k_caches), ("v", step.v_caches)):
                    kept = slots[:rows] if (name, index) == (cache, layer) else slots
                    caches[index].flatten(0, 1)[kept] = torch.nan

    example = example_step([(2, 4, 6)] * 4, len(groups), (), torch.float16, torch.device("cpu"))
    require_cache_writes(partial(forward, rows=2), groups, example)
    for rows in (0, 1):
        with pytest.raises(UnsupportedModel, match=rf"a step, {cache}_caches\[{layer}\] lack"):
            require_cache_writes(partial(forward, rows=rows), groups, example)
    require_cache_writes(lambda *_: None, (KVGroup((0, 1, 2, 3), 0),), example)  # nobody shares
