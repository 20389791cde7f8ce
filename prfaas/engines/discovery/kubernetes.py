"""Asks Kubernetes for the engines behind a service: its EndpointSlices. Needs the kubernetes
client, an extra.

An endpoint that terminates has left. Whether one is ready is not asked: the front probes it. The
client blocks, so its calls run on threads. A watch serves only to wait: what changed is listed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from prfaas.engines.discovery.found import DiscoverySection, Found
from transport.errors import LocalError

_TIMEOUT_S = 10.0
_PAUSE_S = 0.5
_WATCH_S = 5
"""How long a watch without news lasts; the end of this process waits for it."""


class EndpointSlices:
    """The slices of one service."""

    def __init__(self, section: DiscoverySection) -> None:
        """Raises LocalError where the way to Kubernetes is not known."""
        assert section.kubernetes is not None
        self._namespace, _, self._service = section.kubernetes.partition("/")
        self._port_name = section.port_name
        settings = client.Configuration()
        try:
            if section.kubeconfig is None:
                config.load_incluster_config(client_configuration=settings)
            else:
                file = str(section.kubeconfig)
                config.load_kube_config(file, client_configuration=settings)
        except ConfigException as error:
            raise LocalError("kubernetes", f"no way to Kubernetes: {error}") from error
        # `follow_discovery` waits before it asks again after an error.
        settings.retries = False
        self._api = client.DiscoveryV1Api(client.ApiClient(settings))
        self._version = ""

    async def found(self) -> list[Found]:
        """The engines now. LocalError: Kubernetes does not answer."""
        listed = await asyncio.to_thread(self._asked, self._list)
        self._version = listed.metadata.resource_version
        return [item for part in listed.items for item in self._of(part)]

    async def changed(self) -> None:
        """Wait until they may have changed, at most some seconds. LocalError as `found`."""
        await asyncio.to_thread(self._asked, self._watch)
        # Several changes often come at once, and one list has all of them.
        await asyncio.sleep(_PAUSE_S)

    def _asked(self, call: Any) -> Any:
        try:
            return call()
        except ApiException as error:
            # A version that is too old to watch from: the next list has a new one.
            if error.status == 410:
                return None
            reason = f"{error.status} {error.reason}"
            raise LocalError("kubernetes", f"{self._service}: {reason}") from error
        except (HTTPError, OSError) as error:
            raise LocalError("kubernetes", f"{self._service}: {error}") from error

    def _selected(self) -> dict[str, Any]:
        return {
            "namespace": self._namespace,
            "label_selector": f"kubernetes.io/service-name={self._service}",
        }

    def _list(self) -> Any:
        return self._api.list_namespaced_endpoint_slice(
            **self._selected(), _request_timeout=_TIMEOUT_S
        )

    def _watch(self) -> None:
        events = watch.Watch().stream(
            self._api.list_namespaced_endpoint_slice,
            **self._selected(),
            resource_version=self._version,
            timeout_seconds=_WATCH_S,
            _request_timeout=_WATCH_S + _TIMEOUT_S,
        )
        next(events, None)
        events.close()

    def _of(self, part: Any) -> list[Found]:
        """The engines in one slice."""
        ports = [item for item in part.ports or () if self._port_name in ("", item.name)]
        return [
            _found(item, ports[0].port)
            for item in part.endpoints or ()
            if ports and not (item.conditions and item.conditions.terminating)
        ]


def _found(endpoint: Any, port: int) -> Found:
    pod, host = endpoint.target_ref, endpoint.addresses[0]
    # A slice that somebody wrote by hand has no pods. There, one address may have several engines.
    name = (pod and pod.name) or endpoint.hostname or f"{host}-{port}"
    return Found(name, host, port, endpoint.node_name or "", (pod and pod.uid) or "")
