"""Landings are sent to the link's own address where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from granting import grant_files

from deploy.gateway.links.linked_cluster import LinkedPrefillCluster
from kvmanager.agent.grants import outbox_send
from kvmanager.landing import ReservedLanding
from kvmanager.token_ids import TokenIds
from prfaas.jobs import PrefillJob
from transport.grants import Granter, load_public_keys, read_grant


class Recorder:
    """Takes the place of a cluster and keeps the jobs it gets."""

    name = "prefill-a"

    def __init__(self) -> None:
        self.jobs: list[PrefillJob] = []

    async def submit(self, job: PrefillJob) -> str:
        self.jobs.append(job)
        return "done"


def job(host: str, port: int) -> PrefillJob:
    landing = ReservedLanding(
        transfer_id="00",
        token="11",
        nbytes=1,
        num_tokens=1,
        host=host,
        port=port,
        layout_fingerprint="22",
        token_digest="33",
    )
    return PrefillJob(request_id="r", prompt_token_ids=TokenIds.of([1]), landing=landing)


async def test_only_mapped_addresses_change() -> None:
    recorder: Any = Recorder()
    cluster = LinkedPrefillCluster(recorder, {"10.0.0.2:7100": "[::1]:9000"})
    assert cluster.name == "prefill-a"
    await cluster.submit(job("10.0.0.2", 7100))
    await cluster.submit(job("10.0.0.2", 7101))
    first, second = (item.landing for item in recorder.jobs)
    assert (first.host, first.port, first.token) == ("::1", 9000, "11")
    assert (second.host, second.port) == ("10.0.0.2", 7101)


async def test_a_grant_is_for_the_address_that_is_connected_to(tmp_path: Path) -> None:
    private, public = grant_files(tmp_path)
    recorder: Any = Recorder()
    endpoints = {"10.0.0.2:7100": "[::1]:9000"}
    cluster = LinkedPrefillCluster(recorder, endpoints, Granter(private))
    await cluster.submit(job("10.0.0.2", 7100))
    (sent,) = recorder.jobs
    grant = read_grant(load_public_keys(public), sent.grant, "OpenOutbox")
    assert grant.granted == outbox_send(sent.landing)
    assert grant.granted.endpoint == "[::1]:9000"
