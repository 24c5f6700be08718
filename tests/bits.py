"""assert_bitwise_equal: two tensors hold the same bytes."""

import torch
from torch import Tensor

__all__ = ["assert_bitwise_equal"]


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str = "tensors") -> None:
    """Fail unless dtype, shape and every byte agree; strides and device may differ.

    Bytes tell -0.0 from +0.0 and one NaN from another. The message counts the elements that differ and shows the
    first of them as numbers and as bytes.
    """
    __tracebackhide__ = True
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}"
    actual_bytes, expected_bytes = _element_bytes(actual), _element_bytes(expected)
    differing = (actual_bytes != expected_bytes).any(dim=1).nonzero().flatten()
    if len(differing) == 0:
        return
    first = int(differing[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), actual.shape))
    raise AssertionError(
        f"{what}: {len(differing)} of {actual.numel()} elements differ ({actual.dtype}, {tuple(actual.shape)}); "
        f"first at {index}: {actual[index].item()!r} ({_hex(actual_bytes[first])}) is not "
        f"{expected[index].item()!r} ({_hex(expected_bytes[first])})"
    )


def _element_bytes(tensor: Tensor) -> Tensor:
    """[elements, bytes of one element] uint8, on the CPU."""
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)  # one element has any stride
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _hex(little_endian: Tensor) -> str:
    return "0x" + bytes(little_endian.tolist())[::-1].hex()
