"""Learned positions: find a model's position tables and make it read them at the step's positions.

Models choose rows of such a table in three ways: by ``position_ids``; by ``position_ids`` plus an offset that is only
added to default positions (roberta starts at padding_idx + 1); or by the columns of the batch (bart). A run on two
equal tokens shows which. Afterwards position 0 is the row that the model reads for a first token.
"""

import inspect
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel


class PositionTable(NamedTuple):
    """A table of learned positions.

    Attributes:
        name: the module's name. rows: rows of the table. first: the row of a sequence's first token.
        given: the row that is read for position 0; None if the model counts columns instead.
    """

    name: str
    rows: int
    first: int
    given: int | None


class GivenPositions(nn.Module):
    """Rows of a position table [rows, D] at the position_ids [1, T] that ``_set_positions`` stores here."""

    def __init__(self, weight: nn.Parameter, first: int) -> None:
        super().__init__()
        self.weight = weight
        self.first = first
        self.position_ids: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self.position_ids is not None, "the model ran without position_ids"
        return nn.functional.embedding(self.position_ids + self.first, self.weight)


def position_tables(model: PreTrainedModel) -> tuple[PositionTable, ...]:
    """Return the position tables that ``model`` reads; none if its token embedding is its only table.

    Raises:
        UnsupportedModel: two tokens do not read two consecutive rows.
    """
    of_tokens = getattr(model.get_input_embeddings(), "weight", None)  # other embeddings are refused later
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    names = {module.weight: name for name, module in embeddings.items() if module.weight is not of_tokens}
    if not names:
        return ()
    counted, zeros, ones = (_rows_read(model, positions) for positions in (None, (0, 1), (1, 2)))
    tables = []
    for weight, name in names.items():
        rows = counted.get(weight)
        if rows is None or rows[0] == rows[1]:
            continue
        if rows[1] != rows[0] + 1:
            raise UnsupportedModel(f"{name}: two tokens of a row read rows {rows[0]} and {rows[1]} of this table")
        given = zeros.get(weight)
        follows = given is not None and ones.get(weight) == (given[0] + 1, given[1] + 1)
        tables.append(PositionTable(name, weight.shape[0], rows[0], given[0] if given and follows else None))
    return tuple(tables)


def give_positions(model: PreTrainedModel) -> None:
    """Make ``model`` read its position tables at its ``position_ids``, which count from 0.

    Raises:
        UnsupportedModel: its tables start at different rows, or it changes rows after reading them.
    """
    tables = position_tables(model)
    offsets = {table.first - table.given for table in tables if table.given is not None}
    if len(offsets) > 1:
        raise UnsupportedModel(f"{type(model).__name__} counts positions from several starts: {sorted(offsets)}")
    counting = [_replace_table(model, table) for table in tables if table.given is None]
    shift = next(iter(offsets), 0)
    if shift or counting:
        model.register_forward_pre_hook(partial(_set_positions, shift, counting), with_kwargs=True)
        model.register_forward_hook(partial(_drop_positions, counting))
    if _has_token_types(model):
        model.register_forward_pre_hook(_give_token_types, with_kwargs=True)


def _set_positions(
    shift: int, counting: list[str], model: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Store the positions in the tables of ``model``, by name: a copy of the model has this hook too."""
    positions = kwargs.get("position_ids")
    if positions is None:
        return args, kwargs
    for name in counting:
        table: Any = model.get_submodule(name)
        table.position_ids = positions
    if counting:
        return args, {name: given for name, given in kwargs.items() if name != "position_ids"}
    return args, {**kwargs, "position_ids": positions + shift}


def _drop_positions(counting: list[str], model: nn.Module, *_: Any) -> None:
    """Drop the positions after a call."""
    for name in counting:
        table: Any = model.get_submodule(name)
        table.position_ids = None


def _has_token_types(model: PreTrainedModel) -> bool:
    """Return whether the model defaults token_type_ids to a zero buffer that it indexes by position."""
    buffers = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "token_type_ids"]
    takes = "token_type_ids" in inspect.signature(model.forward).parameters
    return takes and bool(buffers) and not any(bool(buffer.any()) for buffer in buffers)


def _give_token_types(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = kwargs.get("token_type_ids")
    return args, {**kwargs, "token_type_ids": torch.zeros_like(kwargs["input_ids"]) if given is None else given}


def _replace_table(model: PreTrainedModel, table: PositionTable) -> str:
    """Replace a table by GivenPositions and return its name."""
    parent, _, leaf = table.name.rpartition(".")
    module = model.get_submodule(table.name)
    outputs: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, args, output: outputs.append(output))
    _rows_read(model, None)
    handle.remove()
    expected = module.weight[table.first : table.first + 2]
    rows = [output.reshape(-1, expected.shape[1]) for output in outputs if isinstance(output, Tensor)]
    if len(outputs) != 1 or len(rows) != 1 or not torch.equal(rows[0], expected):
        raise UnsupportedModel(f"{table.name}: positions of {type(module).__name__} are not rows of its table")
    setattr(model.get_submodule(parent), leaf, GivenPositions(module.weight, table.first))
    return table.name


def _rows_read(model: PreTrainedModel, positions: tuple[int, int] | None) -> dict[Tensor, tuple[int, int]]:
    """Return the rows that two equal tokens read, by the table's weight; {} if the model fails."""
    read: dict[Tensor, tuple[int, int]] = {}
    lookup = nn.functional.embedding

    def record(ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if ids.numel() and ids.shape[-1] == 2:
            first, second = ids.reshape(-1, 2)[0].tolist()
            read[weight] = (first, second)
        return lookup(ids, weight, *args, **kwargs)

    device = next(model.parameters()).device
    kwargs = {} if positions is None else {"position_ids": torch.tensor([positions], device=device)}
    ids = torch.full((1, 2), _ordinary_token(model), dtype=torch.int64, device=device)
    with mock.patch.object(nn.functional, "embedding", record), torch.no_grad():
        try:
            model(input_ids=ids, use_cache=False, **kwargs)
        except Exception as error:  # models may raise anything for position_ids that they do not take
            if positions is None:
                raise UnsupportedModel(f"{type(model).__name__} does not run on two tokens: {error}") from error
            return {}
    return read


def _ordinary_token(model: PreTrainedModel) -> int:
    """Return an id that is not the padding: some models give padding no position."""
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    return 1 if padding == 0 else 0
