"""Chooses the parts of a prompt's blocks for the prefix cache, and finds their engine pages.

Pure: it maps block tables and numbers to block ids. Knows no agent, handle or request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmanager.layout import KVKind, KVLayout
from kvmanager.pool.placement import StatePlacement
from kvmanager.pool.shape import CacheShape, PartKind

BlockPart = tuple[int, int]
"""(index of a block in its prompt, part number of the shape)."""

Tables = Sequence[list[int]]
NULL_BLOCK = 0
"""vLLM's block id for a page that a request does not have (any more)."""


def prompt_boundaries(
    placement: StatePlacement,
    block_tokens: int,
    num_tokens: int,
    *,
    after_tokens: int,
    branch_tokens: int | None,
) -> list[int]:
    """The boundaries of a prompt, in blocks, whose windows and states are worth keeping.

    Only boundaries behind `after_tokens`, where the request resumes, are considered. A prompt of
    whole blocks has two ends: the next turn continues behind its last token, but the same prompt
    resumes a block earlier when it comes again, because vLLM always computes its last token.
    """
    ends = {num_tokens // block_tokens, (num_tokens - 1) // block_tokens}
    return [
        block
        for block in range(after_tokens // block_tokens + 1, num_tokens // block_tokens + 1)
        if placement.wants(block * block_tokens, is_end=block in ends, branch_tokens=branch_tokens)
    ]


def wanted_parts(
    shape: CacheShape, kv_blocks: Iterable[int], boundaries: Iterable[int]
) -> list[BlockPart]:
    """The KV of `kv_blocks` and the windows and states to resume at `boundaries`, in order."""
    wanted = {(block, 0) for block in kv_blocks} if shape.has_kv else set()
    for boundary in boundaries:
        for part in range(len(shape.parts)):
            reach = shape.reach(part)
            if reach is not None:
                wanted |= {(block, part) for block in range(max(0, boundary - reach), boundary)}
    return sorted(wanted)


def window_reach(shape: CacheShape) -> int:
    """The number of blocks that the longest window reaches back over from a boundary."""
    windows = (i for i, part in enumerate(shape.parts) if part.kind is PartKind.WINDOW)
    return max((shape.reach(part) or 0 for part in windows), default=0)


@dataclass(frozen=True, slots=True)
class StepTables:
    """One request's block tables after a step's forward pass.

    state_ends: boundaries in tokens at which steps ended, including this step's end unless that is
        behind guessed tokens.
    offered: (group, boundary in tokens) -> the block of that state, as vLLM says
        (`SchedulerOutput.kv_connector_block_state.boundary_state_offloads`).
    """

    tables: Tables
    end_tokens: int
    state_ends: Collection[int] = ()
    offered: Mapping[tuple[int, int], int] = field(default_factory=dict)


class CachePages:
    """The engine's pages of cached blocks. `state_index(group, tokens)` is the index in a recurrent
    group's table of the state after that many tokens. `state_tokens[group]` is the number of tokens
    of one block of that table.
    """

    def __init__(
        self,
        layout: KVLayout,
        shape: CacheShape,
        state_index: Callable[[int, int], int],
        state_tokens: Sequence[int],
    ) -> None:
        self._groups = layout.groups
        self._shape = shape
        self.state_index = state_index
        self._state_tokens = state_tokens

    def to_load(
        self, block: int, part: int, tables: Tables, *, num_tokens: int, local_tokens: int
    ) -> tuple[list[int], ...]:
        """Pages to fill for resuming at `num_tokens`, without those in the engine's own cache."""
        return tuple(
            [tables[group][self.state_index(group, num_tokens)]]
            if self._groups[group].kind is KVKind.RECURRENT
            else self._suffix(block, group, tables, num_tokens, local_tokens)
            for group in self._shape.parts[part].groups
        )

    def to_store(self, block: int, part: int, step: StepTables) -> tuple[list[int], ...] | None:
        """Pages that hold the part after the step; None when some are not there any more.

        A window that is shorter than the block needs only the pages for resuming at the block's
        end: resuming later needs fewer, and there is no boundary in between.
        """
        boundary = (block + 1) * self._shape.block_tokens
        pages = tuple(
            self._state(group, boundary, step)
            if self._groups[group].kind is KVKind.RECURRENT
            else self._suffix(block, group, step.tables, boundary, 0)
            for group in self._shape.parts[part].groups
        )
        return None if any(NULL_BLOCK in ids or not ids for ids in pages) else pages

    def _suffix(
        self, block: int, group_index: int, tables: Tables, num_tokens: int, local_tokens: int
    ) -> list[int]:
        group = self._groups[group_index]
        page_tokens = group.tokens_per_block
        num_pages = self._shape.block_tokens // page_tokens
        first = max(block * num_pages, -(-local_tokens // page_tokens))
        if group.kind is KVKind.WINDOW:
            first = max(first, group.pages(num_tokens).start)
        return tables[group_index][first : (block + 1) * num_pages]

    def _state(self, group: int, boundary: int, step: StepTables) -> list[int]:
        """The block of the state at `boundary`.

        If a step ended there, the state stays in its block, because later steps use other blocks.
        vLLM may also offer a block, which may be another one, or hold a state that was written
        inside a forward pass.
        """
        offered = step.offered.get((group, boundary))
        if offered is not None:
            return [offered]
        is_kept = boundary in step.state_ends and boundary % self._state_tokens[group] == 0
        is_running = boundary == step.end_tokens and boundary in step.state_ends
        if not is_running and not is_kept:
            return []
        index = self.state_index(group, boundary)
        return step.tables[group][index : index + 1]
