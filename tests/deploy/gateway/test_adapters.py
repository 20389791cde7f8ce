"""LoRA adapters at the gateway: their names, and where one of a name has the same weights."""

from functools import partial
from typing import Any

import pytest
import report_cases
from pydantic import ValidationError

from deploy.gateway.cache.cached_prompt import PromptKeys
from deploy.gateway.config import GatewayConfig, ModelConfig
from deploy.gateway.errors import ApiError
from deploy.gateway.intake.accept import ServedModels
from deploy.gateway.serving.adapters import AdapterPlaces, adapter_places
from kvmanager.agent.messages import CacheModel
from scheduler.reports import ClusterReport, InstanceReport

TINY = ModelConfig(
    name="tiny", max_model_len=64, adapters={"poet": "/adapters/poet", "lawyer": "org/lawyer"}
)


def instance(name: str, identity: str | None = None, **changes: Any) -> InstanceReport:
    adapters = {} if identity is None else {"poet": identity}
    return report_cases.instance(name, **({"model": "tiny", "adapters": adapters} | changes))


cluster = partial(report_cases.cluster, "c")


def test_an_adapter_is_a_model_whose_parent_is_its_base() -> None:
    models = ServedModels([TINY, ModelConfig(name="other")])
    assert models.names == ("tiny", "poet", "lawyer", "other")
    assert models.resolve("poet") == ("tiny", "poet")
    assert models.resolve("tiny") == ("tiny", "")
    cards = {card.id: card for card in models.cards()}
    assert list(cards) == list(models.names)
    assert [card.parent for card in cards.values()] == [None, "tiny", "tiny", None]
    assert (cards["lawyer"].root, cards["lawyer"].max_model_len) == ("org/lawyer", 64)


def test_an_unknown_adapter_does_not_exist() -> None:
    with pytest.raises(ApiError, match=r"`judge` does not exist\. Served here: tiny, poet") as told:
        ServedModels([TINY]).resolve("judge")
    assert (told.value.status, told.value.code) == (404, "model_not_found")


def test_a_request_without_a_name_means_the_only_model_and_no_adapter() -> None:
    assert ServedModels([TINY]).resolve("") == ("tiny", "")
    with pytest.raises(ApiError):
        ServedModels([TINY, ModelConfig(name="other")]).resolve("")


@pytest.mark.parametrize("name", ["tiny", "poet", "other"])
def test_models_and_adapters_have_different_names(name: str) -> None:
    others = ModelConfig(name="other", adapters={name: "/a"})
    with pytest.raises(ValidationError, match="names must differ"):
        GatewayConfig(models=(TINY, others))


def test_an_adapter_is_usable_where_all_engines_tell_one_identity() -> None:
    prefill = {
        "same": cluster(
            instance("p0", "files:1"),
            instance("p1", "files:1"),
            instance("p8", draining=True),
            instance("p9", model="large"),
        ),
        "one does not tell": cluster(instance("p10", "files:1"), instance("p11")),
        "other": cluster(instance("p2", "files:2")),
        "both": cluster(instance("p3", "files:1"), instance("p4", "files:2")),
        "without": cluster(instance("p5")),
        "silent": None,
        "sick": cluster(instance("p6", "files:1", healthy=False)),
        "of another model": cluster(instance("p7", "files:1", model="large")),
    }
    found = adapter_places("tiny", "poet", cluster(instance("d0", "files:1")), prefill)
    assert found.identity == "files:1"
    assert found.without == set(prefill) - {"same"}


@pytest.mark.parametrize(
    "pd",
    [
        None,
        cluster(),
        cluster(instance("d0")),
        cluster(instance("d0", "files:1"), instance("d1")),
        cluster(instance("d0", "files:1"), instance("d1", "files:2")),
    ],
)
def test_without_one_identity_where_it_is_decoded_nobody_prefills(pd: ClusterReport | None) -> None:
    places = adapter_places("tiny", "poet", pd, {"far": cluster(instance("p0", "files:1"))})
    assert places == AdapterPlaces(None, frozenset({"far"}))
    assert places.identity_for("far", None) is places.identity_for("hand_off", None) is None


def test_what_lands_must_be_what_its_keys_say() -> None:
    def keys(adapter: str) -> PromptKeys:
        return PromptKeys(CacheModel("ab", 64, []), b"", (), adapter=adapter)

    places = AdapterPlaces("files:1", frozenset({"other"}))
    assert places.identity_for("far", None) == "files:1"
    assert places.identity_for("far", keys("files:1")) == "files:1"
    assert places.identity_for("far", keys("files:2")) is None
    assert places.identity_for("other", keys("files:1")) is None
    assert AdapterPlaces().identity_for("far", keys("")) == ""
