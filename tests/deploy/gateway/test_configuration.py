"""Configuration errors name their key; API keys come from files and the environment."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr, ValidationError

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.config import GatewayConfig
from deploy.gateway.file import (
    GatewayFile,
    agent_clients,
    build_caches,
    build_clusters,
    build_region,
    load_gateway_file,
)
from kvmanager.config_files.problems import FileError
from prfaas.embedded import EmbeddedPrefillCluster
from prfaas.queue_values import QueueConfig
from scheduler.routing.order_config import LengthBucket, OrderConfig


def test_configuration_errors_name_the_key() -> None:
    models = [{"name": "a"}]
    for odd in (
        {"models": []},
        {"models": models, "threshold_tokens": -1},
        {"models": models, "surprise": 1},
        {"models": models * 2},
        {"models": models, "report_interval_s": 5, "report_stale_s": 5},
        {"models": models, "report_stale_s": 30.5},
        {"models": models, "timeouts": {"drain_s": float("inf")}},
        {"models": models, "directory": {"kind": "grpc"}},
        {"models": models, "directory": {"kind": "redis", "target": "x:1"}},
        {"models": models, "directory": {"target": "x:1"}},
    ):
        with pytest.raises(ValidationError):
            GatewayConfig.model_validate(odd)


def write(folder: Path, content: Any) -> Path:
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def api_key(key: str, name: str = "") -> ApiKey:
    return ApiKey(key=SecretStr(key), name=name)


def minimal(**more: Any) -> dict[str, Any]:
    return {
        "gateway": {"models": [{"name": "tiny"}]},
        "pd": {"name": "home", "front": "127.0.0.1:7301"},
        "prefill": [{"name": "far", "front": "127.0.0.1:7302", "link": "far-to-home"}],
    } | more


def test_a_gateway_file_is_read_with_its_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\none\n\n two \n")
    path = write(tmp_path, minimal(api_keys_file=str(tmp_path / "keys")))
    loaded = load_gateway_file(path)
    assert loaded.gateway.api_keys == (api_key("one"), api_key("two"))
    assert loaded.prefill[0].link == "far-to-home"
    path = write(tmp_path, minimal(api_keys_env="KEYS"))
    assert load_gateway_file(path, {"KEYS": "a, acme=b,"}).gateway.api_keys == (
        api_key("a"),
        api_key("b", "acme"),
    )
    path = write(tmp_path, minimal(gateway={"models": [{"name": "tiny"}], "api_keys": ["acme c"]}))
    assert load_gateway_file(path, {}).gateway.api_keys == (api_key("c", "acme"),)


SEVERAL = {
    "pd": [
        {"name": "home", "front": "127.0.0.1:7301"},
        {"name": "north", "front": "127.0.0.1:7303", "spill": "never"},
    ],
    "prefill": [
        {"name": "far", "front": "127.0.0.1:7302", "link": "wide"},
        {"name": "near", "front": "127.0.0.1:7304", "link": {"north": "near-to-north"}},
    ],
}


async def test_a_gateway_file_may_have_several_pd_clusters(tmp_path: Path) -> None:
    gateway = {"models": [{"name": "tiny"}], "home": "north", "homes": {"ann": "home"}}
    path = write(tmp_path, minimal(**SEVERAL, gateway=gateway, api_keys_env="KEYS"))
    loaded = load_gateway_file(path, {"KEYS": "ann=a"})
    assert [source.spill for source in loaded.pd] == ["overflow", "never"]
    assert list(loaded.links()) == [
        ("far", "home", "wide"),
        ("far", "north", "wide"),
        ("near", "north", "near-to-north"),
    ]
    clusters = build_clusters(loaded)
    assert [front.name for front in clusters.pds] == ["home", "north"]
    await clusters.close()


async def test_the_order_of_queues_reaches_embedded_fronts(tmp_path: Path) -> None:
    instance = {"name": "p0", "url": "http://127.0.0.1:8100", "agent": "127.0.0.1:7101"}
    path = write(
        tmp_path,
        minimal(
            gateway={
                "models": [{"name": "tiny"}],
                "scheduling": {"queue": {"patience_s": 9.0, "buckets": [{"share": 1.0}]}},
            },
            prefill=[{"name": "far", "instances": [instance], "max_queued": 7}],
        ),
    )
    front = build_clusters(load_gateway_file(path, {})).prefill["far"].cluster
    assert isinstance(front, EmbeddedPrefillCluster)
    assert front._config.queue == QueueConfig(
        max_queued=7,
        order=OrderConfig(buckets=(LengthBucket(math.inf, 1.0),), patience_s=9.0),
    )


def limited(folder: Path, **more: Any) -> Path:
    scheduling = {"admission": {"tenants": {"acme": {"max_requests": 4}}}}
    return write(
        folder, minimal(gateway={"models": [{"name": "tiny"}], "scheduling": scheduling}, **more)
    )


def test_limits_of_tenants_are_read(tmp_path: Path) -> None:
    path = limited(tmp_path, api_keys_env="KEYS")
    admission = load_gateway_file(path, {"KEYS": "acme=b"}).gateway.scheduling.admission
    assert admission.tenants["acme"].max_requests == 4


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        ({"team": ["ann", "zoe"]}, "gateway.shared_caches: no API key has the name 'zoe'"),
        ({"team": ["ann"], "all": ["ann", "bob"]}, "ann may be in one group only"),
    ],
)
def test_groups_that_share_are_of_tenants_with_keys_and_apart(
    tmp_path: Path, shared: dict[str, list[str]], words: str
) -> None:
    gateway = {"models": [{"name": "tiny"}], "shared_caches": shared}
    path = write(tmp_path, minimal(gateway=gateway, api_keys_env="KEYS"))
    with pytest.raises(FileError, match=words):
        load_gateway_file(path, {"KEYS": "ann=a,bob=b"})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "none, as there are no API keys"),
        ({"api_keys_env": "KEYS"}, "tenants with keys: acme2, key-ca978112"),
    ],
)
def test_limits_of_a_tenant_without_a_key_are_a_mistake(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(FileError) as caught:
        load_gateway_file(limited(tmp_path, **more), {"KEYS": "a,acme2=b"})
    assert "no API key has the name 'acme'" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pd": {"name": "home"}}, "pd[0] (line "),
        (
            {"pd": {"name": "home", "front": "x:1", "instances": [{"name": "d", "agent": "a"}]}},
            "pd",
        ),
        ({"gateway": {"models": [{"name": "x", "color": 1}]}}, "gateway.models[0].color"),
        (
            {"gateway": {"scheduling": {"long_term": {"drain_limit_s": 1200}}}},
            "drain_limit_s 1200 must be above 0 and at most 900",
        ),
        ({"api_keys_env": "NOT_SET"}, "NOT_SET"),
        ({"api_keys_env": "A", "api_keys_file": "b"}, "not both"),
        ({"api_keys_file": "no/such/file"}, "no/such/file"),
        ({"prefill": [{"name": "f", "front": "x:1"}, {"name": "f", "front": "x:2"}]}, "same name"),
        ({"prefill": [{"name": "home", "front": "x:1"}]}, "same name"),
        ({"pd": []}, "at least 1 item"),
        (
            {"prefill": [{"name": "f", "front": "x:1", "link": {"hime": "l"}}]},
            "f has no PD cluster 'hime' to send to; did you mean 'home'?",
        ),
        ({"prefill": [{"name": "f", "front": "x:1", "link": {}}]}, "f has no link"),
        (
            {"gateway": {"models": [{"name": "tiny"}], "home": "hime"}},
            "no PD cluster is called 'hime'; did you mean 'home'?",
        ),
        (
            {"gateway": {"models": [{"name": "tiny"}], "homes": {"ann": "home"}}},
            "gateway.homes: no API key has the name 'ann'",
        ),
    ],
)
def test_mistakes_in_a_gateway_file_are_named(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(FileError, match=r"gateway\.yaml: ") as caught:
        load_gateway_file(write(tmp_path, minimal(**change)), {})
    assert words in str(caught.value)


def test_a_key_file_without_keys_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# nothing\n")
    with pytest.raises(FileError, match="no API key"):
        load_gateway_file(write(tmp_path, minimal(api_keys_file=str(tmp_path / "keys"))))


@pytest.mark.parametrize(
    "directory",
    [
        {},
        {"kind": "grpc", "target": "127.0.0.1:1"},
        {"kind": "redis", "url": "redis://127.0.0.1:1/0"},
    ],
)
async def test_a_directory_of_every_kind_is_made_as_told(directory: dict[str, str]) -> None:
    file = GatewayFile.model_validate(
        minimal(gateway={"models": [{"name": "tiny"}], "directory": directory})
    )
    caches = build_caches(file, agent_clients(file))
    assert caches.targets == {}
    await caches.close()


def test_a_wrong_url_of_a_directory_is_named() -> None:
    directory = {"kind": "redis", "url": "nowhere"}
    file = GatewayFile.model_validate(
        minimal(gateway={"models": [{"name": "tiny"}], "directory": directory})
    )
    with pytest.raises(FileError, match=r"gateway\.directory\.url"):
        build_caches(file, agent_clients(file))


def test_what_gateways_share_is_in_the_server_that_is_named() -> None:
    models = [{"name": "tiny"}]
    there = {"kind": "redis", "url": "redis://127.0.0.1:1/0"}
    assert build_region(GatewayFile.model_validate(minimal(gateway={"models": models}))) is None
    own = {"models": models, "shared": {"redis": "redis://127.0.0.1:2/0"}}
    same = {"models": models, "shared": {}, "directory": there}
    for gateway, port in ((own, 2), (same, 1)):
        region = build_region(GatewayFile.model_validate(minimal(gateway=gateway)))
        assert region is not None
        assert region.redis.connection_pool.connection_kwargs["port"] == port
    wrong = {"models": models, "shared": {"redis": "nowhere"}}
    with pytest.raises(FileError, match=r"gateway\.shared\.redis"):
        build_region(GatewayFile.model_validate(minimal(gateway=wrong)))
    far = {"models": models, "shared": {"redis": "redis://:secret@far"}}
    with pytest.raises(ValidationError, match="write rediss://") as caught:
        GatewayFile.model_validate(minimal(gateway=far))
    assert "secret" not in str(caught.value.errors(include_input=False))
