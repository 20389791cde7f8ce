"""Runs first in every Python process that integration tests start; see `no_gaps`.

What a process logs of its event loop's gaps goes to a file of its own as well, whatever becomes of
its standard error.
"""

import logging
import os
import sys


class _ToFile(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with open(f"{os.environ['PRFAAS_TEST_GAPS']}/{os.getpid()}", "a") as file:
            file.write(f"{' '.join(sys.argv)} (pid {os.getpid()}): {self.format(record)}\n")


if "PRFAAS_TEST_GAPS" in os.environ:
    logging.getLogger("prfaas.kvmanager.loop.watch").addHandler(_ToFile(logging.WARNING))
