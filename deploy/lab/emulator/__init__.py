"""Links and their faults on one machine, without privileges: a TCP relay with rate and delay."""

from deploy.lab.emulator.control import RelayControl, RelayError, RelayProcess

__all__ = ["RelayControl", "RelayError", "RelayProcess"]
