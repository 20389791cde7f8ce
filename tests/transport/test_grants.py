"""Grants: key files, signatures, what a grant allows and when."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from certificates import openssl
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from transport import LocalError
from transport.grants import (
    MAX_GRANT_BYTES,
    SKEW_S,
    Grant,
    Granted,
    Granter,
    GrantFile,
    NotGranted,
    check_grant,
    content_digest,
    load_private_key,
    load_public_keys,
    new_key_pair,
    read_grant,
    sign_grant,
)

KEY, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in range(2))
CALL = Granted(
    method="Send", agent="a:1", endpoint="b:1", transfer_id="00", content="11", nbytes=10
)
GRANT = Grant(region="r", granted=CALL, begins_s=1000.0, ends_s=1060.0, nonce=b"n")
texts = st.lists(st.binary(max_size=4), max_size=4)


def key_file(path: Path, text: bytes, mode: int = 0o600) -> GrantFile:
    path.write_bytes(text)
    path.chmod(mode)
    return GrantFile(path, "r")


def test_a_grant_is_read_with_the_key_that_signed_it_only() -> None:
    raw = sign_grant(KEY, GRANT)
    assert read_grant([OTHER.public_key(), KEY.public_key()], raw, "Send") == GRANT
    for wrong in (sign_grant(OTHER, GRANT), raw[:-1], raw + b"x", raw[1:], b"x" * 70):
        with pytest.raises(NotGranted, match="Send: the grant is not signed with a key"):
            read_grant([KEY.public_key()], wrong, "Send")
    with pytest.raises(NotGranted, match="Send needs a grant"):
        read_grant([KEY.public_key()], b"", "Send")


def test_a_grant_with_a_condition_that_is_not_known_allows_nothing() -> None:
    for changes in ({"granted": {**msgspec.to_builtins(CALL), "tenant": "t"}}, {"once": True}):
        body = msgspec.msgpack.encode({**msgspec.structs.asdict(GRANT), **changes})
        raw = KEY.sign(b"prfaas grant 1\0" + body) + body
        with pytest.raises(NotGranted, match="of another version"):
            read_grant([KEY.public_key()], raw, "Send")


def test_a_grant_of_no_sensible_size_is_not_even_checked() -> None:
    long = msgspec.structs.replace(GRANT, nonce=bytes(MAX_GRANT_BYTES))
    with pytest.raises(NotGranted, match="4096 at most"):
        read_grant([KEY.public_key()], sign_grant(KEY, long), "Send")


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_no_bit_of_a_grant_can_be_changed(place: int, change: int) -> None:
    raw = bytearray(sign_grant(KEY, GRANT))
    raw[place % len(raw)] ^= change
    with pytest.raises(NotGranted):
        read_grant([KEY.public_key()], bytes(raw), "Send")


@pytest.mark.parametrize("field", ["method", "agent", "endpoint", "transfer_id", "content"])
def test_a_grant_is_for_what_it_names(field: str) -> None:
    check_grant(GRANT, CALL, region="r", now_s=1030.0)
    other = msgspec.structs.replace(CALL, **{field: "else"})
    with pytest.raises(NotGranted, match=f"the grant is for {field} .*, not else"):
        check_grant(GRANT, other, region="r", now_s=1030.0)
    # What a grant leaves out it does not allow, but for who is called.
    general = msgspec.structs.replace(CALL, **{field: ""})
    grant = msgspec.structs.replace(GRANT, granted=general)
    if field == "agent":
        check_grant(grant, CALL, region="r", now_s=1030.0)
    else:
        with pytest.raises(NotGranted, match=f"for {field} none"):
            check_grant(grant, CALL, region="r", now_s=1030.0)


def test_a_grant_is_for_its_region_and_for_so_many_bytes() -> None:
    with pytest.raises(NotGranted, match="of region r, not s"):
        check_grant(GRANT, CALL, region="s", now_s=1030.0)
    check_grant(GRANT, msgspec.structs.replace(CALL, nbytes=9), region="r", now_s=1030.0)
    with pytest.raises(NotGranted, match="10 bytes at most, not 11"):
        check_grant(GRANT, msgspec.structs.replace(CALL, nbytes=11), region="r", now_s=1030.0)


def test_clocks_may_be_a_minute_apart() -> None:
    for now_s in (1000.0 - SKEW_S, 1060.0 + SKEW_S):
        check_grant(GRANT, CALL, region="r", now_s=now_s)
    for now_s in (1000.0 - SKEW_S - 1, 1060.0 + SKEW_S + 1):
        with pytest.raises(NotGranted, match="the clocks of gateway and agent"):
            check_grant(GRANT, CALL, region="r", now_s=now_s)


@given(texts, texts)
def test_other_content_has_another_digest(one: list[bytes], two: list[bytes]) -> None:
    assert (content_digest(*one) == content_digest(*two)) == (one == two)


def test_what_a_gateway_signs_an_agent_reads(tmp_path: Path) -> None:
    private, public = new_key_pair()
    granter = Granter(key_file(tmp_path / "k", private))
    keys = load_public_keys(key_file(tmp_path / "p", public))
    first, second = (read_grant(keys, granter.grant(CALL, 5.0), "Send") for _ in range(2))
    assert (first.region, first.granted, first.ends_s) == ("r", CALL, first.begins_s + 5.0)
    assert first.nonce != second.nonce


def test_keys_of_openssl_are_used_and_several_public_ones(tmp_path: Path) -> None:
    key, public = tmp_path / "k", tmp_path / "p"
    openssl("genpkey", "-algorithm", "ed25519", "-out", key)
    openssl("pkey", "-in", key, "-pubout", "-out", public)
    key.chmod(0o600)
    both = b"# of May\n" + new_key_pair()[1] + b"\n# of April\n" + public.read_bytes()
    keys = load_public_keys(key_file(tmp_path / "both", both, 0o644))
    raw = sign_grant(load_private_key(GrantFile(key, "r")), GRANT)
    assert len(keys) == 2
    assert read_grant(keys, raw, "Send") == GRANT


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o601])
def test_a_private_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(LocalError, match="chmod 600"):
        load_private_key(key_file(tmp_path / "k", new_key_pair()[0], mode))


@pytest.mark.parametrize("mode", [0o622, 0o602])
def test_public_keys_that_others_may_change_are_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(LocalError, match="chmod 600"):
        load_public_keys(key_file(tmp_path / "p", new_key_pair()[1], mode))


def test_files_without_usable_keys_are_refused_by_name(tmp_path: Path) -> None:
    rsa = tmp_path / "rsa"
    openssl("genpkey", "-algorithm", "rsa", "-out", rsa)
    openssl("pkey", "-in", rsa, "-pubout", "-out", tmp_path / "rsa.pub")
    private, public = new_key_pair()
    broken = public.replace(b"MCow", b"MCox")
    for text, reason in (
        (b"", "no unencrypted private key"),
        (public, "no unencrypted private key"),
        (rsa.read_bytes(), "not of Ed25519"),
    ):
        with pytest.raises(LocalError, match=f"{tmp_path}/k: .*{reason}"):
            load_private_key(key_file(tmp_path / "k", text))
    for text, reason in (
        (b"", "no public key"),
        (private, "no public key"),
        (public + broken, "what is no public key"),
        (public + public[:-30], "ends within a key"),
        (public + (tmp_path / "rsa.pub").read_bytes(), "not of Ed25519"),
    ):
        with pytest.raises(LocalError, match=f"{tmp_path}/p: .*{reason}"):
            load_public_keys(key_file(tmp_path / "p", text))
    with pytest.raises(LocalError, match="No such file"):
        load_private_key(GrantFile(tmp_path / "none", "r"))
