"""The task: finish a line of Python. A parser computes the reward without running code."""

import ast

__all__ = ["PROMPTS", "reward"]

PROMPTS = [
    f"def {name}({first}, {second}):\n    return"
    for name, first, second in (
        ("add", "first", "second"),
        ("mean", "values", "count"),
        ("join", "path", "name"),
        ("area", "width", "height"),
        ("ratio", "part", "whole"),
        ("label", "name", "value"),
        ("scale", "vector", "factor"),
        ("clamp", "value", "limit"),
    )
]


def reward(prompt: str, completion: str) -> float:
    """Return the share of the parameters that the returned expression reads; 0 if it is cut off or not Python."""
    line, ended, _ = completion.partition("\n")
    try:
        (function,) = ast.parse(prompt + line).body
    except (SyntaxError, ValueError):
        return 0.0
    if not ended or not isinstance(function, ast.FunctionDef):
        return 0.0
    parameters = [parameter.arg for parameter in function.args.args]
    read = {node.id for node in ast.walk(function.body[0]) if isinstance(node, ast.Name)}
    return sum(name in read for name in parameters) / len(parameters)
