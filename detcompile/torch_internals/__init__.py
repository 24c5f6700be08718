"""Everything of torch that is not public and that this package relies on, by subject.

No other module names a private module or attribute of torch (tests/test_source_habits.py). Each module lists the
releases that it was read in (``READ_IN``). ``NAMES`` says what unchanged names of torch are for and what breaks without
them; functions say it in their docstrings. The site's page of internals is made of both.
"""
