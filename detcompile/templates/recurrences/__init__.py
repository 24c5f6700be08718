"""Layers that carry a state: convolutions, scans, linear attention, RWKV, xLSTM."""
