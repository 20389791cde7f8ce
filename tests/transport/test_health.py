"""How often a process is asked whether it can serve."""

from __future__ import annotations

from transport.health import remembered


async def test_one_answer_serves_all_probes_for_a_while() -> None:
    now_s, trouble, num_asked = 10.0, "", 0

    async def why_not_ready() -> str:
        nonlocal num_asked
        num_asked += 1
        return trouble

    probe = remembered(why_not_ready, for_s=0.5, clock=lambda: now_s)
    assert [await probe() for _ in range(100)] == [""] * 100
    trouble, now_s = "no instance serves", 10.4
    assert (await probe(), num_asked) == ("", 1)
    now_s = 10.5
    assert (await probe(), num_asked) == ("no instance serves", 2)
