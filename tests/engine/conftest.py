"""Engine tests share built models and regions; every test here is marked `engine`.

An engine takes ten seconds of two cores to start. So a test joins a region that is there:
`two_clusters` has two (`served_region`), `test_one_cluster` and `test_images` have one each, and
what needs another kind of engine is marked `kinds`. Gateways are cheap: a test that wants other
settings, or to choose who serves, starts one of its own (`part_gateway`). A test that breaks
something returns when all is whole again; where it cannot, it is in the last file about its region.

None of them may see an event loop of ours stand still; see `no_gaps`.
"""

from pathlib import Path

import pytest
from no_gaps import gaps_of_children, no_gaps_in_children, pytest_runtest_call

__all__ = ["gaps_of_children", "no_gaps_in_children", "pytest_runtest_call"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")
