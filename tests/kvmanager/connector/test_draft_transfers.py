"""A worker's part in transfers with and without a drafter, and the rest of a page that lands."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from recording_client import RecordingClient
from simple_layouts import attention, layout

from kvmanager.agent.engines.protocol import Welcome
from kvmanager.arena import Arena
from kvmanager.layout import KVGroup, KVKind
from kvmanager.vllm_connector.metadata import LoadStep, PrfaasMetadata, SendStep, TransferRef
from kvmanager.vllm_connector.slabs import PartView, Piece
from kvmanager.vllm_connector.worker import WorkerSide

TOKENS = 16
HEADS, DIM = 2, 4
TARGET = attention("layers.0", HEADS, DIM)
DRAFT = replace(attention("mtp.layers.0", HEADS, DIM), is_draft=True)
LAYOUT = replace(layout(KVGroup(KVKind.FULL, TOKENS, (TARGET, DRAFT))), draft_digest="mtp")
OWN = LAYOUT.draft_fingerprint.hex()
TID = bytes(range(16))
NUM_TOKENS = 20
"""One page, and four tokens of another."""


class Engine:
    """A worker with four pages of ones for each of two layers."""

    def __init__(self, arena: Arena) -> None:
        self.client = RecordingClient(arena)
        self.arena = arena
        self.memory = {
            layer.name: torch.ones((4, HEADS, TOKENS, 2 * DIM), dtype=torch.bfloat16)
            for layer in (TARGET, DRAFT)
        }
        views = {
            layer.name: (
                PartView(
                    layer.parts[0], range(HEADS), range(HEADS), (Piece(self.memory[layer.name]),)
                ),
            )
            for layer in (TARGET, DRAFT)
        }
        client: Any = self.client
        self.side = WorkerSide(LAYOUT, client, views)
        welcome = Welcome(
            arena.epoch, str(arena.path), arena.nbytes, arena.block_bytes, last_attempt=0
        )
        self.side.on_connected(welcome, arena)

    def ref(self, draft: str, attempt: int = 0) -> TransferRef:
        return TransferRef(
            TID, NUM_TOKENS, self.arena.epoch, ((0, 1),), attempt=attempt, draft=draft
        )

    def sent_bytes(self, draft: str) -> int:
        meta = PrfaasMetadata(sends=[SendStep(self.ref(draft, 1), ([1, 2],), NUM_TOKENS)])
        self.side.start_step(meta)
        for layer in (TARGET, DRAFT):
            self.side.save_kv_layer(meta, layer.name)
        self.side.wait_for_save(meta)
        said = self.client.take()
        assert not [one for one in said if one[0] == "abort"]
        return sum(length for one in said if one[0] == "ready" for _, length in one[3])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    arena = Arena.create(tmp_path, 1, 4096, prefault=False)
    engine = Engine(arena)
    yield engine
    engine.side.close()
    arena.close()


def test_the_drafters_pages_are_sent_if_the_landing_has_room_for_them(engine: Engine) -> None:
    assert engine.sent_bytes(OWN) == LAYOUT.transfer_bytes(NUM_TOKENS)


@pytest.mark.parametrize("draft", ["", "00" * 32])
def test_without_room_for_this_drafter_the_models_pages_are_sent(
    engine: Engine, draft: str
) -> None:
    assert engine.sent_bytes(draft) == LAYOUT.transfer_bytes(NUM_TOKENS, with_draft=False)


@pytest.mark.parametrize(("draft", "names"), [(OWN, ["target", "draft"]), ("", ["target"])])
def test_what_lands_is_loaded_and_the_rest_of_the_page_is_cleared(
    engine: Engine, draft: str, names: list[str]
) -> None:
    """The rest may have bits that are no number, which attention would multiply with 0."""
    for memory in engine.memory.values():
        memory.fill_(float("nan"))
    engine.arena.memory[: LAYOUT.transfer_bytes(NUM_TOKENS)] = b"\x40" * LAYOUT.transfer_bytes(
        NUM_TOKENS
    )
    engine.side._load_landing(LoadStep("r", engine.ref(draft), ([1, 2],)), engine.ref(draft))
    loaded = {"target": engine.memory[TARGET.name], "draft": engine.memory[DRAFT.name]}
    for name, memory in loaded.items():
        assert memory[[0, 3]].isnan().all()
        if name not in names:
            assert memory.isnan().all()
            continue
        assert (memory[1] == memory[1, 0, 0, 0]).all()
        assert not memory[1].isnan().any()
        assert (memory[2, :, :4] == memory[1, 0, 0, 0]).all()
        assert (memory[2, :, 4:] == 0).all()
