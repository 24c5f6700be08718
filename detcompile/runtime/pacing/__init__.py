"""How long steps take, as measured, and how much of a prompt fits a step that others wait for."""
