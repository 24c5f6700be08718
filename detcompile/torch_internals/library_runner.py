"""torch's loader and runner of AOTInductor libraries."""

from typing import Any

import torch
from torch._export.serde.schema import ScalarType
from torch.torch_version import TorchVersion

DTYPE_NUMBERS = {ScalarType.HALF: 5, ScalarType.FLOAT: 6, ScalarType.DOUBLE: 7, ScalarType.BFLOAT16: 15}


def library_runner(library: str, folder: str, on_gpu: bool) -> Any:
    """Return a runner of a library in its folder, which takes a list of tensors.

    Without it: no archive runs.
    """
    runners: Any = torch._C._aoti
    if on_gpu:
        # True: no run tracking in the runtime, whose CUDA events cannot be queried after a graph capture.
        return runners.AOTIModelContainerRunnerCuda(library, 1, "cuda", folder, True)
    return runners.AOTIModelContainerRunnerCpu(library, 1)


def converts_dtypes() -> bool:
    """Return whether this torch converts the dtype numbers of a library's list of operations.

    They are torch.export's. torch before 2.12 reads them as its own (https://github.com/pytorch/pytorch/pull/173562).
    Without it: an operation then returns another dtype.
    """
    return TorchVersion(torch.__version__) >= "2.12"


def dtype_number(exported: int) -> int:
    """Return torch's number of a dtype from torch.export's.

    Without it: see ``converts_dtypes``.
    """
    return DTYPE_NUMBERS[ScalarType(exported)]
