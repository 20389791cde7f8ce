"""The page in headless Chromium, before a gateway with doubles of engines."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import browser
import msgspec
import pytest
from browser import Tab, open_tab
from gateway_region import Region
from page_region import SetLinks, with_instances

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.cache.api import CacheOverview, NodeCacheStatus
from deploy.gateway.scheduling.config import SchedulingConfig
from deploy.gateway.scheduling.plan_overview import PlanDecision
from deploy.gateway.ui import feed
from deploy.gateway.ui.view import View, view
from kvmanager.agent.messages import CacheStatus, EmbeddingStatus
from netmon.estimate import LinkCondition
from prfaas.engines.errors import PrefillFailed

pytestmark = pytest.mark.skipif(
    browser.CHROMIUM is None, reason="chromium is not installed; `make system` does that"
)
SHOTS = os.environ.get("PRFAAS_PAGE_SHOTS")
KEYS = tuple(
    ApiKey.model_validate({"key": f"key-of-{name}", "name": name}) for name in ("ann", "bob")
)
HOSTILE = "<img src=x onerror=document.title='owned'>"
FITS = "document.documentElement.scrollWidth <= innerWidth"
TEXT = "document.querySelector('.{}').textContent"
ROWS = (
    "[...document.querySelectorAll('.requests .body .row')].some(r => "
    "r.textContent.includes('{}') && r.textContent.includes('{}'))"
)
FRAMES = """new Promise(resolve => {
  const times = []; let at = 0;
  function frame(now) {
    times.push(now); scrollTo(0, at += 60);
    if (times.length < 120) requestAnimationFrame(frame);
    else resolve(1000 * (times.length - 1) / (times.at(-1) - times[0]));
  }
  requestAnimationFrame(frame);
})"""


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with open_tab(tmp_path) as opened:
        yield opened


async def shoot(tab: Tab, name: str, *, whole: bool = True) -> None:
    """Keep a picture where somebody wants to look at one."""
    if SHOTS:
        await tab.shoot(Path(SHOTS) / f"{name}.png", whole=whole)


async def axe(tab: Tab) -> None:
    """The accessibility checker finds nothing."""
    found = find_spec("axe_core_python")
    assert found is not None
    assert found.origin is not None
    script = await asyncio.to_thread(Path(found.origin).with_name("axe.min.js").read_text)
    await tab.ask(script + "; 1")
    said = await tab.ask(
        "axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html).slice(0, 3)]))"
    )
    assert said == []


async def tabbed_to(tab: Tab, element: str) -> None:
    """Go to an element by the Tab key."""
    for _ in range(10):
        if await tab.ask(f"document.activeElement.id === '{element}'"):
            return
        await tab.press("Tab")
    raise AssertionError(f"{element} is not reached")


async def ask_region(region: Region, name: str = "ann", **fields: Any) -> int:
    headers = {"Authorization": f"Bearer key-of-{name}"}
    status, _, _ = await region.post(region.long_body(**fields), headers=headers)
    return status


async def test_an_operator_looks_at_a_region(open_region: Any, tab: Tab) -> None:
    links = SetLinks()
    budget = {"bob": {"tokens_per_s": 0.001, "burst_tokens": 1}}
    scheduling = SchedulingConfig.model_validate({"admission": {"tenants": budget}})
    async with open_region(
        api_keys=KEYS, operators=("ann",), scheduling=scheduling, owned={"region_links": links}
    ) as region:
        await tab.open(region.url + "/ui")
        # By keyboard only: a wrong key, then the right one.
        await tab.until("!document.getElementById('sign-in').hidden")
        await axe(tab)
        assert await tab.ask("document.activeElement.id") == "key"
        await tab.type("wrong")
        await tab.press("Enter", "\r")
        await tab.until("document.body.innerText.includes('not known here')")
        assert "far" not in await tab.ask("document.body.innerText")
        await tab.type("key-of-ann")
        await tab.press("Enter", "\r")
        await tab.until("document.getElementById('state').textContent === 'live'")
        await tab.until(TEXT.format("links") + ".includes('clear')")
        for _ in range(3):
            assert await ask_region(region) == 200
        await tab.until(TEXT.format("requests") + ".includes('prefill_cluster')")
        # Refused, with the reason.
        await ask_region(region, "bob")
        assert await ask_region(region, "bob") == 429
        await tab.until(TEXT.format("requests") + ".includes('refused')")
        error = next(item.error for item in region.gateway.records if item.outcome == "refused")
        assert error
        shown = await tab.ask(TEXT.format("requests"))
        assert error[:40] in shown
        # A cut, and its return.
        links.set(LinkCondition.DOWN, "nothing was acknowledged for 1.0 s")
        await tab.until(TEXT.format("links") + ".includes('down')", timeout_s=2.0)
        await shoot(tab, "down")
        links.set(LinkCondition.CLEAR, "")
        await tab.until(TEXT.format("links") + ".includes('clear')", timeout_s=2.0)
        # Names are text, whoever gave them.
        record = region.gateway.records[-1]
        record.tenant, record.error = HOSTILE, HOSTILE
        await tab.until(TEXT.format("requests") + ".includes('<img')")
        assert await tab.ask("document.images.length") == 0
        assert await tab.ask("document.title") == "PrfaaS region"
        record.tenant, record.error = "bob", error
        await tab.until("!" + TEXT.format("requests") + ".includes('<img')")
        with_instances(region.pd, ["both", "prefill", "decode"])
        await tab.until(TEXT.format("instances") + ".includes('home-002')")
        with_instances(region.pd, ["both", "decode", "decode"])
        await tab.until(
            "[...document.querySelectorAll('.instances .row')]"
            ".some(r => r.textContent.includes('home-001') && r.textContent.includes('decode'))",
            timeout_s=5.0,
        )
        await axe(tab)
        await shoot(tab, "light")
        await tabbed_to(tab, "theme")
        await tab.press("Enter", "\r")
        assert await tab.ask("document.documentElement.dataset.theme") == "dark"
        await axe(tab)
        await shoot(tab, "dark")
        await tab.resize(360)
        await tab.until(FITS)
        await axe(tab)
        await shoot(tab, "360")
        await tabbed_to(tab, "leave")
        await tab.press("Enter", "\r")
        await tab.until("!document.getElementById('sign-in').hidden")
        assert "far" not in await tab.ask("document.body.innerText")
        asked = {urlsplit(url).netloc for url in tab.requested if not url.startswith("data:")}
        assert asked == {urlsplit(region.url).netloc}
        assert not [text for text in tab.logged if "401" not in text]


async def a_thousand_instances(region: Region, tab: Tab) -> None:
    with_instances(region.far, ["prefill"] * 700)
    with_instances(region.pd, ["decode"] * 300)
    await tab.open(region.url + "/ui")
    await tab.until("document.querySelectorAll('.instances .body .row').length === 1000")


@pytest.mark.alone
async def test_a_thousand_instances_scroll_smoothly(open_region: Any, tab: Tab) -> None:
    async with open_region(owned={"region_links": SetLinks()}) as region:
        await a_thousand_instances(region, tab)
        frames_per_s = await tab.ask(FRAMES)
        print(f"{frames_per_s:.0f} frames/s")
        # What a machine without other work shows is 60.
        assert frames_per_s >= 30


async def test_a_thousand_instances_in_the_dark(open_region: Any, tab: Tab) -> None:
    async with open_region(owned={"region_links": SetLinks()}) as region:
        await tab.colours("dark")
        await a_thousand_instances(region, tab)
        assert await tab.ask("document.documentElement.dataset.theme") == "dark"
        await shoot(tab, "thousand", whole=False)
        await tab.resize(360)
        await tab.until(FITS)
        # Only values that differ are set.
        await tab.ask(
            "changed = 0; new MutationObserver(all => changed += all.length)"
            ".observe(document.querySelector('.instances'), {subtree: true, childList: true}); 1"
        )
        links = region.gateway.pages.links
        assert isinstance(links, SetLinks)
        links.set(LinkCondition.RISING, "")
        await tab.until(TEXT.format("links") + ".includes('rising')")
        assert await tab.ask("changed") == 0


def with_caches_and_decisions(pages: Mapping[str, Any]) -> View:
    """The view of a region whose nodes keep caches and whose plan has decided."""
    cache = CacheStatus(num_blocks=553, nbytes={"arena/kv": 144_900_000}, evictions={"arena/kv": 7})
    embeddings = EmbeddingStatus(12, held_bytes=3 << 20, cap_bytes=8 << 20)
    nodes = [
        NodeCacheStatus(
            cluster="home",
            node="b1",
            agent="b1:1",
            cache=cache,
            hit_share=0.42,
            embeddings=embeddings,
            embedding_hit_share=0.75,
        ),
        NodeCacheStatus(cluster="far", node="a1", agent="a1:1", error="it does not answer"),
    ]
    decision = PlanDecision(
        model="tiny",
        pd="home",
        at_s=1_700_000_000.0,
        age_s=3.0,
        reason="better_plan",
        done=["planned threshold of far from 100 to 200 tokens"],
    )
    plan = dict(pages.get("/prfaas/plan") or {})
    plan["decisions"] = [msgspec.to_builtins(decision)]
    caches = msgspec.to_builtins(CacheOverview(nodes))
    return view(dict(pages) | {"/prfaas/cache": caches, "/prfaas/plan": plan})


async def test_all_tables_are_filled(
    open_region: Any, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "view", with_caches_and_decisions)
    routing = {"routing": {"local_prefill": "refuse"}}
    scheduling = SchedulingConfig.model_validate(routing)
    owned = {"region_links": SetLinks()}
    async with open_region(scheduling=scheduling, owned=owned) as region:
        await tab.open(region.url + "/ui")
        await tab.until(TEXT.format("caches") + ".includes('it does not answer')")
        await tab.until(TEXT.format("decisions") + ".includes('from 100 to 200 tokens')")
        region.far.error = PrefillFailed("engine_failed", "dead")
        assert (await region.post(region.long_body()))[0] == 503
        body = {"model": "tiny", "input": "x"}
        assert (await region.post(body, "/v1/embeddings"))[0] == 200
        await tab.until(ROWS.format("failed", "prefill_failed · prefill_unavailable · The prompt"))
        await tab.until(ROWS.format("ok", "direct one_engine · forwarded"))
        assert await tab.ask("document.querySelectorAll('.empty:not([hidden])').length") <= 1
        heads = await tab.ask("document.getElementById('plan').textContent")
        assert "Planned threshold of far" in heads
        assert "Current threshold" in await tab.ask(TEXT.format("links"))
        await axe(tab)
        await tab.resize(360)
        await tab.until(FITS)
        await axe(tab)
        await shoot(tab, "filled")
        await tab.resize(1280)
        await tabbed_to(tab, "theme")
        await tab.press("Enter", "\r")
        await axe(tab)
        await shoot(tab, "filled-other")
