"""Flags that set other options of a bench, such as `--smoke` of every bench: the same measurement
at its smallest size, at most 20 s.

It says nothing about speed; it shows that a bench still runs and keeps what it should.
`test_smoke.py` runs all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

HELP = "the smallest size, to see that it runs; options that follow win over it"


def add_smoke(parser: argparse.ArgumentParser, **sizes: Any) -> None:
    """Add `--smoke`, which gives these values to other options."""
    add_sizes(parser, "--smoke", HELP, sizes)


def add_sizes(
    parser: argparse.ArgumentParser, flag: str, text: str, sizes: Mapping[str, Any]
) -> None:
    """Add a flag that gives these values to other options."""

    class Sizes(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[Any] | None,
            option_string: str | None = None,
        ) -> None:
            for name, value in {self.dest: True, **sizes}.items():
                if not hasattr(namespace, name):
                    parser.error(f"{option_string}: there is no option {name}")
                setattr(namespace, name, value)

    parser.add_argument(flag, action=Sizes, nargs=0, default=False, help=text)
