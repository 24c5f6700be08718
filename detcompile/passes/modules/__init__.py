"""A model's modules become ours before the trace: attention, experts, recurrences, quantized linears."""
