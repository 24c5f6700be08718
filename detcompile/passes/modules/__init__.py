"""A model's modules become ours before the trace: attention, experts, recurrences, quantised linears."""
