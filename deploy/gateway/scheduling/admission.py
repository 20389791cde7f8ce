"""Requests are let in, or answered with 429 before anything is reserved for them.

It asks the live scheduler (`AdmitAsked`, `TenantAsked`) and turns a refusal into an OpenAI error.
The error says what was predicted, what is allowed, and when to come back. It does not know engines,
or how a load was measured.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NoReturn, Protocol, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram

from deploy.gateway.errors import ApiError
from deploy.gateway.scheduling.config import AdmissionSection
from deploy.gateway.series.tenants import TenantSeries
from scheduler.live.admission import AdmissionReason, Verdict
from scheduler.live.core import Event
from scheduler.live.events import AdmissionOver, AdmitAsked, TenantAsked, TenantsLimited
from scheduler.live.tenants import TenantLimit, TenantRefusal, divided
from scheduler.routing.prediction import Prediction

R = TypeVar("R")

_LOAD_BUCKETS: Final = (0.1, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)

_LET_IN: Final = (
    AdmissionReason.ADMITTED,
    AdmissionReason.EMPTY,
    AdmissionReason.NO_DECODE_SLOTS,
)
_MESSAGES: Final = {
    AdmissionReason.PREFILL_LOAD: (
        "The first token is predicted in {ttft_s:.1f} s, of which {queue_s:.1f} s are a queue; the "
        "objective is {ttft_slo_s:g} s."
    ),
    AdmissionReason.DECODE_LOAD: (
        "When this request would begin to decode, in {at_s:.1f} s, {occupied} requests are "
        "predicted to take or want the {slots} decode slots."
    ),
    AdmissionReason.DECODE_MEMORY: (
        "When this request would begin to decode, in {at_s:.1f} s, {kv_bytes:.3g} bytes of KVCache "
        "are predicted for {kv_total_bytes:.3g}, this request's included."
    ),
    AdmissionReason.TENANT_REQUESTS: (
        "{who} has {requests} of at most {max_requests} requests in flight. Wait for one to end."
    ),
    AdmissionReason.TENANT_TOKENS: (
        "{who} has {tokens} tokens of prompts and answers in flight and may have {max_tokens}; "
        "this request brings {new_tokens}. Wait for others to end."
    ),
    AdmissionReason.TENANT_RATE: (
        "{who} brings more than {per_s:g} tokens of prompts and answers per second; this request "
        "brings {new_tokens}, and {level_tokens:.0f} are left. Send less at a time."
    ),
}
"""For every refusal: what was predicted or counted, and the bound."""


class TenantNow(msgspec.Struct, frozen=True):
    """Requests and tokens of a tenant in flight; `tokens` are those that its limits count."""

    requests: int
    tokens: int


class AdmissionOverview(msgspec.Struct, frozen=True):
    """The decisions so far. `refused` is by reason; `tenants` are those with something in
    flight.
    """

    policy: str
    admitted: int
    refused: dict[str, int]
    tenants: dict[str, TenantNow]


class Decides(Protocol):
    """Answers an event; `RegionScheduler.tell` does."""

    def __call__(self, event: Event[R], /) -> R: ...


class Budgets(Protocol):
    """Tenants' limits over several gateways; `deploy.gateway.sharing.budgets.SharedBudgets`."""

    async def take(self, tenant: str, num_tokens: int) -> TenantRefusal | None: ...

    def give_back(self, tenant: str, num_tokens: int, used_tokens: int | None) -> None: ...


class Admission:
    """Admission for one gateway. Single-threaded. `decide` belongs to the live scheduler."""

    def __init__(
        self,
        config: AdmissionSection,
        registry: CollectorRegistry,
        decide: Decides,
        tenants: TenantSeries,
        *,
        hide: Callable[[str], str] = str,
    ) -> None:
        """`tenants` shows what each tenant does, and `hide` gives the name by which the live
        scheduler knows one.
        """
        self._hide = hide
        self._policy = config.policy
        self._default, self._tenants = config.default_tenant, config.tenants
        self._decide = decide
        self._config = config
        self._num_shares = 1
        self._budgets: Budgets | None = None
        self._num_asked = 0
        self._in_flight: dict[str, TenantNow] = {}
        self._num_admitted = 0
        self._refused: Tally[str] = Tally()
        self._metrics = _Metrics(registry)
        self._series = tenants
        tenants.watch(lambda: {name: now.requests for name, now in self._in_flight.items()})
        tenants.show(config.tenants)

    def keep_series(self, tenants: Iterable[str]) -> None:
        """From now on only these tenants have keys. The others' series go with their requests."""
        self._series.keep(tenants)

    def share(self, budgets: Budgets) -> None:
        """From now on tenants' limits hold over all gateways that `budgets` asks."""
        self._budgets = budgets

    def divide(self, num: int) -> None:
        """Hold one of `num` parts of every limit from now on, because nobody can be asked."""
        self._num_shares = num
        self._tell_limits()

    def limit(self, tenant: str) -> TenantLimit:
        """The limits of the tenant over all gateways."""
        return self._tenants.get(tenant, self._default)

    def is_limited(self, tenant: str) -> bool:
        """Whether the tenant has any limit."""
        limit = self.limit(tenant)
        return (limit.max_requests, limit.max_tokens, limit.tokens_per_s) != (None, None, None)

    def use(self, config: AdmissionSection) -> None:
        """Hold the tenant limits of `config` from now on. What is in flight stays and counts."""
        self._config = config
        self._default, self._tenants = config.default_tenant, config.tenants
        self._tell_limits()
        self._series.show(config.tenants)

    def check_tenant(
        self, tenant: str, model: str, work_tokens: int, *, home: str = ""
    ) -> AdmittedRequest:
        """Raises `ApiError` 429 if a request of at least so much work is refused whatever its
        route. To be asked before an engine renders its prompt. Its work counts until the result is
        given to `admit` or called. `home` is the PD cluster that the request belongs to.
        """
        self._num_asked += 1
        number = self._num_asked
        asked = TenantAsked(number, self._hide(tenant), model, work_tokens, home)
        verdict = self._decide(asked).verdict
        if not verdict.admitted:
            self._refuse(tenant, verdict, None)
        # It is no work yet where nobody says how much it was.
        return AdmittedRequest(
            number, lambda used_tokens: self._decide(AdmissionOver(number, used_tokens or 0))
        )

    @contextmanager
    def asking(self, tenant: str) -> Iterator[None]:
        """Raises `ApiError` 429 if whatever the tenant asks for is refused. A request more counts
        for it until the context ends. To be asked before its body is read.
        """
        if not self.is_limited(tenant):
            yield
            return
        checked = self.check_tenant(tenant, "", 0)
        try:
            yield
        finally:
            checked()

    async def reserve(self, tenant: str, work_tokens: int) -> AdmittedRequest | None:
        """Count a request's work for its tenant in all gateways, before `admit`. Raises `ApiError`
        429 if the limits refuse it together. None: there is nothing to count.
        """
        budgets = self._budgets
        if budgets is None or not self.is_limited(tenant):
            return None
        refusal = await budgets.take(tenant, work_tokens)
        if refusal is not None:
            self._refuse(tenant, self._verdict(refusal), None)
        return AdmittedRequest(0, partial(budgets.give_back, tenant, work_tokens))

    def _verdict(self, refusal: TenantRefusal) -> Verdict:
        wait_s = max(refusal.retry_after_s or 0.0, self._config.min_retry_s)
        retry_s = math.ceil(min(wait_s, self._config.max_retry_s))
        return Verdict(False, AdmissionReason(refusal.reason.value), retry_s, refusal.numbers)

    def admit(
        self,
        tenant: str,
        model: str,
        num_tokens: int,
        predicted: Prediction | None,
        *,
        work_tokens: int = 0,
        checked: AdmittedRequest | None = None,
        pd: str = "",
        reserved: AdmittedRequest | None = None,
    ) -> AdmittedRequest:
        """Let a request in that would take a route with this prediction and decode in `pd`.

        `num_tokens` is the length of its prompt, and `work_tokens` what its tenant's limits count
        (0: its prompt alone). `checked` is the answer of `check_tenant`, if that was asked, and
        `reserved` that of `reserve`, which ends with the request. The caller calls the result when
        the request is over; more calls do nothing. Raises `ApiError` 429, whose code is the reason;
        nothing is held then.
        """
        self._num_asked += 1
        number, work_tokens = self._num_asked, work_tokens or num_tokens
        if checked is not None:
            number = checked.number
        name = self._hide(tenant)
        judged = self._decide(
            AdmitAsked(number, name, model, num_tokens, predicted, work_tokens, pd)
        )
        verdict = judged.verdict
        if not verdict.admitted:
            if reserved is not None:
                reserved(0)
            self._refuse(tenant, verdict, judged.decode_load)
        self._metrics.judged(verdict, judged.decode_load)
        self._num_admitted += 1
        self._series.came(tenant)
        self._count(tenant, +1, work_tokens)
        return AdmittedRequest(number, partial(self._ended, number, tenant, work_tokens, reserved))

    def overview(self) -> AdmissionOverview:
        """GET /prfaas/region: the policy, what it did, and who has something in flight."""
        return AdmissionOverview(
            policy=self._policy,
            admitted=self._num_admitted,
            refused=dict(self._refused),
            tenants=dict(sorted(self._in_flight.items())),
        )

    def _refuse(self, tenant: str, verdict: Verdict, load: float | None) -> NoReturn:
        self._metrics.judged(verdict, load)
        self._series.refused(tenant)
        self._refused[verdict.reason.value] += 1
        raise _error(tenant, verdict)

    def _tell_limits(self) -> None:
        def share(limit: TenantLimit) -> TenantLimit:
            return limit if self._num_shares == 1 else divided(limit, self._num_shares)

        # A tenant keeps the name that the scheduler knows it by, or it would be two there.
        limits = {self._hide(name): share(limit) for name, limit in self._tenants.items()}
        self._decide(TenantsLimited(share(self._default), limits))

    def _ended(
        self,
        number: int,
        tenant: str,
        work_tokens: int,
        reserved: AdmittedRequest | None,
        used_tokens: int | None,
    ) -> None:
        self._decide(AdmissionOver(number, used_tokens))
        if reserved is not None:
            reserved(used_tokens)
        self._count(tenant, -1, -work_tokens)

    def _count(self, tenant: str, requests: int, tokens: int) -> None:
        before = self._in_flight.pop(tenant, TenantNow(0, 0))
        now = TenantNow(before.requests + requests, before.tokens + tokens)
        if now.requests:
            self._in_flight[tenant] = now


class AdmittedRequest:
    """A request that was let in, or checked. Call it once the request is over, with the work that
    it was, if that is known. Only the first call counts.
    """

    __slots__ = ("_call", "number")

    def __init__(self, number: int, call: Callable[[int | None], None]) -> None:
        self.number = number
        self._call: Callable[[int | None], None] | None = call

    def __call__(self, used_tokens: int | None = None) -> None:
        call, self._call = self._call, None
        if call is not None:
            call(used_tokens)


class _Metrics:
    """Every series exists from the start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "prfaas_gateway_"
        self._verdicts = Counter(
            prefix + "admission_total",
            "Requests let in or refused before prefill.",
            ("verdict", "reason"),
            registry=registry,
        )
        self._load = Histogram(
            prefix + "predicted_decode_load_ratio",
            "Requests over decode slots when a request would begin to decode, itself included.",
            buckets=_LOAD_BUCKETS,
            registry=registry,
        )
        # Every request needs one of these, and looking it up by labels costs more than counting.
        self._by_reason = {
            (word, reason): self._verdicts.labels(word, reason.value)
            for word, reasons in (("admitted", _LET_IN), ("refused", _MESSAGES))
            for reason in reasons
        }

    def judged(self, verdict: Verdict, load: float | None) -> None:
        """Count one request, and the load that it would meet if that is known."""
        word = "admitted" if verdict.admitted else "refused"
        self._by_reason[word, verdict.reason].inc()
        if load is not None:
            self._load.observe(load)


def _error(tenant: str, verdict: Verdict) -> ApiError:
    who = f"Tenant {tenant}" if tenant else "Everybody together"
    message = _MESSAGES[verdict.reason].format_map({**verdict.numbers, "who": who})
    retry_s = verdict.retry_after_s
    return ApiError(
        429, verdict.reason.value, f"{message} Try again in {retry_s} s.", retry_after_s=retry_s
    )
