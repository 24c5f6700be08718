"""The first program uses what was compiled before it."""

import threading
from unittest import mock

import pytest
import torch
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile

from detcompile.passes.programs import lanes
from detcompile.torch_internals.kept_code import restore_code


@pytest.fixture
def untried() -> None:
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


@pytest.mark.parametrize("capability", [None, "avx2", "default"])
def test_the_vectors_are_those_that_inductor_finds(
    untried: None, capability: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if capability is not None:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    actual = str(lanes.vector_isa()), cpu_vec_isa.valid_vec_isa_list()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    assert actual == (str(cpu_vec_isa.pick_vec_isa()), cpu_vec_isa.valid_vec_isa_list())


def test_vectors_that_do_not_work_are_passed_over(untried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    possible = cpu_vec_isa.valid_vec_isa_list()
    if len(possible) < 2:
        pytest.skip("this machine has one kind of vectors or none")
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    monkeypatch.setattr(type(possible[0]), "__bool__", lambda isa: False)
    assert lanes.vector_isa() is possible[1]
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def test_kernels_take_the_header_that_was_precompiled() -> None:
    lanes.prepare_compiler.cache_clear()
    lanes.prepare_compiler()
    for thread in threading.enumerate():
        if thread.name == lanes.THREAD:
            thread.join()
    made = codecache._precompile_header.cache_info()
    assert made.currsize
    with torch._inductor.utils.fresh_cache():
        torch.compile(lambda x: x * 3.25 + 7, fullgraph=True)(torch.ones(300))
    after = codecache._precompile_header.cache_info()
    assert (after.hits > made.hits, after.misses) == (True, made.misses)


def test_kept_code_is_loaded_without_a_pool_of_compilers() -> None:
    graph = mock.Mock(inputs_to_check=[], mutated_input_idxs=[])
    graph.after_deserialization.side_effect = lambda _: AsyncCompile.use_process_pool()
    with inductor_config.patch(compile_threads=4), mock.patch.object(AsyncCompile, "process_pool") as pool:
        restore_code(graph)
        pool.assert_not_called()
    graph.after_deserialization.assert_called_once()
