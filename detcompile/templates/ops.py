"""`ours` is torch.ops.detcompile, with every operation registered."""
# ruff: noqa: F401 (importing a family registers its operations)

import torch

import detcompile.templates.attention.op
import detcompile.templates.attention.rope_cache
import detcompile.templates.collectives.gather
import detcompile.templates.collectives.op
import detcompile.templates.exact.attention
import detcompile.templates.exact.linear
import detcompile.templates.exact.ranks
import detcompile.templates.exact.rows
import detcompile.templates.exact.softmax
import detcompile.templates.experts.op
import detcompile.templates.matmul.gate
import detcompile.templates.matmul.op
import detcompile.templates.quantized.experts
import detcompile.templates.quantized.op
import detcompile.templates.recurrences.causal_conv
import detcompile.templates.recurrences.linear
import detcompile.templates.recurrences.running_max
import detcompile.templates.recurrences.wkv
import detcompile.templates.rows.norms
import detcompile.templates.rows.softmax
import detcompile.templates.rows.sums
import detcompile.templates.tokens.embedding
import detcompile.templates.training.attention
import detcompile.templates.training.logprobs
import detcompile.templates.training.row_gradients
import detcompile.templates.training.token_sums

ours = torch.ops.detcompile
