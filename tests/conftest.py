"""How much property tests try: a little every time, much with `make test-long`.

Tests that name a number of examples of their own, most often for long runs of operations, keep it.
No example has a deadline: what else the machine does is no property of the code.
"""

from hypothesis import settings

settings.register_profile("usual", max_examples=60, deadline=None)
settings.register_profile("long", max_examples=2000, deadline=None)
settings.load_profile("usual")
