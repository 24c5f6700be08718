"""torch functions that exist only in C++."""

from typing import Any

import torch

NAMES = {
    "encoder_layer_forward": "Called by nn.TransformerEncoderLayer in eval mode. Without it: its attention "
    "is computed by a kernel with an unspecified order.",
    "pad": "Called by F.pad. Without it: circular padding is computed by an operation without a rule.",
}

encoder_layer_forward: Any = torch._transformer_encoder_layer_fwd
pad: Any = torch._C._nn.pad


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype that torch.nn.Module.to would take from these arguments, None if not given.

    Without it: a compiled model understands fewer ways to call ``to``, with other errors.

    Raises:
        TypeError, RuntimeError, ValueError: torch.nn.Module.to does not take them.
    """
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def storage_at(address: int, device: torch.device, num_bytes: int) -> Any:
    """Return a storage over memory that it does not own.

    Without it: graphs that are captured later cannot reuse the memory of a CUDA graph's outputs.
    """
    return torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
