"""Importing this module registers every operation of torch.ops.detcompile."""

from detcompile.templates.attention import op as attention
from detcompile.templates.attention import rope_cache as rope
from detcompile.templates.collectives import gather
from detcompile.templates.collectives import op as collectives
from detcompile.templates.experts import op as experts
from detcompile.templates.matmul import batched as batched_matmul
from detcompile.templates.matmul import gate as gates
from detcompile.templates.matmul import op as matmul
from detcompile.templates.quantized import op as dequant_matmul
from detcompile.templates.recurrences import causal_conv, running_max, wkv
from detcompile.templates.recurrences import linear as linear_recurrence
from detcompile.templates.rows import norms, softmax
from detcompile.templates.rows import sums as rows
from detcompile.templates.tokens import embedding

__all__ = ["FAMILIES"]

FAMILIES = (
    attention,
    batched_matmul,
    causal_conv,
    collectives,
    dequant_matmul,
    embedding,
    experts,
    gather,
    gates,
    linear_recurrence,
    matmul,
    norms,
    rope,
    rows,
    running_max,
    softmax,
    wkv,
)
