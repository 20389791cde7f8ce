"""No integration test may see an event loop of ours stand still; see `no_gaps`."""

import pytest
from certificates import make_authority, make_node
from no_gaps import gaps_of_children, no_gaps_in_children, pytest_runtest_call

from transport import TlsFiles

__all__ = ["gaps_of_children", "no_gaps_in_children", "node_files", "pytest_runtest_call"]


@pytest.fixture(scope="session")
def node_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """The TLS files of two agents of a region that share a certificate."""
    folder = tmp_path_factory.mktemp("certificates")
    return make_node(folder, "node", make_authority(folder, "ca"))
