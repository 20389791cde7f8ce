"""Engine tests share built models; every test here is marked `engine`.

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
