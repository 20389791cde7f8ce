"""Choices inside a local PD cluster, each with its reason."""

from collections.abc import Collection
from dataclasses import replace

from local_pd.placement import (
    Affinity,
    InstanceChoice,
    PdInstance,
    PrefillWish,
    choose_direct,
    choose_prefill,
    decode_order,
)
from scheduler.routing.front_placement import Room


def view(name: str, role: str = "both", **changes: object) -> PdInstance:
    fields: dict[str, object] = {"node": "n0", "model": "m"}
    return PdInstance(name=name, role=role, **(fields | changes))  # type: ignore[arg-type]


def wish(*, tried: Collection[str] = (), **cached_tokens: int) -> PrefillWish:
    return PrefillWish(2000, "m", cached_tokens, tried)


def test_decoders_are_asked_least_loaded_first() -> None:
    views = [
        view("d0", "decode", num_requests=3),
        view("p0", "prefill"),
        view("b0", "both", num_requests=1),
        view("d1", "decode", num_requests=2),
    ]
    assert decode_order(views, "m").names == ("b0", "d1", "d0")


def test_at_equal_load_one_with_a_prefill_instance_on_its_node_decodes() -> None:
    views = [
        view("d0", "decode", node="n0"),
        view("d1", "decode", node="n1"),
        view("p1", "prefill", node="n1"),
    ]
    assert decode_order(views, "m").names == ("d0", "d1")
    order = decode_order(views, "m", hands_off=True)
    assert order.names == ("d1", "d0")
    assert order.reason == "2 usable, least loaded first, at n1 with a prefill instance beside it"
    busy = [views[0], view("d1", "decode", node="n1", num_requests=1), views[2]]
    assert decode_order(busy, "m", hands_off=True).names == ("d0", "d1")
    full = [*views[:2], view("p1", "prefill", node="n1", num_prefills=4)]
    assert decode_order(full, "m", hands_off=True).names == ("d0", "d1")
    cached = Affinity(("n0",))
    assert decode_order(views, "m", cached, hands_off=True).names == ("d0", "d1")


def test_at_equal_load_the_landings_node_prefills() -> None:
    views = [view("p0", "prefill", node="n0"), view("p1", "prefill", node="n1")]
    wished = PrefillWish(2000, "m", node="n1")
    choice = choose_prefill(views, wished)
    assert choice.name == "p1"
    assert choice.reason.endswith("; on the landing's node")
    busy = [views[0], view("p1", "prefill", node="n1", num_prefills=1, prefill_tokens=900)]
    choice = choose_prefill(busy, wished)
    assert choice.name == "p0"
    assert "landing" not in choice.reason


def test_a_decoder_needs_engine_and_agent() -> None:
    views = [
        view("d0", transfers=False),
        view("d1", serves=False, transfers=False),
        view("d2", draining=True),
        view("d3", model="other"),
        view("p0", "prefill"),
    ]
    order = decode_order(views, "m")
    assert order.names == ()
    for part in (
        "d0 (both) node agent is not healthy",
        "d1 (both) engine is not healthy",
        "d2 (both) is draining",
        "d3 (both) serves other, not m",
    ):
        assert part in order.reason


def test_a_request_is_served_whole_without_an_agent() -> None:
    views = [view("d0", transfers=False, num_requests=1), view("d1", serves=False)]
    assert choose_direct(views, "m").name == "d0"


def test_prefill_instances_serve_whole_only_when_alone() -> None:
    views = [view("p0", "prefill"), view("d0", "decode", num_requests=9)]
    assert choose_direct(views, "m").name == "d0"
    assert choose_direct(views[:1], "m").name == "p0"


def test_one_that_drains_serves_whole_when_nothing_else_is_left() -> None:
    views = [
        view("p0", "prefill"),
        view("d0", "decode", draining=True, num_requests=5),
        view("d1", "decode", draining=True, num_requests=6),
        view("d2", draining=True, serves=False),
        view("d3", draining=True, model="other"),
    ]
    assert choose_direct(views, "m").name == "p0"
    assert choose_direct(views[1:], "m").name == "d0"
    assert choose_direct(views[3:], "m").name is None


def test_no_instance_to_serve_whole_is_explained() -> None:
    choice = choose_direct([view("d0", serves=False)], "m")
    assert choice.name is None
    assert "d0" in choice.reason
    assert "none configured" in choose_direct([], "m").reason


def test_a_local_prefill_goes_to_the_least_busy_prefill_instance() -> None:
    views = [
        view("p0", "prefill", num_prefills=1, prefill_tokens=4000),
        view("p1", "prefill", num_prefills=2, prefill_tokens=1000),
        view("b0", "both"),
    ]
    assert choose_prefill(views, wish()) == InstanceChoice(
        "p1", "least_loaded; cached_tokens=0; tokens_ahead=1000; instances=2", 2000
    )
    assert choose_prefill(views, wish(tried=["p1"])).name == "p0"
    assert choose_prefill(views, wish(tried=["p0", "p1"])).name is None


def test_full_prefill_instances_are_a_reason_to_decode_without_them() -> None:
    choice = choose_prefill([view("p0", "prefill", num_prefills=4, room=Room(4))], wish())
    assert choice.name is None
    assert "full (jobs: p0 4)" in choice.reason


def test_any_model_will_do_when_none_is_named() -> None:
    assert choose_direct([view("d0", model="other")], "").name == "d0"
    assert choose_direct([view("d0", model="")], "m").name == "d0"


def test_nodes_that_have_the_prefix_come_first_while_they_are_not_much_busier() -> None:
    views = [
        view("d0", "decode", node="n0", num_requests=1),
        view("d1", "decode", node="n1", num_requests=5),
        view("d2", "decode", node="n2", num_requests=4),
    ]
    order = decode_order(views, "m", Affinity(("n1", "n2")))
    assert order.names == ("d1", "d2", "d0")
    assert "cached at n1" in order.reason
    busy = [*views[:1], view("d1", "decode", node="n1", num_requests=6), views[2]]
    order = decode_order(busy, "m", Affinity(("n1", "n2")))
    assert order.names == ("d2", "d0", "d1")
    assert "cached at n2" in order.reason
    order = decode_order(busy, "m", Affinity(("n1",), slack=1))
    assert order.names == ("d0", "d2", "d1")
    assert "over 1 more" in order.reason


def test_a_preferred_node_serves_whole_but_not_on_its_prefill_instance() -> None:
    views = [
        view("d0", node="n0"),
        view("d1", node="n1", num_requests=3),
        view("p1", "prefill", node="n1"),
    ]
    choice = choose_direct(views, "m", Affinity(("n1",)))
    assert choice.name == "d1"
    assert choice.reason == "3 requests, part of the prompt is cached at n1"
    choice = choose_direct(views, "m", Affinity(("n9",)))
    assert choice.name == "d0"
    assert "no instance" in choice.reason


def test_a_local_prefill_goes_where_part_of_it_is_cached_if_there_is_room() -> None:
    views = [
        view("p0", "prefill", node="n0"),
        view("p1", "prefill", node="n1", num_prefills=3, prefill_tokens=1000),
    ]
    choice = choose_prefill(views, wish(n1=1500))
    assert (choice.name, choice.uncached_tokens) == ("p1", 500)
    assert choice.reason.startswith("cached; cached_tokens=1500; tokens_ahead=1000")
    assert choose_prefill(views, wish(p1=1500)).name == "p1"
    choice = choose_prefill(views, wish(n1=500))
    assert (choice.name, choice.uncached_tokens) == ("p0", 2000)
    assert choice.reason.startswith("holder_busy")
    full = [views[0], view("p1", "prefill", node="n1", num_prefills=4)]
    assert choose_prefill(full, wish(n1=1500)).name == "p0"


OLD, NEW = {"layout_fingerprint": "a", "layout": "GQA"}, {"layout_fingerprint": "b"}


def test_who_decodes_can_use_what_is_prefilled() -> None:
    views = [view("d0", **OLD), view("d1", "decode", **NEW), view("d2")]
    assert decode_order(views, "m").names == ("d0", "d1", "d2")
    assert decode_order(views, "m", layouts=("b",)).names == ("d1", "d2")
    assert decode_order(views, "m", layouts=("a", "b")).names == ("d0", "d1", "d2")
    none = decode_order(views[:1], "m", layouts=("b",))
    assert none.names == ()
    said = "d0 (both) lays KVCache out otherwise than what is prefilled: GQA"
    assert none.reason == f"no instance can decode: {said}"


def test_who_decodes_can_use_what_is_prefilled_beside_it() -> None:
    views = [view("d0", **OLD), view("d1", "decode", **NEW), view("p0", "prefill", **NEW)]
    assert decode_order(views, "m", hands_off=True).names == ("d1",)
    assert decode_order(views, "m").names == ("d0", "d1")
    # One that has not said what it has may fit all.
    unknown = [*views, view("p1", "prefill")]
    assert decode_order(unknown, "m", hands_off=True).names == ("d0", "d1")
    assert decode_order(views[:2], "m", hands_off=True).names == ("d0", "d1")


def test_who_prefills_lays_kvcache_out_as_the_landing() -> None:
    views = [view("p0", "prefill", **OLD), view("p1", "prefill", num_prefills=1, **NEW)]
    assert choose_prefill(views, wish()).name == "p0"
    assert choose_prefill(views, replace(wish(), layout_fingerprint="b")).name == "p1"
    none = choose_prefill(views[:1], replace(wish(), layout_fingerprint="b"))
    assert none.name is None
    said = "p0 (prefill) lays KVCache out otherwise than the landing: GQA"
    assert none.reason == f"no instance can prefill: {said}"


def test_an_instance_that_encodes_gets_no_other_work() -> None:
    views = [view("e0", "encode"), view("d0", "decode", num_requests=9), view("p0", "prefill")]
    assert decode_order(views, "m").names == ("d0",)
    assert choose_direct(views, "m").name == "d0"
    assert choose_prefill(views, wish()).name == "p0"
    # Not even when there is nothing else: it may lack the language model.
    alone = [view("e0", "encode"), view("d0", "decode", serves=False, transfers=False)]
    choice = choose_direct(alone, "m")
    assert choice.name is None
    assert "e0 (encode) is of another role" in choice.reason
    assert not decode_order(alone, "m").names
    assert choose_prefill(alone, wish()).name is None


def test_a_prompt_with_media_goes_to_engines_with_an_encoder() -> None:
    views = [
        view("d0", "decode", text_only=True),
        view("d1", "decode", num_requests=9),
        view("p0", "prefill", text_only=True),
        view("p1", "prefill", num_prefills=3, prefill_tokens=900),
    ]
    assert decode_order(views, "m", has_media=True).names == ("d1",)
    assert choose_direct(views, "m", has_media=True).name == "d1"
    assert choose_prefill(views, PrefillWish(2000, "m", has_media=True)).name == "p1"
    # Text goes everywhere.
    assert decode_order(views, "m").names == ("d0", "d1")
    assert choose_direct(views, "m").name == "d0"
    assert choose_prefill(views, wish()).name == "p0"
    alone = [views[0], views[2]]
    assert choose_direct(alone, "m", has_media=True).name is None
    assert choose_prefill(alone, PrefillWish(2000, "m", has_media=True)).name is None
