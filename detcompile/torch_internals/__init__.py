"""Everything of torch that is not public and that this package relies on, by subject.

No other module names a private module or attribute of torch (tests/test_source_habits.py). A module's ``NAMES`` gives
the purpose of each name of torch that is used as it is, and what breaks without it. Functions say the same in their
docstrings. The site's page of internals combines both.
"""

READ_IN = "2.11.0, 2.13.0, 2.14.1, 2.15.0"  # the releases of torch in which all of this was read
