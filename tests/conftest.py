"""How much property tests try: a little every time, much with `make test-long`; and Ctrl-C, which
tests send to commands.

Tests that name a number of examples of their own, most often for long runs of operations, keep it.
No example has a deadline: what else the machine does is no property of the code.
"""

import signal

from hypothesis import settings

settings.register_profile("usual", max_examples=60, deadline=None)
settings.register_profile("long", max_examples=2000, deadline=None)
settings.load_profile("usual")

# A shell that starts tests in the background has them ignore Ctrl-C, and so every process that they
# start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
