"""A gateway for commands that ask one: it takes the place of `deploy.region.client.ask`."""

import json
from collections.abc import Iterable
from typing import Any


class FakeGateway:
    """Gives `answers` one by one, raising those that are exceptions.

    `num_asked` counts the questions, `bodies` are the orders among them, `deleted` are the paths
    below the first one that were deleted.
    """

    def __init__(self, path: str, answers: Iterable[object]) -> None:
        self.num_asked = 0
        self.bodies: list[Any] = []
        self.deleted: list[str] = []
        self._path = path
        self._answers = iter(answers)

    def ask(
        self,
        url: str,
        path: str,
        kind: Any,
        *,
        key: str = "",
        body: Any = None,
        method: str = "",
    ) -> Any:
        if method == "DELETE":
            self.deleted.append(path.removeprefix(self._path))
            path = self._path
        assert (url, path) == ("http://g", self._path)
        self.num_asked += 1
        if body is not None:
            self.bodies.append(json.loads(body))
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, kind)
        return answer
