"""What differs in another vLLM is said when an engine starts, or the engine is refused."""

import logging
from abc import abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm_trees import source_tree

from kvmanager.vllm_connector.connector import PrfaasConnector
from kvmanager.vllm_connector.versions import check
from kvmanager.vllm_connector.versions.check import (
    Differences,
    UnsupportedVllmError,
    check_vllm,
    compare,
    nearest,
    verdict,
)
from kvmanager.vllm_connector.versions.interface import installed_root, known_interfaces
from kvmanager.vllm_connector.versions.sources import Method, Name, Sources

KNOWN = known_interfaces()
INSTALLED = Sources(installed_root()).version()

# One method of a base class, before and after, and what the connector has for it.

DO = Method("self, step")


@pytest.mark.parametrize(
    ("before", "after", "override", "expected"),
    [
        (DO, DO, DO, Differences()),
        (DO, Method("self, step"), Method("self, step, more=..."), Differences()),
        (DO, None, DO, Differences(refusals=("B.do is gone",))),
        (DO, None, None, Differences(changes=("B.do is gone",))),
        (
            DO,
            Method("self, step, more"),
            DO,
            Differences(
                (
                    "B.do (self, step, more) does not fit the override: too many positional "
                    "arguments",
                )
            ),
        ),
        (
            DO,
            Method("self, step, *, more"),
            DO,
            Differences(
                (
                    "B.do (self, step, *, more) does not fit the override: got an unexpected "
                    "keyword argument 'more'",
                )
            ),
        ),
        (
            DO,
            Method("self"),
            DO,
            Differences(
                ("B.do (self) does not fit the override: missing a required argument: 'step'",)
            ),
        ),
        (
            DO,
            Method("self"),
            Method("self, *, step"),
            Differences(
                ("B.do (self) does not fit the override: missing a required argument: 'step'",)
            ),
        ),
        (
            DO,
            Method("self, step", kind="property"),
            DO,
            Differences(("B.do is a property, and the override a method",)),
        ),
        (
            DO,
            Method("self, step, more=..."),
            DO,
            Differences(
                changes=(
                    "B.do (self, step, more=...) may not fit the override: too many positional "
                    "arguments",
                    "B.do is a method (self, step, more=...), and was a method (self, step)",
                )
            ),
        ),
        (
            DO,
            Method("self, turn"),
            DO,
            Differences(
                changes=(
                    "B.do (self, turn) may not fit the override: missing a required argument: "
                    "'step'",
                    "B.do is a method (self, turn), and was a method (self, step)",
                )
            ),
        ),
        (
            DO,
            Method("self, step, more"),
            Method("self, *args, **kwargs"),
            Differences(
                changes=("B.do is a method (self, step, more), and was a method (self, step)",)
            ),
        ),
        (
            None,
            Method("self", abstract=True),
            None,
            Differences(("B.do must be overridden, and is not",)),
        ),
        (None, Method("self"), None, Differences(changes=("B.do (self) is new",))),
        (
            None,
            Method("self", returns="True"),
            None,
            Differences(changes=("B.do (self) is new, and returns True",)),
        ),
        (None, Method("self", returns="True"), Method("self", returns="False"), Differences()),
        (
            Method("self", returns="False"),
            Method("self", returns="True"),
            None,
            Differences(changes=("B.do returns True, and returned False",)),
        ),
    ],
)
def test_differences_of_a_method(
    before: Method | None, after: Method | None, override: Method | None, expected: Differences
) -> None:
    own = Name("class", bases=("vllm.B",), methods={"do": override} if override else {})
    was = Name("class", methods={"do": before} if before else {})
    now = Name("class", methods={"do": after} if after else {})
    assert compare({"vllm.B": was, "vllm.other": was}, {"vllm.B": now}, [own]) == expected


def test_a_base_class_that_is_gone_is_refused_and_a_lost_field_is_told() -> None:
    own = Name("class", bases=("vllm.x.B",))
    was = {"vllm.x.B": Name("class", members=("_config",))}
    assert compare(was, {}, [own]) == Differences(refusals=("vllm.x.B is gone",))
    told = compare(was, {"vllm.x.B": Name("class")}, [own])
    assert told == Differences(changes=("B._config is gone",))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", "0.32.0"),
        ("0.32.4+cpu", "0.32.0"),
        ("0.33.1rc2.dev5", "0.33.0"),
        ("0.40.0", "0.33.0"),
        ("dev", "0.33.0"),
        ("0.31.2", "0.32.0"),
    ],
)
def test_a_version_is_compared_with_the_nearest_known_one(version: str, expected: str) -> None:
    assert nearest(KNOWN, version).version == expected


def test_an_unknown_version_is_told_even_if_nothing_differs() -> None:
    assert verdict("0.33.2", KNOWN, Differences()) == ""
    assert verdict("0.34.0", KNOWN, Differences()) == (
        "this PrfaaS was written for vLLM 0.32 to 0.33, and this is vLLM 0.34.0: its connector "
        "interface does not differ; install vllm>=0.32,<0.34, or a release of PrfaaS for vLLM "
        "0.34.0"
    )
    assert "B.do is new" in verdict("0.33.2", KNOWN, Differences(changes=("B.do is new",)))


def test_a_refusal_names_both_versions_and_what_to_install() -> None:
    with pytest.raises(UnsupportedVllmError) as refused:
        verdict("0.34.0", KNOWN, Differences(("B.do is gone", "B.be is gone")))
    assert str(refused.value) == (
        "this PrfaaS was written for vLLM 0.32 to 0.33 and cannot run in vLLM 0.34.0: B.do is "
        "gone; B.be is gone; install vllm>=0.32,<0.34, or a release of PrfaaS for vLLM 0.34.0"
    )


# At the start of an engine.


@pytest.fixture
def changed_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the check read vLLM's connector interface with a part replaced."""

    def change(old: str, new: str) -> None:
        path = "vllm/distributed/kv_transfer/kv_connector/v1"
        encoder = "vllm/distributed/ec_transfer/ec_connector/base.py"
        for name in (f"{path}/base.py", f"{path}/metrics.py", encoder, "vllm/version.py"):
            text = (installed_root() / name).read_text()
            if name == f"{path}/base.py":
                assert old in text
                text = text.replace(old, new)
            source_tree(tmp_path, {name: text})
        monkeypatch.setattr(check, "installed_root", lambda: tmp_path)

    return change


def test_the_installed_version_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    check_vllm(INSTALLED, warns=True)
    assert caplog.records == []


def test_a_vllm_that_calls_otherwise_is_refused(changed_vllm: Any) -> None:
    changed_vllm("def wait_for_save(self):", "def wait_for_save(self, step_id):")
    with pytest.raises(UnsupportedVllmError, match=r"V1\.wait_for_save \(self, step_id\) does"):
        check_vllm(INSTALLED, warns=True)


def test_what_differs_is_one_warning_of_one_process(
    changed_vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    changed_vllm("def shutdown(self):", "def shutdown(self, now=False):")
    with caplog.at_level(logging.WARNING):
        check_vllm(INSTALLED, warns=False)
        assert caplog.records == []
        check_vllm(INSTALLED, warns=True)
    (record,) = caplog.records
    assert "KVConnectorBase_V1.shutdown (self, now=...) may not fit" in record.getMessage()


def test_a_vllm_without_sources_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(check, "installed_root", lambda: tmp_path)
    check_vllm("0.33.0", warns=True)
    assert "vLLM 0.33.0 has no sources here" in caplog.text


def engine_config(*, sleeps: bool = False) -> Any:
    transfer = KVTransferConfig(
        kv_connector="PrfaasConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"agent_socket": "/nowhere/agent.sock"},
    )
    model = SimpleNamespace(enable_sleep_mode=sleeps)
    return SimpleNamespace(kv_transfer_config=transfer, model_config=model)


def test_a_new_abstract_method_is_refused_with_the_versions(changed_vllm: Any) -> None:
    """Not by Python, whose message names no version."""
    changed_vllm(
        "def shutdown(self):",
        "@abstractmethod\n    def flush(self): ...\n\n    def shutdown(self):",
    )

    class Newer(PrfaasConnector):
        @abstractmethod
        def flush(self) -> None: ...

    with pytest.raises(UnsupportedVllmError, match=r"flush must be overridden, and is not; inst"):
        Newer(engine_config(), KVConnectorRole.SCHEDULER, SimpleNamespace())


# Sleep mode.


def test_an_engine_that_may_sleep_is_refused() -> None:
    """By vLLM 0.33, which asks the class, and by the connector in 0.32."""
    assert PrfaasConnector.supports_sleep_mode(engine_config().kv_transfer_config) is False
    with pytest.raises(ValueError, match="remove --enable-sleep-mode"):
        PrfaasConnector(engine_config(sleeps=True), KVConnectorRole.WORKER, SimpleNamespace())


def test_the_memory_of_the_pages_is_not_given_up() -> None:
    connector = object.__new__(PrfaasConnector)
    with pytest.raises(RuntimeError, match="cannot give up the memory of its KV cache"):
        connector.unregister_kv_caches()
