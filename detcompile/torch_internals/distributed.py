"""Process groups, and FSDP's groups of parameters."""

from typing import Any

from torch.distributed import ProcessGroup, distributed_c10d

_resolve: Any = distributed_c10d._resolve_process_group  # torch 2.13 has a separate type for names


def process_group(name: str) -> ProcessGroup:
    """Return the group of this name, which this process is in.

    Without it: a graph's operation, which holds the name of a group, cannot communicate.
    """
    return _resolve(name)


def device_types(group: ProcessGroup) -> set[str]:
    """Return the types of devices whose memory a group communicates.

    Without it: a rank of a group on GPUs does not know that its share belongs on its GPU.
    """
    return {device.type for device in group._device_types}


def fsdp_groups(module: Any) -> list[Any]:
    """Return FSDP's groups of a module's parameters: several since torch 2.12, one or none before.

    Without it: gradients of sharded parameters are summed by FSDP, in an unspecified order.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
