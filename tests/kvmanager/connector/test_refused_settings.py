"""Settings of an engine with which its KVCache cannot be moved are refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvmanager.layout import LayoutError
from kvmanager.vllm_connector.engine_layout import _refuse_unsupported


def engine(*, speculative: object = None, **parallel: Any) -> Any:
    sizes = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_dbo": False,
        "ubatch_size": 0,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(sizes | parallel)), speculative_config=speculative
    )


def test_tensor_parallel_ranks_and_pipeline_stages_are_served() -> None:
    _refuse_unsupported(engine(tensor_parallel_size=4, pipeline_parallel_size=2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"decode_context_parallel_size": 4}, "--decode-context-parallel-size 4"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2"),
        ({"enable_dbo": True}, "--enable-dbo"),
        ({"ubatch_size": 2}, "dual batch overlap"),
        ({"speculative": SimpleNamespace(method="medusa")}, "--speculative-config"),
    ],
)
def test_what_cannot_be_moved_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        _refuse_unsupported(engine(**changes))
