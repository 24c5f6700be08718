"""Everything of torch that is not public and that this package relies on, by subject.

No other module names a private module or attribute of torch (tests/test_source_habits.py). A module's ``NAMES`` says
what unchanged names of torch are for and what breaks without them; functions say it in their docstrings. The site's
page of internals is made of both.
"""

READ_IN = "2.11.0, 2.13.0, 2.14.1, 2.15.0"  # the releases of torch in which all of this was read
