"""The errors of a transfer, sorted by who caused them. Knows no frame, no socket and no HTTP.

    TransportError
    ├── PeerError     the other side refused, broke the protocol, cancelled or restarted
    │   └── Refused   raised by a LandingRegistry to turn a transfer away
    ├── LocalError    this process caused it: a cancel, a close, unusable certificates or memory
    └── LinkError     the network caused it: the peer is unreachable, lost or silent

`code` is one short word for programs, the message is for people:

- PeerError: `protocol`, `checksum` (a frame broke the rules or arrived damaged; costs one
  connection), `not_prfaas`, `version` (the peer speaks something else, or another version), `tls`
  (handshake failed: wrong or missing certificate, or TLS on one side only), `busy` (a limit of the
  receiver), `bad_token`, `mismatch` (an OPEN of a known transfer with other credentials or another
  size), `not_open`, `dropped`, `fragmented` (ranges scattered beyond the limit), `digest` (all of
  it arrived, and is not what was sent), `registry`, `receiver_restarted`, and every code a registry
  chose for `Refused`.
- LocalError: `cancelled` (a PeerError at the receiver), `closed` (this Sender or Receiver was
  closed), `turned_away` (a receiver gave the connection's place to another one), `space` (the
  ByteSpace raised; a PeerError when the other side's did), `tls_files`, `region_key`,
  `granting_key`, `granting_keys` (files that cannot be used), `bind`, `internal`.
- LinkError: `connect`, `lost`, `handshake_timeout`, `frame_timeout`, `ack_timeout`, `renewed` (it
  has carried what a TLS key may) end one connection; `unreachable`, `idle` end a transfer that made
  no progress for the idle timeout.
"""

import traceback


class TransportError(Exception):
    """Base of this package's errors; `code` is stable, the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code!r}, {self.message!r})"


class PeerError(TransportError):
    """The other side caused it."""


class Refused(PeerError):
    """A LandingRegistry turns a transfer away; code and message are told to the sender."""


class LocalError(TransportError):
    """This process caused it."""


class LinkError(TransportError):
    """The network caused it; another connection may succeed."""


def release_frames(error: BaseException) -> None:
    """Clear the local variables in the tracebacks of an exception and its causes. They would keep
    views of a ByteSpace alive for as long as the exception lives.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def bare(error: TransportError) -> TransportError:
    """The same error without traceback and causes, whose frames would keep views of a ByteSpace
    alive.
    """
    error.__cause__ = None
    error.__context__ = None
    return error.with_traceback(None)
