"""Which engines of one name cannot use each other's KVCache."""

import msgspec

from deploy.region.cache_identity import unlike_engines
from kvmanager.agent.messages import EngineStatus, StatusReply


def agent(*engines: EngineStatus) -> StatusReply:
    told = {
        "num_landings": {},
        "num_outboxes": {},
        "engines": list(engines),
        "links": [],
        "data_endpoint": "",
    }
    num_required = len(StatusReply.__struct_fields__) - len(StatusReply.__struct_defaults__)
    zero = dict.fromkeys(StatusReply.__struct_fields__[:num_required], 0)
    return msgspec.convert({**zero, **told, "uptime_s": 0.0}, StatusReply)


def engine(instance: str, fingerprint: str, weights: str, model: str = "m") -> EngineStatus:
    return EngineStatus(
        instance, 2, 1, f"layout of {instance}", fingerprint, model=model, weights=weights
    )


def test_another_checkpoint_under_one_name_is_told_with_both_identities() -> None:
    swapped = [agent(engine("p", "f1", "files:1")), agent(engine("d", "f2", "files:2"))]
    (sentence,) = unlike_engines(swapped)
    assert sentence == "the weights of m are files:1 at p, but files:2 at d; they share no KVCache"


def test_another_layout_of_the_same_weights_is_told_too() -> None:
    (sentence,) = unlike_engines([agent(engine("p", "f1", "w"), engine("d", "f2", "w"))])
    assert "laid out as layout of p (f1) at p, but as layout of d (f2) at d" in sentence


def test_all_engines_of_both_groups_are_named() -> None:
    agents = [
        agent(engine("p1", "f1", "w"), engine("p0", "f1", "w")),
        agent(engine("d0", "f2", "w"), engine("d1", "f1", "w"), engine("e", "", "w")),
    ]
    (sentence,) = unlike_engines(agents)
    assert "(f1) at d1, p0, p1, but as" in sentence
    assert "(f2) at d0; they share no KVCache" in sentence


def test_engines_that_share_are_not_mentioned_nor_are_other_models() -> None:
    same = agent(engine("p", "f1", "w"), engine("q", "f1", "w"))
    assert unlike_engines([same, agent(engine("o", "f2", "x", model="other"))]) == []


def test_adapters_of_one_name_that_differ_are_told() -> None:
    def tuned(instance: str, identity: str, model: str = "m") -> EngineStatus:
        same = engine(instance, "f1", "w", model)
        return msgspec.structs.replace(same, adapters={"poet": identity})

    agents = [
        agent(tuned("p", "files:1"), engine("q", "f1", "w")),
        agent(tuned("d1", "files:2"), tuned("d0", "files:2")),
    ]
    assert unlike_engines(agents) == [
        "the adapter poet of m is files:1 at p, but files:2 at d0, d1; they share no KVCache of it"
    ]
    assert unlike_engines([agent(tuned("p", "files:1"), tuned("d", "files:1"))]) == []
    of_another = tuned("o", "files:2", "other")
    assert unlike_engines([agent(tuned("p", "files:1"), of_another)]) == []
