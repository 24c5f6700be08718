"""Gradients of the templates: over tokens exact sums, over features and within a sequence the orders of the forward."""
