"""Everything of transformers that is not public and that this package relies on, by subject.

Like detcompile.torch_internals for torch. Public are the names of ``transformers`` itself and of the modules that its
documentation names (tests/test_source_habits.py lists them).
"""

READ_IN = "5.17.0, 5.24.0"  # the releases of transformers in which all of this was read
