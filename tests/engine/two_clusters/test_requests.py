"""What clients of every kind ask a region gets the answer of a plain engine."""

from collections import Counter
from pathlib import Path

import pytest
from client_answers import LOCAL_CALLS, NUM_CHOICES, client_answers
from engine_region import WINDOW, computed_tokens, everything_is_given_back, records_at
from load_tools import vllm_bench_serve
from same_answers import answers_of, unlike
from served_region import DECODE, Served, serving

pytestmark = [pytest.mark.asyncio(loop_scope="session"), serving(WINDOW)]

QUESTION_TOKENS = 20
"""Of the shortest chat, with its template."""


async def test_official_clients_get_a_plain_engines_answers(served: Served) -> None:
    """Through every routed endpoint, with a long prompt that a prefill cluster prefills."""
    before = await records_at(served.url)
    computed = await computed_tokens(served.region, DECODE)
    answers = await client_answers(served.url, served.model)
    assert answers == served.plain.by_clients
    listed = await records_at(served.url)
    routes = [record["route"] for key, record in listed.items() if key not in before]
    assert routes == ["direct" if name in LOCAL_CALLS else "prefill_cluster" for name in answers]
    # The last token of each prompt, for each choice. vLLM judges the parameters of responses only
    # with a prompt to compute; those of the two calls differ.
    num_tokens = len(answers) - len(LOCAL_CALLS) + NUM_CHOICES - 1 + 2 * QUESTION_TOKENS
    assert await computed_tokens(served.region, DECODE) - computed == num_tokens
    await everything_is_given_back(served.region)


async def test_vllm_bench_serve_asks_a_region_as_it_asks_an_engine(
    served: Served, tmp_path: Path
) -> None:
    before = await records_at(served.url)
    found = await vllm_bench_serve(
        served.url, served.model, served.path, tmp_path, num_prompts=4, num_tokens=600
    )
    assert (found["completed"], found["failed"]) == (4, 0)
    assert found["total_output_tokens"] == 4 * 8
    assert 0 < found["p50_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    after = await records_at(served.url)
    made = [record for key, record in after.items() if key not in before]
    # The tool lets the endpoint count a prompt, too.
    assert sorted((record["outcome"], record["route"], record["reason"]) for record in made) == [
        ("ok", "direct", "forwarded"),
        *[("ok", "prefill_cluster", "above_threshold")] * 4,
    ]


async def test_odd_requests_get_a_plain_engines_answers(served: Served) -> None:
    """Legal and illegal ones, at each routed endpoint, on each way through the region."""
    asked = served.plain.odd
    assert len(asked) >= 500
    answers = await answers_of(served.url, asked)
    assert unlike(asked, served.plain.odd_answers, answers) == []
    routes = Counter(answer.route for answer in answers.values())
    assert min(routes[route] for route in ("local", "prefill_cluster", "direct")) > 100, routes
    await everything_is_given_back(served.region)
