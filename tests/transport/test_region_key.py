"""The region's key: files, signatures, challenges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import Identity, LocalError, RegionKey
from transport.region_key import (
    CHALLENGE_S,
    MAX_NONCES,
    Challenges,
    Proof,
    answer_proof,
    call_proof,
    is_answer_proof,
    is_call_proof,
    is_signed,
    load_keys,
    new_key,
    parse_keys,
    signature,
)

FRONT = Identity("r", "pd-front", "f")
KEY, OTHER = bytes(32), bytes([1]) * 32
parts = st.lists(st.binary(max_size=8), max_size=4)


def key_file(path: Path, text: str, mode: int = 0o600) -> RegionKey:
    path.write_text(text)
    path.chmod(mode)
    return RegionKey(path, FRONT)


def test_a_file_may_have_several_keys_and_comments(tmp_path: Path) -> None:
    first, second = new_key(), new_key()
    key = key_file(tmp_path / "k", f"# of May\n{first}\n\n  {second}  # of April\n")
    assert load_keys(key) == (bytes.fromhex(first), bytes.fromhex(second))


@pytest.mark.parametrize("text", ["", "# none\n", "00" * 31, "00" * 32 + "\nshort"])
def test_a_wrong_line_is_named_without_its_content(text: str) -> None:
    with pytest.raises(ValueError, match="openssl rand -hex 32") as caught:
        parse_keys(text)
    assert "short" not in str(caught.value)
    assert "00" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    key = key_file(tmp_path / "k", new_key(), mode)
    with pytest.raises(LocalError, match="chmod 600"):
        load_keys(key)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_owner_and_group_may_read(tmp_path: Path, mode: int) -> None:
    assert len(load_keys(key_file(tmp_path / "k", new_key(), mode))) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="No such file"):
        load_keys(RegionKey(tmp_path / "missing", FRONT))


@given(parts, parts)
def test_no_two_lists_of_parts_sign_alike(one: list[bytes], two: list[bytes]) -> None:
    assert (signature(KEY, *one) == signature(KEY, *two)) is (one == two)


@given(st.text())
def test_forged_signatures_are_refused(mac: str) -> None:
    assert not is_signed((KEY, OTHER), mac, "x")


def test_any_key_of_the_file_is_accepted() -> None:
    mac = signature(OTHER, "x")
    assert is_signed((KEY, OTHER), mac, "x")
    assert not is_signed((KEY,), mac, "x")


def test_a_proof_is_of_one_call_by_one_caller() -> None:
    proof = call_proof(KEY, FRONT, "c1", "S/M", b"body")
    assert Proof.parse(str(proof)) == proof
    assert is_call_proof((KEY,), proof, "S/M")
    assert not is_call_proof((KEY,), proof, "S/N")
    assert not is_call_proof((OTHER,), proof, "S/M")
    assert proof.is_of(b"body")
    assert not proof.is_of(b"other")
    other = call_proof(KEY, FRONT, "c1", "S/M", b"other")
    for change in (
        {"identity": Identity("r", "gateway", "f")},
        {"challenge": "c2"},
        {"nonce": "n2"},
        {"body": other.body},
        {"mac": other.mac},
    ):
        assert not is_call_proof((KEY,), replace(proof, **change), "S/M")


def test_an_answer_is_to_one_call() -> None:
    proof = answer_proof(KEY, FRONT, "c1", "n1", "OK", b"body")
    assert is_answer_proof((KEY,), proof, "n1", "OK", b"body")
    assert not is_answer_proof((KEY,), proof, "n2", "OK", b"body")
    assert not is_answer_proof((KEY,), proof, "n1", "NO_ROOM", b"body")
    assert not is_answer_proof((KEY,), proof, "n1", "OK", b"other")
    assert not is_answer_proof((OTHER,), proof, "n1", "OK", b"body")
    # A call is no answer, though the same key signs both.
    asked = call_proof(KEY, FRONT, "c1", "OK", b"body")
    assert not is_answer_proof((KEY,), asked, asked.nonce, "OK", b"body")


@given(st.text())
def test_nothing_else_parses_as_a_proof(text: str) -> None:
    try:
        proof = Proof.parse(text)
    except ValueError:
        return
    assert str(proof) == text


def test_a_nonce_counts_once_and_a_challenge_lives_two_periods() -> None:
    challenges = Challenges(0.0)
    first = challenges.current(0.0)
    assert challenges.is_unused(first, "n")
    assert challenges.note(first, "n")
    assert not challenges.is_unused(first, "n")
    assert not challenges.note(first, "n")
    assert not challenges.note("made up", "n")
    second = challenges.current(CHALLENGE_S)
    assert second != first
    assert challenges.is_known(first, CHALLENGE_S)
    assert not challenges.note(first, "n")
    assert challenges.note(second, "n")
    assert not challenges.is_known(first, 2 * CHALLENGE_S)
    assert not challenges.note(first, "n")


def test_challenges_of_a_server_that_rested_are_forgotten() -> None:
    challenges = Challenges(0.0)
    first = challenges.current(0.0)
    assert not challenges.is_known(first, 10 * CHALLENGE_S)


def test_the_memory_for_nonces_is_bounded() -> None:
    challenges = Challenges(0.0)
    first = challenges.current(0.0)
    for number in range(MAX_NONCES):
        assert challenges.note(first, str(number))
    assert challenges.current(0.0) != first
    assert challenges.is_known(first, 0.0)
