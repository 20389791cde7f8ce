"""Every message may grow: who does not know a field ignores it, and a field may be missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from kvmanager.agent.engines.instances import EngineNotServed, InstanceBook
from kvmanager.agent.engines.protocol import EngineHello
from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, KVPart
from tests.upgrade.messages import breaks, message_types, schemas
from tests.upgrade.mixed_region import NEW, unpack_previous
from transport.grants import Grant, Granted

TYPES = {found.__name__: found for found in message_types()}
FILE = Path(__file__).with_name("messages.json")
PREVIOUS = json.loads(FILE.read_text())
NOW = schemas()
OTHER_FORMAT = {
    "KVLayer": ["page_bytes is gone, and was needed", "parts is new, and needed"],
    "KVLayout": [
        "cache_dtype is gone, and was needed",
        "memory_order is gone, and was needed",
    ],
}
"""Layouts are of format 2, those of the release before of format 1. Only engines and their own node
agents exchange them, and each side refuses the other's.
"""
NEW_ROLE = (
    "role has another type: {'enum': ['both', 'decode', 'prefill']}, "
    "now {'enum': ['both', 'decode', 'encode', 'prefill']}"
)
NEW_VALUES = {
    "InstanceReport": [NEW_ROLE],
    "RoleStatus": [NEW_ROLE],
    "RoleChange": [
        "role has another type: {'enum': ['decode', 'prefill']}, "
        "now {'enum': ['decode', 'encode', 'prefill']}"
    ],
}
"""The role encode is sent only in a region whose file has it, and the release before refuses that
file: docs/upgrade.md says that files change when every host has the new release.
"""
_PLACE = ("arena_epoch", "runs")
_TRANSFER = ("arena_epoch", "layout_fingerprint", "num_tokens", "runs")
FROM_THE_AGENT = {
    name: [f"{field} is gone, and was needed" for field in fields]
    for name, fields in {
        "ReserveReply": _PLACE,
        "OpenOutboxReply": _PLACE,
        "StatusReply": ("arena_epoch",),
        "DecodeSlot": ("kv_transfer_params",),
        "TransferParams": _TRANSFER,
        "ProducerParams": _TRANSFER,
        "ConsumerParams": (*_TRANSFER, "token_digest"),
    }.items()
} | {"Landed": [f"{field} is new, and needed" for field in ("num_tokens", "runs", "token_digest")]}
"""What a transfer is and where it lies, the agent says to its engines, since version 6 of their
protocol. Each side refuses an older one.
"""
ALLOWED = OTHER_FORMAT | NEW_VALUES | FROM_THE_AGENT
GONE = {"LinkTotals"}
"""Parts of messages that nobody but their sender read: `LinkEstimate` has these counters now."""
STRICT = {Grant, Granted}
"""A field that an agent does not know may be one more condition, so it refuses the grant."""


def example(kind: inspect.Type) -> Any:
    """A plain value of this type, as it is encoded, with nothing that may be left out."""
    match kind:
        case inspect.StructType(cls=cls):
            return least(cls)
        case inspect.DataclassType(fields=parts):
            return {part.encode_name: example(part.type) for part in parts if part.required}
        case inspect.IntType(ge=ge, gt=gt):
            return ge if ge is not None else 0 if gt is None else gt + 1
        case inspect.FloatType():
            return 0.5
        case inspect.StrType(min_length=length):
            return "a" * (length or 0)
        case inspect.BytesType(min_length=length):
            return b"a" * (length or 0)
        case inspect.BoolType():
            return True
        case inspect.NoneType():
            return None
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case inspect.ListType() | inspect.VarTupleType():
            return []
        case inspect.TupleType(item_types=items):
            return [example(item) for item in items]
        case inspect.DictType():
            return {}
        case inspect.UnionType(types=types):
            return example(types[0])
        case _:
            raise NotImplementedError(str(kind))


def fields(cls: type[msgspec.Struct]) -> dict[str, inspect.Field]:
    found = inspect.type_info(cls)
    assert isinstance(found, inspect.StructType)
    return {field.encode_name: field for field in found.fields}


def least(cls: type[msgspec.Struct]) -> dict[str, Any] | list[Any]:
    """The fields that a message of this type must have."""
    config = cls.__struct_config__
    needed = {name: example(field.type) for name, field in fields(cls).items() if field.required}
    if config.array_like:
        return list(needed.values())
    return ({} if config.tag is None else {config.tag_field: config.tag}) | needed


@pytest.mark.parametrize("name", TYPES)
def test_a_message_may_have_a_field_more_or_less(name: str) -> None:
    cls = TYPES[name]
    message = least(cls)

    def read(sent: Any) -> Any:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=cls)

    short = read(message)
    assert isinstance(short, cls)
    if isinstance(message, list):
        return
    if cls in STRICT:
        with pytest.raises(msgspec.ValidationError, match="unknown field"):
            read(message | {"of the future": 1})
    else:
        assert read(message | {"of the future": {"a": [1]}}) == short
    # A release that knows all of them, and one that knows one less.
    whole = {key: example(field.type) for key, field in fields(cls).items()} | message
    read(whole)
    for key in whole.keys() - message.keys():
        read({other: value for other, value in whole.items() if other != key})


@pytest.mark.parametrize("name", sorted(PREVIOUS.keys() - GONE))
def test_a_message_of_the_release_before_is_understood_and_understands(name: str) -> None:
    assert name in NOW, "the release before this one sends it"
    assert breaks(PREVIOUS[name], NOW[name]) == ALLOWED.get(name, [])


def test_an_agent_refuses_an_engine_of_the_release_before_and_says_why() -> None:
    groups = [{"kind": "full", "tokens_per_block": 16, "layers": [{"name": "a", "page_bytes": 9}]}]
    texts = dict.fromkeys(("model_id", "weights", "config_digest", "cache_dtype"), "a")
    layout = {**texts, "memory_order": "b", "tp_size": 1, "groups": groups, "format_version": 1}
    assert layout.keys() == PREVIOUS["KVLayout"]["properties"].keys()
    book = InstanceBook()
    hello = EngineHello("d0", "scheduler", 1, msgspec.msgpack.encode(layout))
    with pytest.raises(EngineNotServed, match="format 1 is not 2: both sides must run the same re"):
        book.join(1, hello)
    assert book.describe() == []


def test_what_breaks_a_message_is_found() -> None:
    number, text = {"type": "integer"}, {"type": "string"}
    old = {"properties": {"a": number, "b": number}, "required": ["a"]}
    assert not breaks(old, old)
    assert not breaks(old, {"properties": {"a": number, "c": text}, "required": ["a"]})
    for properties, required, words in (
        ({"b": number}, [], "a is gone, and was needed"),
        ({"a": number, "b": text}, ["a"], "b has another type"),
        ({"a": number, "b": number}, ["a", "b"], "b is needed now"),
        ({"a": number, "c": text}, ["a", "c"], "c is new, and needed"),
    ):
        (found,) = breaks(old, {"properties": properties, "required": required})
        assert found.startswith(words)
    (found,) = breaks(old, old | {"additionalProperties": False})
    assert found.startswith("it has another shape")


@pytest.mark.upgrade
def test_an_agent_of_the_release_before_refuses_an_engine_of_this_one(tmp_path: Path) -> None:
    tree = unpack_previous(tmp_path / "tree")
    code = (
        "import sys\n"
        "from kvmanager.layout import KVLayout, LayoutError\n"
        "try:\n"
        "    KVLayout.decode(sys.stdin.buffer.read())\n"
        "except LayoutError as error:\n"
        "    print(error)\n"
    )
    part = KVPart("kv", 1, 256, "bfloat16")
    group = KVGroup(KVKind.FULL, 16, (KVLayer("a", (part,)),))
    told = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tree,
        env={"PYTHONPATH": str(tree)},
        input=KVLayout("m", "files:0", "0", 1, (group,)).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    assert b"not a KV layout: Object missing required field" in told.stdout


@pytest.mark.upgrade
def test_the_messages_of_the_release_before_are_those_in_the_file(tmp_path: Path) -> None:
    tree = unpack_previous(tmp_path / "tree")
    told = subprocess.run(
        [sys.executable, "-P", str(NEW / "tests" / "upgrade" / "messages.py")],
        cwd=tree,
        env={"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert json.loads(told.stdout) == PREVIOUS
