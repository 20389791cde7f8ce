"""The DATA frame that one connection is reading: where its body goes, and how it ends.

A body that is not coded is read straight into its place under a claim (`incoming_transfer` has the
rules), or into scratch memory when parts of it have arrived before. A coded body is read into
scratch memory; once its checksum held, its range is claimed and the body decoded into it. Scratch
memory holds one frame, or two while a coded body is repeated.

Knows no other frame and no acknowledgement.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass

from transport.codec.codecs import Codec, CodecError, decode
from transport.config import TransportConfig
from transport.errors import PeerError, TransportError
from transport.interfaces import TransferState
from transport.receiving.incoming_transfer import Destination, IncomingTransfer
from transport.receiving.reception import Reception
from transport.wire.frame_reader import FrameReader
from transport.wire.frames import FrameHeader
from transport.wire.handshake import takes_codec
from transport.wire.ranges import Range

logger = logging.getLogger("prfaas.transport")

SINK_BYTES = 64 * 1024
RAW_LENGTH = struct.Struct("<I")
"""The field in front of a coded payload: the number of bytes that it decodes to."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The range `verified` is in place. `completed`: the transfer misses nothing any more."""

    transfer: IncomingTransfer
    verified: Range
    completed: bool


@dataclass(frozen=True, slots=True)
class Discarded:
    """Nothing was written, because the transfer has ended, or was not opened here (None)."""

    transfer: IncomingTransfer | None


class IncomingData:
    """Reads one connection's DATA frames: call `begin` for a header and `finish` after its body."""

    def __init__(self, connection: int, config: TransportConfig, reception: Reception) -> None:
        self._connection = connection
        self._config = config
        self._reception = reception
        self._transfer: IncomingTransfer | None  # from the first `begin` on
        self._place: Destination
        self._scratch = memoryview(bytearray())

    def begin(
        self,
        reader: FrameReader,
        header: FrameHeader,
        transfer: IncomingTransfer | None,
        now_s: float,
    ) -> None:
        """Tell the reader where the body goes. Raises PeerError when the connection must end."""
        self._transfer = transfer
        self._place = Destination.DISCARD
        if header.codec and not takes_codec(self._config, header.codec):
            raise PeerError("protocol", f"DATA in codec {header.codec}, which was not agreed on")
        if transfer is not None:
            if header.codec:
                self._place = Destination.SCRATCH
            else:
                self._claim(reader, header, transfer, now_s)
            self._reception.transfers.first_byte(header.transfer_id, now_s)
        if self._place is Destination.SCRATCH:
            reader.place([self._scratch_of(header.length)])
        elif self._place is not Destination.DIRECT:
            self._scratch_of(SINK_BYTES)
            reader.discard(self._scratch)

    def finish(
        self, reader: FrameReader, header: FrameHeader, now_s: float
    ) -> Verified | Discarded | None:
        """Verify and place the complete body. None: the transfer failed, and its sender was told.

        Raises PeerError when the connection must end.
        """
        transfer, self._transfer = self._transfer, None
        if self._place is Destination.DISCARD or transfer is None:
            return Discarded(transfer)
        reader.verify_data()
        try:
            if header.codec:
                return self._decode(transfer, header, now_s)
            scratch = self._scratch[: header.length] if self._place is Destination.SCRATCH else None
            return self._commit(transfer, (header.offset, header.end), scratch, now_s)
        finally:
            scratch = None
            # Repeats are rare, so the frame of memory that one needs is not kept.
            if not header.codec and self._scratch.nbytes > SINK_BYTES:
                self._scratch = memoryview(bytearray())

    def forget(self) -> None:
        """The connection is gone: drop all memory."""
        self._transfer = None
        self._scratch = memoryview(bytearray())

    def _claim(
        self, reader: FrameReader, header: FrameHeader, transfer: IncomingTransfer, now_s: float
    ) -> None:
        try:
            placement = self._reception.claim(self._connection, transfer, header.offset, header.end)
            if placement.place is Destination.DIRECT:
                reader.place(placement.views)
            self._place = placement.place
        except PeerError:
            raise
        except Exception as error:
            transfer.abandon(self._connection)
            self._fail_for_space(transfer, error, now_s)

    def _decode(
        self, transfer: IncomingTransfer, header: FrameHeader, now_s: float
    ) -> Verified | Discarded | None:
        body = self._scratch[: header.length]
        raw_bytes = RAW_LENGTH.unpack_from(body)[0] if header.length > RAW_LENGTH.size else 0
        if not 0 < raw_bytes <= self._config.max_frame_bytes:
            raise PeerError("protocol", f"coded DATA of {raw_bytes} bytes")
        payload, end = body[RAW_LENGTH.size :], header.offset + raw_bytes
        try:
            placement = self._reception.claim(self._connection, transfer, header.offset, end)
            if placement.place is Destination.DISCARD:
                return Discarded(transfer)
            is_repeat = placement.place is Destination.SCRATCH
            scratch = memoryview(bytearray(raw_bytes)) if is_repeat else None
            views = placement.views if scratch is None else [scratch]
            decode(Codec(header.codec), payload, raw_bytes, views)
        except PeerError:
            raise
        except CodecError as error:
            # The claim is not given back here: views of the memory live until the connection ends.
            raise PeerError("protocol", f"coded DATA cannot be decoded: {error}") from error
        except Exception as error:
            transfer.abandon(self._connection)
            self._fail_for_space(transfer, error, now_s)
            return None
        # `commit` may complete the transfer, after which no view of its memory may be left.
        del placement, views
        return self._commit(transfer, (header.offset, end), scratch, now_s)

    def _commit(
        self, transfer: IncomingTransfer, written: Range, scratch: memoryview | None, now_s: float
    ) -> Verified | Discarded | None:
        try:
            completed = transfer.commit(self._connection, *written, scratch)
        except TransportError as error:
            self._reception.fail(transfer, error, now_s)
            return None
        except Exception as error:
            self._fail_for_space(transfer, error, now_s)
            return None
        if not completed and transfer.state is not TransferState.OPEN:
            return Discarded(transfer)
        return Verified(transfer, written, completed)

    def _fail_for_space(self, transfer: IncomingTransfer, error: Exception, now_s: float) -> None:
        logger.error("ByteSpace of %s raised", transfer.transfer_id.hex(), exc_info=error)
        message = f"the receiver's memory could not be used: {type(error).__name__}"
        self._reception.fail(transfer, PeerError("space", message), now_s)

    def _scratch_of(self, num_bytes: int) -> memoryview:
        if self._scratch.nbytes < num_bytes:
            self._scratch = memoryview(bytearray(num_bytes))
        return self._scratch[:num_bytes]
