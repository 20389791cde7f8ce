"""What a hostile peer says, and whom it says it to: bytes become frames, and memory tells who
touched it.

`Choices` turns any bytes into decisions, so that hypothesis and a coverage-guided fuzzer drive the
same code. `Forger` makes frames of every `FrameType` there is, mostly with right checksums (the
parser is then reached behind its gate), and hurts some. Knows no session and no socket.
"""

from __future__ import annotations

import gc
import struct
import sys
import types
from collections.abc import Collection
from enum import Enum
from itertools import pairwise

from transport_doubles import MemoryRegistry, MemorySpace, make_spec
from xxhash import xxh3_64_intdigest

from transport import ByteSpace, Refused
from transport.codec.codecs import Codec, encode
from transport.config import TransportConfig
from transport.receiving.incoming_transfer import IncomingTransfer
from transport.receiving.reception import Reception
from transport.wire.digest import digest_of
from transport.wire.frames import HEADER_BYTES, NO_TRANSFER, FrameType, encode_open
from transport.wire.handshake import own_hello

SIZES_BYTES = (0, 1, 700, 3000)
"""Of the transfers that are expected, by their number."""

_FIELDS = struct.Struct("<BBHI16sQQ")
_RANGE = struct.Struct("<QQ")
_KINDS = tuple(FrameType)
_RANGE_LISTS = (FrameType.OPENED, FrameType.ACK)
_REASONS = (FrameType.FAIL, FrameType.CANCEL, FrameType.ERROR)


class Choices:
    """Decisions taken from bytes, one after the other; all 0 when the bytes are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def __bool__(self) -> bool:
        return self._position < len(self._data)

    def take(self, num_bytes: int) -> bytes:
        """At most `num_bytes`, fewer at the end."""
        start = self._position
        self._position = start + num_bytes
        return self._data[start : self._position]

    def below(self, limit: int) -> int:
        """0 to limit - 1; one byte decides for limits up to 256, two beyond."""
        taken = self.take(1 if limit <= 256 else 2)
        return int.from_bytes(taken, "little") % limit

    def number(self) -> int:
        """Of up to 64 bits: mostly a small one, sometimes next to a power of two."""
        shape = self.below(8)
        if shape < 6:
            return self.below(4000)
        return max(0, min((1 << self.below(65)) - 2 + self.below(4), (1 << 64) - 1))


def forge(
    kind: int,
    body: bytes = b"",
    *,
    transfer_id: bytes = NO_TRANSFER,
    offset: int = 0,
    flags: int = 0,
    reserved: int = 0,
    length: int | None = None,
    body_sum: int | None = None,
) -> bytes:
    """A frame with a right header checksum, and whatever else was asked for."""
    if body_sum is None:
        body_sum = xxh3_64_intdigest(body) if body else 0
    length = len(body) if length is None else length
    head = _FIELDS.pack(kind, flags, reserved, length, transfer_id, offset, body_sum)
    return head + xxh3_64_intdigest(head).to_bytes(8, "little") + body


def own_greeting() -> bytes:
    """The HELLO frame of this release."""
    return own_hello(b"S" * 16, 1 << 20).encode(FrameType.HELLO)


class Forger:
    """Frames and fragments as `choices` say, `favourites` most often, every kind sometimes;
    remembers them to repeat and splice.
    """

    def __init__(self, choices: Choices, favourites: tuple[FrameType, ...] = ()) -> None:
        self._choices = choices
        self._kinds = _KINDS + favourites * (1 + 2 * len(_KINDS) // (len(favourites) or 1))
        self._made: list[bytes] = [own_greeting()]

    def next(self) -> bytes:
        """What to send next, 1 byte at least."""
        choices = self._choices
        twist = choices.below(32)
        if twist == 15:
            piece = choices.take(1 + choices.below(80)) or b"\0"
        elif twist == 14:
            piece = self._made[choices.below(len(self._made))]
        elif twist == 13:
            earlier = self._made[choices.below(len(self._made))]
            piece = earlier[: 1 + choices.below(len(earlier))] + self._frame()
        else:
            piece = self._frame(wrong_length=twist == 12, wrong_sum=twist == 11, odd=twist == 10)
            if twist == 9:
                piece = piece[: 1 + choices.below(len(piece))]
            elif twist == 8:
                bit = choices.below(len(piece) * 8)
                hurt = bytearray(piece)
                hurt[bit // 8] ^= 1 << bit % 8
                piece = bytes(hurt)
        self._made.append(piece)
        return piece

    def _frame(
        self, *, wrong_length: bool = False, wrong_sum: bool = False, odd: bool = False
    ) -> bytes:
        choices = self._choices
        kind = self._kinds[choices.below(len(self._kinds))]
        number = choices.below(len(SIZES_BYTES) + 1)
        offset = flags = 0
        if kind is FrameType.DATA:
            offset, flags, body = self._data_frame(number)
        else:
            body = self._body(kind, number)
        return forge(
            choices.below(256) if odd and choices.below(2) else kind,
            body,
            transfer_id=make_spec(number).transfer_id,
            offset=choices.number() if odd else offset,
            flags=choices.below(256) if odd else flags,
            reserved=choices.below(3) // 2 if odd else 0,
            length=choices.number() % (1 << 32) if wrong_length else None,
            body_sum=choices.number() if wrong_sum else None,
        )

    def _data_frame(self, number: int) -> tuple[int, int, bytes]:
        """(offset, flags, body), which mostly lies within the transfer."""
        choices = self._choices
        nbytes = SIZES_BYTES[number % len(SIZES_BYTES)]
        offset, raw = nbytes * choices.below(9) // 8, self._data()
        if choices.below(8):
            raw = raw[: min(900, nbytes - offset)] or b"?"
        else:
            offset = choices.number() % (1 << 63)
        flags = choices.below(64)
        flags = 0x80 * (flags == 63) | (flags % 8 if flags >= 32 else 0)
        return offset, flags, self._coded(raw, flags) if flags & 0x0F else raw

    def _coded(self, raw: bytes, flags: int) -> bytes:
        """The body for the codec that `flags` name, if it exists, sometimes hurt or mislabelled."""
        choices = self._choices
        codec = Codec(flags & 0x0F) if flags & 0x0F in set(Codec) else Codec.LZ4
        payload = bytearray(encode(codec, [memoryview(raw)], 2))
        if choices.below(8) == 7:
            payload[choices.below(len(payload))] ^= 1 << choices.below(8)
        raw_bytes = len(raw) if choices.below(16) else choices.number() % (1 << 32)
        return raw_bytes.to_bytes(4, "little") + payload

    def _data(self) -> bytes:
        choices = self._choices
        return (choices.take(1 + choices.below(8)) or b"?") * (1 + choices.below(130))

    def _body(self, kind: FrameType, number: int) -> bytes:
        choices = self._choices
        if kind in (FrameType.HELLO, FrameType.WELCOME):
            greeting = bytearray(own_greeting()[HEADER_BYTES:])
            if choices.below(8) == 7:
                greeting[choices.below(len(greeting))] ^= 1 << choices.below(8)
            return bytes(greeting)
        if kind is FrameType.OPEN:
            return self._open_body(number)
        if kind in _RANGE_LISTS:
            pairs = [(choices.number(), choices.number()) for _ in range(choices.below(6))]
            return b"".join(_RANGE.pack(start, length) for start, length in pairs)
        if kind in _REASONS:
            return bytes([choices.below(40)]) + choices.take(choices.below(60))
        if kind is FrameType.DIGEST and choices.below(4):
            return digest_of(MemorySpace(bytearray(b"?" * SIZES_BYTES[number % len(SIZES_BYTES)])))
        return choices.take(choices.below(80)) if choices.below(4) == 3 else b""

    def _open_body(self, number: int) -> bytes:
        choices = self._choices
        spec = make_spec(number)
        nbytes = SIZES_BYTES[number % len(SIZES_BYTES)] if choices.below(8) else choices.number()
        frame = encode_open(
            spec.transfer_id,
            token=spec.token if choices.below(8) else choices.take(32).ljust(32),
            fingerprint=spec.fingerprint,
            nbytes=nbytes,
            digest=choices.below(8) == 7,
        )
        return frame[HEADER_BYTES:]


class GuardedSpace(MemorySpace):
    """A ByteSpace that knows when something outside of it was asked for or written."""

    _GUARD = b"\xa5" * 64

    def __init__(self, nbytes: int, block_bytes: int = 256) -> None:
        super().__init__(bytearray(self._GUARD + bytes(nbytes) + self._GUARD), block_bytes)
        self._nbytes = nbytes
        self._strays: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def content(self) -> bytes:
        return bytes(self.data[len(self._GUARD) : -len(self._GUARD)])

    def views(self, offset: int, length: int) -> list[memoryview]:
        if offset < 0 or length < 0 or offset + length > self._nbytes:
            self._strays.append((offset, length))
        return super().views(offset + len(self._GUARD), length)

    def check(self) -> None:
        assert not self._strays, f"views outside the transfer: {self._strays}"
        assert self.data.startswith(self._GUARD), "written before the transfer"
        assert self.data.endswith(self._GUARD), "written behind the transfer"


class OnceRegistry(MemoryRegistry):
    """Gives each landing away once, so that its memory belongs to one transfer only."""

    def accept(
        self, transfer_id: bytes, token: bytes, fingerprint: bytes, nbytes: int
    ) -> ByteSpace:
        space = super().accept(transfer_id, token, fingerprint, nbytes)
        if space.nbytes != nbytes:
            raise Refused("size", "not what was reserved")
        del self.expected[transfer_id]
        return space


_NOT_HELD = (
    TransportConfig,
    Reception,
    IncomingTransfer,
    Enum,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
)


def held_bytes(root: object, others: Collection[object] = ()) -> int:
    """Memory that is reachable from `root`: buffers behind views too, but not shared objects of the
    package, nor `others`.
    """
    seen = {id(other) for other in others}
    todo, total = [root], 0
    while todo:
        item = todo.pop()
        if id(item) not in seen and not isinstance(item, _NOT_HELD):
            seen.add(id(item))
            total += sys.getsizeof(item)
            todo.extend(gc.get_referents(item))
    return total


def pieces(choices: Choices, data: bytes) -> list[bytes]:
    """`data` in up to nine fragments of any size."""
    cuts = sorted(choices.below(len(data) + 1) for _ in range(choices.below(9)))
    edges = [0, *cuts, len(data)]
    return [data[start:end] for start, end in pairwise(edges) if end > start]
