"""The gateway and vLLM's own request models read the same in every body that both accept."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import at_once
from vllm_bodies import MODELS, addresses, bodies, read_by_vllm

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.intake.fields import TURNS, Body
from deploy.gateway.intake.inbound import InboundRequest, parsing_request
from deploy.gateway.openapi.bodies import body_schema

SALT = "the tenant's"
REFUSED_HERE = {"unsupported_parameter", "invalid_json"}
"""Bodies that are refused whatever engines make of them. All others must be refused by both."""
TRANSFER_PARAMS = {"kv_transfer_params", "ec_transfer_params"}
NUMBERS = {"n", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"}
ONLY_HERE = {"conversation", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"} | {
    "cache_salt",
    "priority",
    "request_id",
}
"""Fields that are checked at every endpoint: an engine that has them must not surprise."""


def fields_in_vllm(kind: Kind) -> set[str]:
    models, found = [MODELS[kind]], set[str]()
    while models:
        model = models.pop()
        models += get_args(model)  # of a union, whose members may be unions
        found |= getattr(model, "model_fields", {}).keys()
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_the_gateway_reads_the_fields_that_the_endpoint_has(kind: Kind) -> None:
    read = set(body_schema(kind)["properties"]) & set(Body.__struct_fields__)
    assert read - ONLY_HERE <= fields_in_vllm(kind)
    may_hold_media = {name for names in TURNS.values() for name in names}
    left = (fields_in_vllm(kind) - read) & set(Body.__struct_fields__)
    assert not left & (may_hold_media | NUMBERS)


@pytest.mark.parametrize("kind", MODELS)
@given(data=st.data())
def test_both_read_the_same(kind: Kind, data: st.DataObject) -> None:
    body = data.draw(bodies(kind))
    check(kind, body)


def check(kind: Kind, body: bytes) -> None:
    read = read_by_vllm(kind, body)
    parsed = parsed_here(kind, body)
    if isinstance(parsed, ApiError):
        assert parsed.status == 400
        # What engines pass over may be refused here all the same: a field that the endpoint does
        # not have, an address in a part of another type.
        name, *_ = re.split(r"[.[]", parsed.param or "model")
        is_passed_over = read is None or name not in read or "an address" in parsed.message
        assert is_passed_over or parsed.code in REFUSED_HERE, parsed.message
    elif read is not None:
        read = read_by_vllm(kind, parsed.body)
        assert read is not None
        check_read(kind, parsed, read)


def parsed_here(kind: Kind, body: bytes) -> InboundRequest | ApiError:
    try:
        return at_once(parsing_request(kind, body, template_tokens=0, salt_of=lambda own: SALT))
    except ApiError as refused:
        return refused


def check_read(kind: Kind, request: InboundRequest, read: dict[str, Any]) -> None:
    """`read` is what an engine reads in the body that it gets."""
    assert not TRANSFER_PARAMS & {name for name in read if read[name] is not None}
    assert not TRANSFER_PARAMS & (read.get("vllm_xargs") or {}).keys()
    assert read.get("cache_salt", SALT) == SALT
    assert read.get("priority", request.priority) == request.priority or request.may_go_first
    assert request.num_choices >= min(read.get("n") or 1, 1 << 40)
    for name in NUMBERS - {"n"}:
        assert request.max_output_tokens >= min(read.get(name) or 0, 1 << 40)
    decoded = {name: json.loads(request.body).get(name) for name in TURNS[kind]}
    found = {one.url for one in request.media_addresses}
    assert set(addresses(list(decoded.values()))) == found
    assert '"logo"' not in json.dumps(decoded)
    if kind == "completion" and read["prompt"] is not None:
        assert request.shape.num_prompts == num_prompts(read["prompt"])
        at_least = num_tokens(read["prompt"], read["truncate_prompt_tokens"])
        assert request.shape.at_most_tokens >= at_least


def num_prompts(prompt: Any) -> int:
    is_list = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return len(prompt) if is_list else 1


def num_tokens(prompt: Any, most: int | None) -> int:
    """Ids as they are; of texts no fewer than their characters may become."""
    prompts = prompt if prompt and isinstance(prompt[0], list) else [prompt]
    lengths = [len(ids) for ids in prompts if isinstance(ids, list) and ids and ids != prompt]
    lengths = lengths or ([len(prompt)] if isinstance(prompt, list) else [1])
    return sum(min(length, most) if most and most > 0 else length for length in lengths)
