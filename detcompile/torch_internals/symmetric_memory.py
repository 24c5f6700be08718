"""GPU memory that other GPUs of a group map."""

from torch.distributed._symmetric_memory import empty, rendezvous

NAMES = {
    "empty": "Allocate memory that other GPUs may map. Without it: see ``rendezvous``.",
    "rendezvous": "Map that memory on every GPU of a group; all ranks call it. Without it: every sum over ranks goes "
    "through NCCL.",
}
