"""The DATA frame that one connection is reading: where its body goes, and what comes of it.

A body that is not coded is read straight into its place under a claim (see `incoming_transfer`),
or into scratch memory when parts of it are there already. A coded body is read into scratch memory,
and claimed and decoded once its checksum held. Scratch memory: one frame, two for a coded repeat.

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
from transport.wire.frames import FrameHeader, FrameReader
from transport.wire.handshake import takes_codec
from transport.wire.ranges import Range

logger = logging.getLogger("prfaas.transport")

SINK_BYTES = 64 * 1024
RAW_LENGTH = struct.Struct("<I")
"""In front of a coded payload: how many bytes it decodes to."""


@dataclass(frozen=True, slots=True)
class Verified:
    """`verified` is in place; `completed` when nothing of the transfer is missing any more."""

    transfer: IncomingTransfer
    verified: Range
    completed: bool


@dataclass(frozen=True, slots=True)
class Discarded:
    """Nothing was written: the transfer has ended, or was not opened on this connection (None)."""

    transfer: IncomingTransfer | None


class IncomingData:
    """Reads one connection's DATA frames: `begin` for a header, `finish` when its body is there."""

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
        """The body is complete; None when the transfer failed over it and its sender was told.

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
            if not header.codec and self._scratch.nbytes > SINK_BYTES:
                self._scratch = memoryview(bytearray())  # repeats are rare: keep nothing for them

    def forget(self) -> None:
        """Let go of all memory; the connection is gone."""
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
        except CodecError as error:  # the claim ends with the connection, when no view is left
            raise PeerError("protocol", f"coded DATA cannot be decoded: {error}") from error
        except Exception as error:
            transfer.abandon(self._connection)
            self._fail_for_space(transfer, error, now_s)
            return None
        del placement, views  # whoever hears of the end of a transfer may want its memory back
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
