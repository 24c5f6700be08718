"""Every exception detcompile raises for its users.

DetcompileError
├── ArchiveError          an exported file is damaged, or was made for another machine or version
├── CompilerNotFound      no working C++ compiler for the CPU templates
├── EngineError           a request, or a whole engine, failed while it ran
│   ├── GenerationError   a request's own parameters leave it no token to draw (also an InvalidInput)
│   └── WorkerError       a worker process died, hung or raised
├── InvalidInput          a call's arguments cannot be served (also a ValueError)
│   ├── NumericsError     a Numerics that no order can satisfy
│   └── UnservedAttribute an attribute of Hugging Face's models that a compiled one lacks (also an AttributeError)
├── ScheduleError         no schedule of a template may run on this device
├── StorageError          a folder or file cannot be written, is full, or may belong to another user
├── TrainerMismatch       a trainer's log-probabilities are not those of an engine
├── UnsupportedModel      the model cannot be captured with its meaning intact
├── UnsupportedRelease    the installed torch, transformers or triton is too old, or too new and fails a probe
└── UncertifiedOp         the certificate refuses the compiled graph

Each message says what went wrong, where, and what to do about it.
"""


class DetcompileError(Exception):
    """Base class of every exception of this package."""


class ArchiveError(DetcompileError):
    """An exported file is damaged, or was made for another machine, torch or detcompile."""


class CompilerNotFound(DetcompileError):
    """The CPU templates are compiled on first use and no working C++ compiler was found."""


class EngineError(DetcompileError):
    """A request, or a whole engine, failed while it ran."""


class InvalidInput(DetcompileError, ValueError):
    """The arguments of a call cannot be served."""


class GenerationError(EngineError, InvalidInput):
    """A request's own parameters leave it no token to sample, or its grammar grows too large during the answer.

    Other requests continue. ``add_request`` cannot reject such a request: the failure shows only while it runs.
    """


class NumericsError(InvalidInput):
    """The declared Numerics contradict themselves or do not fit the model."""


class ScheduleError(DetcompileError):
    """No schedule of a template reproduces the template's order on this device."""


class StorageError(DetcompileError):
    """A folder or file cannot be written, is full, or may hold files that another user put there."""


class TrainerMismatch(DetcompileError):
    """A trainer's log-probabilities are not byte for byte those of the engine it trains for.

    Attributes:
        weights: names of the weights that differ; empty if the program or the machine differs.
    """

    def __init__(self, message: str, weights: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.weights = weights


class UnservedAttribute(InvalidInput, AttributeError):
    """A compiled model lacks this attribute of Hugging Face's models. ``hasattr`` is False."""


class UnsupportedModel(DetcompileError):
    """The model cannot be captured without changing what it means."""


class UnsupportedRelease(DetcompileError):
    """The installed torch, transformers or triton is not tested and fails a probe, or is too old."""


class UncertifiedOp(DetcompileError):
    """The compiled graph holds an operation whose bits could depend on the batch.

    Attributes:
        offenders: one line per refused operation: its name, its place in the model's source, and the reason.
    """

    def __init__(self, message: str, offenders: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.offenders = offenders


class WorkerError(EngineError):
    """A worker process died, hung or raised, and all workers of its group were ended.

    Attributes:
        rank: rank of the failed worker; None if no worker is at fault, for example after ``close``.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
