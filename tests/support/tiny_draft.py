"""A tiny Qwen3-Next with a multi-token prediction module whose guesses are often right.

A random module would guess nothing. This one repeats the target's only full-attention layer, weight
for weight, and the other layers change little. So it computes nearly what the target does, as long
as its own KVCache of the prompt is right: a wrong one shows in the share of accepted tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from deploy.lab.demo.tiny_specs import MODELS, Parameter, TinyModel

QUIET = 0.1
"""What is left of the output of the layers that the module does not have."""
REPEATED = "model.layers.1."
MODULE = "mtp.layers.0."
_OUTPUTS = ("out_proj.weight", "down_proj.weight")

_BASE = MODELS["qwen3-next-tiny"]
_LAYER_TYPES = ("linear_attention", "full_attention", "linear_attention")
CONFIG: Mapping[str, Any] = {
    **_BASE.config,
    "num_hidden_layers": len(_LAYER_TYPES),
    "layer_types": list(_LAYER_TYPES),
    # vLLM gives the module's layer the number 0, and wants experts in it.
    "mlp_only_layers": [],
    "num_nextn_predict_layers": 1,
}


class TinyDraft(TinyModel):
    """The weights of a tiny Qwen3-Next and of its module."""

    def parameters(self) -> Iterator[Parameter]:
        hidden = self.config["hidden_size"]
        for parameter in super().parameters():
            if parameter.name.startswith("model.layers.") and REPEATED not in parameter.name:
                quiet = parameter.name.endswith(_OUTPUTS)
                yield replace(parameter, std=parameter.std * QUIET) if quiet else parameter
                continue
            yield parameter
            if parameter.name.startswith(REPEATED):
                name = parameter.name.replace(REPEATED, MODULE)
                yield replace(parameter, name=name, source=parameter.name)
        for name in ("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding"):
            yield Parameter(f"{name}.weight", (hidden,))
        # The embedding of the next token goes through as it is, the target's hidden state not.
        rows = [[float(column == row) for column in range(2 * hidden)] for row in range(hidden)]
        values = tuple(value for row in rows for value in row)
        yield Parameter("mtp.fc.weight", (hidden, 2 * hidden), values=values)


TINY_DRAFT = TinyDraft(
    name="qwen3-next-mtp-tiny",
    kind="recurrent",
    seed=20266,
    dtype="bfloat16",
    config=CONFIG,
    engine_args=_BASE.engine_args,
)
