"""Coverage-guided fuzzing of a whole sender by its receiver; see run.py.

Run: python tests/fuzz/fuzz_sender_session.py [libFuzzer options] [FILE ...]
A FILE is an input to repeat.
"""

import logging
import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

with atheris.instrument_imports(include=["transport"]):
    from attacks import attack_sender


if __name__ == "__main__":
    # Not disabled: the attack looks for errors in it.
    logging.getLogger("prfaas.transport").propagate = False
    atheris.Setup(sys.argv, attack_sender)
    atheris.Fuzz()
