"""Layers with a recurrent state: convolutions, scans, linear attention, RWKV, xLSTM."""
