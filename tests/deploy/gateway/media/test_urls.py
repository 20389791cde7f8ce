"""What an address says of itself decides whether it is looked at any further."""

from typing import Any

import pytest
from pydantic import ValidationError
from yarl import URL

from deploy.gateway.media.addresses import AddressRules
from deploy.gateway.media.config import MediaSection
from deploy.gateway.media.urls import MAX_URL_CHARS, Refusal, Refused, checked_url


def reason(text: str, before: str | None = None, **settings: Any) -> Refusal | None:
    config = MediaSection.of(**settings)
    rules = AddressRules(config.private_networks, config.refused_networks)
    try:
        checked_url(text, config, rules, None if before is None else URL(before))
    except Refused as refused:
        return refused.reason
    return None


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/a.png",
        "http://example.org/a%20b.png?x=1#top",
        "HTTPS://EXAMPLE.ORG:443/",
        "http://8.8.8.8/a.png",
        "http://[2606:4700:4700::1111]/a.png",
        "https://bücher.example/ä.png",
        # Names, whatever the resolver makes of them: its answer is checked.
        "http://localhost/",
        "http://127.1/",
    ],
)
def test_usable_addresses(text: str) -> None:
    assert reason(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Refusal.SCHEME),
        ("a.png", Refusal.SCHEME),
        ("//example.org/a.png", Refusal.SCHEME),
        ("file:///etc/passwd", Refusal.SCHEME),
        ("ftp://example.org/a.png", Refusal.SCHEME),
        ("gopher://example.org/", Refusal.SCHEME),
        ("unix:///run/x.sock", Refusal.SCHEME),
        ("javascript:alert(1)", Refusal.SCHEME),
        ("http:///a.png", Refusal.URL),
        ("http://", Refusal.URL),
        ("http://exam ple.org/", Refusal.URL),
        ("http://example.org/\r\nHost: internal", Refusal.URL),
        ("http://example.org\\@127.0.0.1/", Refusal.URL),
        ("http://[::1", Refusal.URL),
        ("http://example.org:x/", Refusal.URL),
        ("http://example.org:99999/", Refusal.URL),
        ("http://example.org/" + "a" * MAX_URL_CHARS, Refusal.URL),
        ("http://user:password@example.org/", Refusal.CREDENTIALS),
        ("http://user@example.org/", Refusal.CREDENTIALS),
        ("http://:@example.org/", Refusal.CREDENTIALS),
        ("http://example.org:22/", Refusal.PORT),
        ("http://example.org:8000/", Refusal.PORT),
        ("http://example.org:0/", Refusal.PORT),
        ("http://127.0.0.1/", Refusal.ADDRESS),
        ("http://10.0.0.1/", Refusal.ADDRESS),
        ("http://169.254.169.254/latest/meta-data/", Refusal.ADDRESS),
        ("http://[::1]/", Refusal.ADDRESS),
        ("http://[::ffff:127.0.0.1]/", Refusal.ADDRESS),
        ("http://[fe80::1%25eth0]/", Refusal.ADDRESS),
        ("http://１２７.0.0.1/", Refusal.ADDRESS),
    ],
)
def test_refused_addresses(text: str, expected: Refusal) -> None:
    assert reason(text) is expected


def test_an_operator_chooses_schemes_ports_domains_and_networks() -> None:
    assert reason("http://example.org/", schemes=("https",)) is Refusal.SCHEME
    assert reason("http://example.org:8080/", ports=(8080,)) is None
    assert reason("http://127.0.0.1/", private_networks=("127.0.0.0/8",)) is None
    assert reason("http://8.8.8.8/", refused_networks=("8.0.0.0/8",)) is Refusal.ADDRESS
    some: dict[str, Any] = {"domains": ("Media.example.org", "*.cdn.example")}
    for host, is_allowed in {
        "media.example.org": True,
        "MEDIA.example.org": True,
        "media.example.org.": True,
        "a.media.example.org": False,
        "example.org": False,
        "a.cdn.example": True,
        "a.b.cdn.example": True,
        "cdn.example": False,
        "xcdn.example": False,
        "cdn.example.evil.org": False,
        "8.8.8.8": False,
    }.items():
        expected = None if is_allowed else Refusal.DOMAIN
        assert reason(f"http://{host}/a.png", **some) is expected, host


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/b.png", None),
        ("b.png", None),
        ("https://example.com/", None),
        ("//example.com/b.png", None),
        ("http://example.com/", Refusal.SCHEME),
        ("file:///etc/passwd", Refusal.SCHEME),
        ("https://127.0.0.1/", Refusal.ADDRESS),
        ("https://u:p@example.com/", Refusal.CREDENTIALS),
        ("https://example.com:8443/", Refusal.PORT),
    ],
)
def test_a_redirect_is_checked_as_the_first_address(
    location: str, expected: Refusal | None
) -> None:
    assert reason(location, before="https://example.org/a.png") is expected


def test_a_redirect_may_lead_to_https() -> None:
    assert reason("https://example.org/a.png", before="http://example.org/a.png") is None


@pytest.mark.parametrize(
    "settings",
    [
        {"fetch": "engine"},
        {"fetch": "engine", "domains": ["*.example.org"]},
        {"domains": ["http://example.org"]},
        {"domains": [""]},
        {"domains": ["*"]},
        {"private_networks": ["10.0.0.1/8"]},
        {"schemes": ["ftp"]},
        {"schemes": []},
        {"ports": []},
        {"max_bytes": 0},
        {"unknown": 1},
    ],
)
def test_settings_that_mean_nothing_are_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MediaSection.model_validate(settings)
