"""Coverage-guided fuzzing of ReceiverSession and Reception; see run.py.

Run: python tests/fuzz/fuzz_receiver_session.py [libFuzzer options] [FILE ...]
A FILE is an input to repeat.
"""

import logging
import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

with atheris.instrument_imports(include=["transport"]):
    from attacks import attack_receiver


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    atheris.Setup(sys.argv, attack_receiver)
    atheris.Fuzz()
