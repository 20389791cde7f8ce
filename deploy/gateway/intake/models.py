"""The models that are served: which one a request means, and what clients are told of each.

Does not know clusters; whether an instance of a model is up is the watcher's to say.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from deploy.gateway.config import ModelConfig
from deploy.gateway.errors import ApiError


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as OpenAI's and vLLM's /v1/models show it. `created` is in seconds since 1970."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "prfaas"
    root: str
    parent: str | None = None
    max_model_len: int | None
    permission: tuple[str, ...] = ()


class ServedModels:
    """All models of one gateway, by name."""

    def __init__(self, models: Iterable[ModelConfig]) -> None:
        self._models = {model.name: model for model in models}
        self._since_s = int(time.time())

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the configuration."""
        return tuple(self._models)

    def resolve(self, name: str) -> str:
        """The model that a request means which names `name`. Raises `ApiError` 404."""
        # Like the engine: no name means the only model there is.
        if not name and len(self._models) == 1:
            return next(iter(self._models))
        if name in self._models:
            return name
        names = ", ".join(self._models)
        message = f"The model `{name[:200]}` does not exist. Served here: {names}."
        raise ApiError(404, "model_not_found", message, param="model")

    def card(self, name: str) -> ModelCard:
        """What clients are told of the model that `name` means. Raises `ApiError` 404."""
        model = self._models[self.resolve(name)]
        return ModelCard(
            id=model.name,
            created=self._since_s,
            root=model.root or model.name,
            max_model_len=model.max_model_len,
        )

    def cards(self) -> list[ModelCard]:
        """All of them."""
        return [self.card(name) for name in self._models]
