"""Where the LoRA adapter that a request names has the same weights.

A name says nothing of weights: engines tell the identity that they found for theirs
(`kvmanager.vllm_connector.weights`), and KVCache moves only between engines that tell the same one.
Pure; does not know how an adapter's request is routed.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.gateway.cache.cached_prompt import PromptKeys
from deploy.gateway.intake.homes import Reports
from scheduler.reports import ClusterReport, serves


@dataclass(frozen=True, slots=True)
class AdapterPlaces:
    """The identity of an adapter in the PD cluster that decodes, and the prefill clusters that do
    not have it. `identity` is "" for a request without an adapter, None where it is not known.
    """

    identity: str | None = ""
    without: frozenset[str] = frozenset()

    def identity_for(self, target: str, keys: PromptKeys | None) -> str | None:
        """The identity if the target of a route has it as well, and if the prompt's keys, where it
        has some, are of it; else None.
        """
        # The route and the keys are of the adapter at the request's home, and another PD cluster
        # may decode. What lands there is cached under these keys.
        is_other = target in self.without or (keys is not None and keys.adapter != self.identity)
        return None if is_other else self.identity


def adapter_places(
    model: str, adapter: str, pd: ClusterReport | None, prefill: Reports
) -> AdapterPlaces:
    """Where an adapter of `model` can be used for what `pd` decodes."""
    identity = _identity(pd, model, adapter)
    without = frozenset(
        name
        for name, report in prefill.items()
        if identity is None or _identity(report, model, adapter) != identity
    )
    return AdapterPlaces(identity, without)


def _identity(report: ClusterReport | None, model: str, adapter: str) -> str | None:
    """The identity that every engine of the cluster tells that serves the model, else None."""
    if report is None:
        return None
    found = {item.adapters.get(adapter) for item in report.instances if serves(item, model)}
    # With several, nobody knows which one the cluster will choose for a request. One that tells
    # none, since it lacks the adapter or cannot identify it, may be chosen, too.
    return found.pop() if len(found) == 1 else None
