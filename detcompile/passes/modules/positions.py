"""Learned positions: which tables of a model hold them, and that they are read at the step's own positions.

Models number the rows of such a table in three ways: by the ``position_ids`` they are given; by these and an offset
that they leave out if they are given any (roberta starts at padding_idx + 1); or by the columns of the batch (bart).
The model runs on two equal tokens to see which. Afterwards position 0 is the row that it reads for a first token.
"""

import inspect
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel

__all__ = ["PositionTable", "give_positions", "position_tables"]


class PositionTable(NamedTuple):
    """A table of learned positions.

    Attributes:
        name: the module's name. rows: rows of the table. first: the row of a sequence's first token.
        given: the row that is read for a token of position 0; None where the model counts the columns instead.
    """

    name: str
    rows: int
    first: int
    given: int | None


class GivenPositions(nn.Module):
    """Rows of a table of positions [rows, D] at the position_ids [1, T] that ``_hand_over`` leaves here."""

    def __init__(self, weight: nn.Parameter, first: int) -> None:
        super().__init__()
        self.weight = weight
        self.first = first
        self.position_ids: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self.position_ids is not None, "the model ran without position_ids"
        return nn.functional.embedding(self.position_ids + self.first, self.weight)


def position_tables(model: PreTrainedModel) -> tuple[PositionTable, ...]:
    """The tables of positions that ``model`` reads; none if its token embedding is its only table.

    Raises:
        UnsupportedModel: two tokens do not read two rows in a row.
    """
    of_tokens = getattr(model.get_input_embeddings(), "weight", None)  # what is no table is refused later
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
    """Make ``model`` read its tables of positions at its ``position_ids``, which count from 0.

    Raises:
        UnsupportedModel: its tables start at different rows, or are not read as they are.
    """
    tables = position_tables(model)
    offsets = {table.first - table.given for table in tables if table.given is not None}
    if len(offsets) > 1:
        raise UnsupportedModel(f"{type(model).__name__} counts positions from several starts: {sorted(offsets)}")
    counting = [_replace_table(model, table) for table in tables if table.given is None]
    shift = next(iter(offsets), 0)
    if shift or counting:
        model.register_forward_pre_hook(partial(_hand_over, shift, counting), with_kwargs=True)
        model.register_forward_hook(partial(_take_back, counting))
    if _has_token_types(model):
        model.register_forward_pre_hook(_give_token_types, with_kwargs=True)


def _hand_over(
    shift: int, counting: list[str], model: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Leave the positions in the tables of ``model``, by name: a copy of the model is called with this hook too."""
    positions = kwargs.get("position_ids")
    if positions is None:
        return args, kwargs
    for name in counting:
        table: Any = model.get_submodule(name)
        table.position_ids = positions
    if counting:
        return args, {name: given for name, given in kwargs.items() if name != "position_ids"}
    return args, {**kwargs, "position_ids": positions + shift}


def _take_back(counting: list[str], model: nn.Module, *_: Any) -> None:
    """A call leaves nothing behind."""
    for name in counting:
        table: Any = model.get_submodule(name)
        table.position_ids = None


def _has_token_types(model: PreTrainedModel) -> bool:
    """Whether the model takes types of tokens, and takes them as zeros, by its positions, where it is given none."""
    buffers = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "token_type_ids"]
    takes = "token_type_ids" in inspect.signature(model.forward).parameters
    return takes and bool(buffers) and not any(bool(buffer.any()) for buffer in buffers)


def _give_token_types(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = kwargs.get("token_type_ids")
    return args, {**kwargs, "token_type_ids": torch.zeros_like(kwargs["input_ids"]) if given is None else given}


def _replace_table(model: PreTrainedModel, table: PositionTable) -> str:
    """Put GivenPositions in the place of a table, whose name is returned."""
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
    """Rows that the first and the second of two equal tokens read, by the table's weight; {} if the model fails."""
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
        except Exception as error:  # models raise what they like at position_ids that they do not take
            if positions is None:
                raise UnsupportedModel(f"{type(model).__name__} does not run on two tokens: {error}") from error
            return {}
    return read


def _ordinary_token(model: PreTrainedModel) -> int:
    """An id that is not the padding, which some models give no position."""
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    return 1 if padding == 0 else 0
