"""The bytes on the wire and the limits are those of WIRE.md: an older peer depends on each."""

from __future__ import annotations

import pytest
from xxhash import xxh3_64_intdigest

from transport import PeerError
from transport.codec.codecs import Codec
from transport.config import TransportConfig
from transport.wire.frame_reader import FrameReader, Step
from transport.wire.frames import (
    HEADER_BYTES,
    NO_TRANSFER,
    FrameType,
    checksum,
    decode_digest,
    decode_open,
    decode_ranges,
    decode_reason,
    encode_data_header,
    encode_frame,
    encode_header,
    encode_open,
    encode_ranges,
    encode_reason,
)
from transport.wire.handshake import (
    Hello,
    check_version,
    decode_hello,
    own_features,
    own_hello,
    takes_codec,
)
from transport.wire.sender_session import SenderSession, Welcomed

ID = bytes(range(16))
NO_ID = bytes(16)
MAX_OFFSET = 2**62
MAX_DATA = 1000


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def header(
    kind: int,
    *,
    flags: int = 0,
    reserved: int = 0,
    length: int = 0,
    transfer: bytes = NO_ID,
    offset: int = 0,
    body_sum: int = 0,
) -> bytes:
    """A header as WIRE.md has it, field by field."""
    fields = bytes([kind, flags]) + reserved.to_bytes(2, "little") + u32(length) + transfer
    fields += u64(offset) + u64(body_sum)
    return fields + u64(xxh3_64_intdigest(fields))


def frame(kind: int, body: bytes, transfer: bytes = NO_ID) -> bytes:
    body_sum = xxh3_64_intdigest(body) if body else 0
    return header(kind, length=len(body), transfer=transfer, body_sum=body_sum) + body


def taken(data: bytes, *, established: bool = True, data_flags: int = 0) -> FrameReader:
    """A reader that has just seen this header."""
    reader = FrameReader(MAX_DATA)
    reader.established = established
    if data_flags:
        reader.data_flags = data_flags
    reader.buffers()[0][:] = data
    reader.advance(len(data))
    return reader


def refusal(data: bytes, *, established: bool = True, data_flags: int = 0) -> str:
    """The code with which a header is refused, "" when it is taken."""
    try:
        taken(data, established=established, data_flags=data_flags)
    except PeerError as error:
        return error.code
    return ""


def test_types_have_their_numbers() -> None:
    assert {kind.name: kind.value for kind in FrameType} == {
        "HELLO": 1,
        "WELCOME": 2,
        "OPEN": 3,
        "OPENED": 4,
        "DATA": 5,
        "ACK": 6,
        "COMPLETE": 7,
        "FAIL": 8,
        "CANCEL": 9,
        "CANCELLED": 10,
        "ERROR": 11,
        "DIGEST": 12,
    }


def test_a_header_is_laid_out_field_by_field() -> None:
    expected = header(5, flags=0x41, length=10, transfer=ID, offset=7, body_sum=2**64 - 3)
    made = encode_header(FrameType.DATA, ID, length=10, offset=7, body_sum=2**64 - 3, flags=0x41)
    assert made == expected
    assert len(made) == HEADER_BYTES == 48
    assert encode_header(FrameType.COMPLETE, ID, length=0) == header(7, transfer=ID)
    found = taken(made).header
    assert found is not None
    assert (found.kind, found.flags, found.length, found.transfer_id) == (
        FrameType.DATA,
        0x41,
        10,
        ID,
    )
    assert (found.offset, found.body_sum, found.codec, found.end) == (7, 2**64 - 3, 1, 17)


@pytest.mark.parametrize(
    ("options", "flags"),
    [({}, 0), ({"codec": 3}, 3), ({"more": True}, 0x40), ({"codec": 5, "more": True}, 0x45)],
)
def test_a_data_header_tells_codec_and_more(options: dict[str, int], flags: int) -> None:
    body = [b"some", memoryview(b" bytes")]
    body_sum = xxh3_64_intdigest(b"some bytes")
    expected = header(5, flags=flags, length=10, transfer=ID, offset=9, body_sum=body_sum)
    assert encode_data_header(ID, 9, body, **options) == expected  # type: ignore[arg-type]


def test_a_data_header_without_a_checksum_says_so() -> None:
    expected = header(5, flags=0x80, length=4, transfer=ID)
    assert encode_data_header(ID, 0, [b"body"], with_sum=False) == expected


def test_a_checksum_is_of_all_parts_in_order() -> None:
    whole = xxh3_64_intdigest(b"abc")
    assert checksum([b"abc"]) == checksum([b"a", b"bc"]) == checksum([b"a", b"b", b"c"]) == whole
    assert checksum([b"bc", b"a"]) != whole
    assert checksum([]) == xxh3_64_intdigest(b"")


def test_control_frames() -> None:
    assert encode_frame(FrameType.COMPLETE, ID) == frame(7, b"", ID)
    assert encode_frame(FrameType.DIGEST, ID, b"d" * 32) == frame(12, b"d" * 32, ID)
    assert encode_frame(FrameType.ERROR) == frame(11, b"")
    found = taken(encode_frame(FrameType.ERROR)).header
    assert found is not None
    assert found.transfer_id == NO_TRANSFER


@pytest.mark.parametrize("digest", [False, True])
def test_open(digest: bool) -> None:
    body = b"t" * 32 + b"f" * 32 + u64(MAX_OFFSET) + u32(int(digest))
    made = encode_open(ID, token=b"t" * 32, fingerprint=b"f" * 32, nbytes=MAX_OFFSET, digest=digest)
    assert made == frame(3, body, ID)
    assert decode_open(body) == (b"t" * 32, b"f" * 32, MAX_OFFSET, digest)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (bytes(75), "OPEN body has 75 bytes, expected 76"),
        (bytes(77), "OPEN body has 77 bytes, expected 76"),
        (bytes(64) + u64(MAX_OFFSET + 1) + u32(0), f"OPEN announces {MAX_OFFSET + 1} bytes"),
        (bytes(72) + u32(2), "OPEN with unknown flags 0x2"),
        (bytes(72) + u32(3), "OPEN with unknown flags 0x3"),
    ],
)
def test_an_open_that_cannot_be_meant_is_refused_in_words(body: bytes, words: str) -> None:
    with pytest.raises(PeerError, match=words) as caught:
        decode_open(body)
    assert caught.value.code == "protocol"


def test_ranges_are_offsets_and_lengths() -> None:
    body = u64(5) + u64(2) + u64(MAX_OFFSET - 1) + u64(1)
    ranges = [(5, 7), (MAX_OFFSET - 1, MAX_OFFSET)]
    assert encode_ranges(FrameType.ACK, ID, ranges) == frame(6, body, ID)
    assert decode_ranges(body) == ranges
    assert encode_ranges(FrameType.OPENED, ID, []) == frame(4, b"", ID)
    assert decode_ranges(b"") == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (bytes(8), "range list of 8 bytes"),
        (u64(5) + u64(0), "range of 0 bytes at 5"),
        (u64(MAX_OFFSET - 1) + u64(2), f"range of 2 bytes at {MAX_OFFSET - 1}"),
    ],
)
def test_ranges_that_cannot_be_are_refused_in_words(body: bytes, words: str) -> None:
    with pytest.raises(PeerError, match=words) as caught:
        decode_ranges(body)
    assert caught.value.code == "protocol"


def test_a_list_of_more_than_4096_ranges_takes_another_frame() -> None:
    ranges = [(2 * i, 2 * i + 1) for i in range(4097)]
    assert len(encode_ranges(FrameType.ACK, ID, ranges[:4096])) == 48 + 65536
    assert len(encode_ranges(FrameType.ACK, ID, ranges)) == 48 + 65536 + 48 + 16


def test_a_reason_is_a_short_code_and_a_text() -> None:
    assert encode_reason(FrameType.FAIL, "busy", "né", ID) == frame(8, b"\x04busyn\xc3\xa9", ID)
    assert decode_reason(b"\x04busyn\xc3\xa9") == ("busy", "né")
    assert decode_reason(b"\x04busy") == ("busy", "")
    assert decode_reason(b"\x00text") == ("", "text")
    assert decode_reason(b"\x20" + b"c" * 32) == ("c" * 32, "")


def test_a_reason_is_cut_to_the_formats_limits() -> None:
    body = b"\x20" + b"c" * 32 + b"t" * 1024
    assert encode_reason(FrameType.ERROR, "c" * 33, "t" * 1025) == frame(11, body)


@pytest.mark.parametrize("body", [b"", b"\x05busy", b"\x01", b"\x21" + b"c" * 40])
def test_a_reason_that_cannot_be_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(PeerError, match="malformed reason") as caught:
        decode_reason(body)
    assert caught.value.code == "protocol"


def test_a_digest_has_32_bytes() -> None:
    assert decode_digest(b"d" * 32) == b"d" * 32
    for length in (31, 33):
        with pytest.raises(PeerError, match=f"DIGEST of {length} bytes, expected 32") as caught:
            decode_digest(bytes(length))
        assert caught.value.code == "protocol"


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (FrameType.HELLO, 256),
        (FrameType.WELCOME, 256),
        (FrameType.OPEN, 76),
        (FrameType.OPENED, 65536),
        (FrameType.DATA, MAX_DATA),
        (FrameType.ACK, 65536),
        (FrameType.COMPLETE, 0),
        (FrameType.FAIL, 1057),
        (FrameType.CANCEL, 1057),
        (FrameType.CANCELLED, 0),
        (FrameType.ERROR, 1057),
        (FrameType.DIGEST, 32),
    ],
)
def test_each_body_has_its_limit(kind: FrameType, limit: int) -> None:
    assert refusal(header(kind, length=limit)) == ""
    assert refusal(header(kind, length=limit + 1)) == "protocol"


def test_only_data_has_an_offset_and_never_no_body() -> None:
    assert refusal(header(5, length=1, offset=MAX_OFFSET)) == ""
    assert refusal(header(5, length=1, offset=MAX_OFFSET + 1)) == "protocol"
    assert refusal(header(5, length=0)) == "protocol"
    assert refusal(header(6, length=16, offset=1)) == "protocol"


@pytest.mark.parametrize("kind", list(FrameType))
def test_before_the_greeting_only_a_greeting_or_an_error_is_taken(kind: FrameType) -> None:
    is_taken = kind in (FrameType.HELLO, FrameType.WELCOME, FrameType.ERROR)
    found = refusal(header(kind, length=int(kind is FrameType.DATA)), established=False)
    assert found == ("" if is_taken else "protocol")


def test_flags_are_for_data_only() -> None:
    assert [refusal(header(5, length=1, flags=1 << bit)) for bit in range(8)] == [
        *[""] * 4,  # the codec
        *["protocol"] * 2,
        "",  # more follows
        "protocol",  # no checksum, which was not agreed on
    ]
    assert refusal(header(5, length=1, flags=0x80), data_flags=0x80) == ""
    assert refusal(header(6, flags=1)) == "protocol"
    assert refusal(header(6, flags=0x80), data_flags=0x80) == "protocol"


def test_reserved_bits_and_unknown_types_are_refused() -> None:
    assert refusal(header(6, reserved=1)) == "protocol"
    assert refusal(header(0)) == "protocol"
    assert refusal(header(13)) == "protocol"


def test_a_damaged_header_is_another_protocol_before_the_greeting_and_damage_after_it() -> None:
    damaged = header(1)[:-1] + b"x"
    assert refusal(damaged, established=False) == "not_prfaas"
    assert refusal(damaged) == "checksum"


def test_a_header_without_a_body_is_a_frame() -> None:
    reader = FrameReader(MAX_DATA)
    reader.established = True
    reader.buffers()[0][:] = header(7)
    assert reader.advance(48) is Step.FRAME
    assert reader.at_boundary


# ---- the greeting

GREETING = b"PrfaaSkv" + b"\x02\x00\x02\x00" + u32(4096) + u64(0x103) + b"i" * 16


def test_a_greeting_is_laid_out_field_by_field() -> None:
    hello = own_hello(b"i" * 16, 4096, 0x103)
    assert hello == Hello(2, 2, 4096, 0x103, b"i" * 16)
    assert own_hello(b"i" * 16, 4096) == Hello(2, 2, 4096, 0, b"i" * 16)
    assert hello.encode(FrameType.HELLO) == frame(1, GREETING)
    assert hello.encode(FrameType.WELCOME) == frame(2, GREETING)
    assert decode_hello(GREETING) == decode_hello(GREETING + b"later") == hello


def hello(version_min: int, version_max: int, max_frame_bytes: int = 1) -> Hello:
    return Hello(version_min, version_max, max_frame_bytes, 0, bytes(16))


def test_a_greeting_of_another_protocol_or_too_short_is_recognised() -> None:
    for body in (GREETING[:-1], b"x" + GREETING[1:], b""):
        with pytest.raises(PeerError) as caught:
            decode_hello(body)
        assert caught.value.code == "not_prfaas"


def test_a_greeting_may_be_as_tight_as_can_be_meant() -> None:
    tight = hello(3, 3, 1)
    assert decode_hello(tight.encode(FrameType.HELLO)[48:]) == tight
    for impossible in (hello(4, 3), hello(3, 3, 0)):
        with pytest.raises(PeerError, match="contradicts itself") as caught:
            decode_hello(impossible.encode(FrameType.HELLO)[48:])
        assert caught.value.code == "protocol"


@pytest.mark.parametrize("versions", [(2, 2), (1, 2), (2, 3), (0, 9)])
def test_versions_agree_when_ours_is_in_the_peers_range(versions: tuple[int, int]) -> None:
    session = SenderSession(TransportConfig(), b"s" * 16)
    (event,) = session.feed(hello(*versions).encode(FrameType.WELCOME))
    assert event == Welcomed(hello(*versions))


@pytest.mark.parametrize(
    ("versions", "told"),
    [((1, 1), "1"), ((3, 3), "3"), ((3, 4), "3 to 4"), ((0, 1), "0 to 1")],
)
def test_a_version_that_is_not_ours_is_told_in_words(versions: tuple[int, int], told: str) -> None:
    words = f"the sender speaks version {told}, this side speaks 2;"
    with pytest.raises(PeerError, match=words) as caught:
        check_version(hello(*versions), "sender")
    assert caught.value.code == "version"


def test_features_have_their_bits() -> None:
    lossless = sum(1 << 8 + codec for codec in (1, 2, 3, 4))
    assert own_features(TransportConfig(codec="auto")) == lossless
    assert own_features(TransportConfig(codec="fp8")) == lossless + (1 << 8 + 5)
    assert own_features(TransportConfig(codec="auto", checksum=False)) == lossless + 1
    assert own_features(TransportConfig(codec="none")) == 0


def test_a_codec_of_no_name_is_never_taken() -> None:
    config = TransportConfig(codec="fp8")
    assert [codec for codec in range(16) if takes_codec(config, codec)] == [1, 2, 3, 4, 5]
    assert max(Codec) == 5
