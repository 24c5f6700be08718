"""Gradients of the templates: exact sums over tokens; over features and within a sequence the forward's orders."""
