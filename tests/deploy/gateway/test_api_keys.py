"""API keys: whose they are, how they are written, and that no error shows one."""

import hmac
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from deploy.gateway.api_keys import ApiKey, is_named, load_api_keys, parse_api_keys
from deploy.gateway.config import GatewayConfig, with_api_keys
from deploy.gateway.errors import ApiError
from deploy.gateway.intake.auth import KeyRing

CONFIG = GatewayConfig.model_validate({"models": [{"name": "tiny"}]})


def pairs(keys: tuple[ApiKey, ...]) -> list[tuple[str, str]]:
    return [(key.name, key.key.get_secret_value()) for key in keys]


def ring(*lines: str) -> KeyRing:
    return KeyRing(ApiKey.model_validate(line) for line in lines)


def written(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


def test_without_keys_everything_is_let_in_as_nobody() -> None:
    assert KeyRing([]).check(None) == ""
    assert KeyRing([]).check("Bearer anything") == ""


@pytest.mark.parametrize(
    ("header", "tenant"),
    [("Bearer a", "key-ca978112"), ("bearer  b ", "acme"), ("BEARER c", "acme")],
)
def test_a_known_key_says_whose_it_is(header: str, tenant: str) -> None:
    assert ring("a", "acme b", "acme c").check(header) == tenant


@pytest.mark.parametrize(
    "header", [None, "", "a", "Basic a", "Bearer", "Bearer c", "Bearer x b", "Bearer \udcff"]
)
def test_keys_that_are_not_known(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        ring("a", "x b").check(header)
    assert caught.value.status == 401


def test_every_key_is_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, compared = ring("a", "b", "c"), []
    compare = hmac.compare_digest

    def counted(left: Any, right: Any) -> bool:
        compared.append((len(left), len(right)))
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for header in ("Bearer a", "Bearer c", "Bearer longer than all of them"):
        compared.clear()
        try:
            keys.check(header)
        except ApiError:
            assert "longer" in header
        assert compared == [(32, 32)] * 3


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = written(tmp_path, "# ours\none\n\n acme\ttwo=2 \nacme three\n")
    keys = load_api_keys(path)
    assert pairs(keys) == [("", "one"), ("acme", "two=2"), ("acme", "three")]
    assert [key.tenant for key in keys] == ["key-7692c3ad", "acme", "acme"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("acme s3cret # ours", "4 words; write KEY or NAME KEY"),
        ("s3cret/key= acme", "a name has up to 64 letters"),
        ("key-0123abcd s3cret", "those of keys without a name"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, line: str, words: str) -> None:
    path = written(tmp_path, f"# first\n{line}\n")
    with pytest.raises(ValueError, match=words) as caught:
        load_api_keys(path)
    assert f"{path}:2: " in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_file_without_keys_does_not_switch_keys_off(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no API key in it"):
        load_api_keys(written(tmp_path, "# nothing\n\n"))


def test_keys_in_a_variable() -> None:
    text = "one, acme=two,acme = dGhyZWU=,, Zm91cg==,=five,"
    assert pairs(parse_api_keys(text, "KEYS")) == [
        ("", "one"),
        ("acme", "two"),
        ("acme", "dGhyZWU="),
        ("", "Zm91cg=="),
        ("", "=five"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "KEYS is not set or holds no key"),
        (" , ,", "KEYS is not set or holds no key"),
        ("one,a b=s3cret", "KEYS, key 2: .*a name has up to"),
    ],
)
def test_a_variable_with_mistakes(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_api_keys(text, "KEYS")
    assert "s3cret" not in str(caught.value)


def test_keys_do_not_show() -> None:
    key = ApiKey.model_validate("acme s3cret")
    assert "s3cret" not in f"{key} {key!r} {key.model_dump_json()}"
    for odd in ({"key": ""}, {"key": "s3cret", "name": "s3cret!"}, "s3cret s3cret s3cret", 7):
        with pytest.raises(ValidationError) as caught:
            ApiKey.model_validate(odd)
        assert "s3cret" not in str(caught.value)


def test_one_key_has_one_tenant() -> None:
    def keys(*lines: str) -> list[ApiKey]:
        return [ApiKey.model_validate(line) for line in lines]

    twice = with_api_keys(CONFIG, keys("acme one", "acme one", "acme two"))
    assert KeyRing(twice.api_keys).check("Bearer one") == "acme"
    with pytest.raises(ValueError, match="acme and other have the same key"):
        with_api_keys(CONFIG, keys("acme s3cret", "other s3cret"))
    with pytest.raises(ValueError, match=r"key-[0-9a-f]{8} and acme have the same key"):
        with_api_keys(CONFIG, keys("s3cret", "acme s3cret"))


def test_an_unnamed_key_may_have_limits_too() -> None:
    limits = {"key-ca978112": {"max_requests": 1}}
    config = GatewayConfig.model_validate(
        {"models": [{"name": "tiny"}], "scheduling": {"admission": {"tenants": limits}}}
    )
    assert with_api_keys(config, [ApiKey(key=SecretStr("a"))]).api_keys
    with pytest.raises(ValueError, match="no API key has the name 'key-ca978112'"):
        with_api_keys(config, [ApiKey(key=SecretStr("b"))])


def test_operators_are_tenants_with_keys() -> None:
    config = GatewayConfig.model_validate({"models": [{"name": "tiny"}], "operators": ["ops"]})
    keys = [ApiKey.model_validate(line) for line in ("ops one", "ops two", "acme three")]
    ring = KeyRing(with_api_keys(config, keys).api_keys, config.operators)
    ring.check_operator("Bearer one")
    ring.check_operator("Bearer two")
    ring.check("Bearer three")
    with pytest.raises(ApiError, match="key of acme is not an operator's") as refused:
        ring.check_operator("Bearer three")
    assert (refused.value.status, refused.value.code) == (403, "not_an_operator")
    with pytest.raises(ApiError) as unknown:
        ring.check_operator("Bearer four")
    assert unknown.value.status == 401
    with pytest.raises(ValueError, match=r"gateway\.operators: no API key has the name 'ops'"):
        with_api_keys(config, keys[2:])


def test_without_named_operators_only_a_tenant_alone_is_one() -> None:
    keys = [ApiKey.model_validate(line) for line in ("acme one", "acme two", "other three")]
    alone = KeyRing(keys[:2])
    alone.check_operator("Bearer one")
    alone.check_operator("Bearer two")
    alone.replace(keys)
    for key in ("one", "two", "three"):
        with pytest.raises(ApiError, match="is not an operator's"):
            alone.check_operator(f"Bearer {key}")
    alone.set_operators(["other"])
    alone.check_operator("Bearer three")


def as_operator(keys: KeyRing, header: str | None) -> int:
    """The status that an operator's page would have."""
    try:
        keys.check_operator(header)
    except ApiError as refused:
        return refused.status
    return 200


@pytest.mark.parametrize(
    ("operators", "statuses"),
    [
        ((), [403, 403, 401, 401]),
        (("ops",), [200, 403, 401, 401]),
        (("ops", "acme"), [200, 200, 401, 401]),
    ],
)
def test_of_several_tenants_only_named_ones_are_operators(
    operators: tuple[str, ...], statuses: list[int]
) -> None:
    keys = KeyRing([ApiKey.model_validate(line) for line in ("ops one", "acme two")], operators)
    headers = ("Bearer one", "Bearer two", "Bearer three", None)
    assert [as_operator(keys, header) for header in headers] == statuses


def test_without_keys_everybody_is_an_operator() -> None:
    assert [as_operator(KeyRing([]), header) for header in ("Bearer one", None)] == [200, 200]


def test_which_tenants_have_names() -> None:
    tenants = ("acme", "key-of-acme", "", "key-ca978112")
    assert [tenant for tenant in tenants if is_named(tenant)] == ["acme", "key-of-acme"]
