"""How long an engine waits for its agent: with nothing to compute, or for a new request. Pure."""

IDLE_WAIT_SHARE = 9.0
MIN_IDLE_WAIT_S = 0.004
MAX_IDLE_WAIT_S = 0.025
"""vLLM's engine core polls a connector that is not ready without a pause. So a scheduling pass with
nothing to compute waits for the agent, for a time that grows with the duration of a pass: a waiting
engine then takes about a tenth of a core from prefills beside it, on slow machines too. A new
request may have to wait for the maximum.
"""

ANSWER_S = 0.002
"""How long a pass waits for the agent's answer about a new request. What has landed by then is
loaded during this pass instead of the next one, which makes the first token a decode step sooner.
"""


def idle_wait_s(pass_s: float) -> float:
    """Seconds to wait for the agent after a pass of `pass_s` that had nothing to compute."""
    return min(max(MIN_IDLE_WAIT_S, IDLE_WAIT_SHARE * pass_s), MAX_IDLE_WAIT_S)
