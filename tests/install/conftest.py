"""The wheel of this tree, built once for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from built_wheel import Installed, build, copy_of_sources


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel."""
    source = copy_of_sources(tmp_path_factory.mktemp("source"))
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installed:
    """An environment with the wheel, which tests leave as it is."""
    installed = Installed.make(tmp_path_factory.mktemp("installed") / "environment")
    installed.install(wheel)
    return installed


@pytest.fixture
def empty(tmp_path: Path) -> Installed:
    """An environment without the project, for one test."""
    return Installed.make(tmp_path / "environment")
