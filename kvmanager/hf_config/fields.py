"""Typed reading of a parsed Hugging Face config.json, with errors that name the field.

It knows JSON values. The `*_families` know what the fields mean.
"""

from collections.abc import Mapping
from typing import Any, Final

_MOST: Final = {"num_hidden_layers": 10_000}
"""Fields by which the work of reading grows, and the most that they may be."""
_MOST_ELSEWHERE: Final = 1 << 32
"""More than any dimension of a model; sums of such numbers are exact and fit a float."""


class ConfigError(ValueError):
    """A config from which the KVCache cannot be told. `field` is the path of a field inside it."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        shown = "missing" if value is None else f"is {_short(value)}"
        super().__init__(f"{field} {shown}: {problem}")
        self.field = field
        self.value = value


class Fields:
    """A config's fields. `defaults` replace missing keys, but not keys with the value null.

    `assumed` collects every default that was used, so that the result can name them.
    """

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, path: str = ""
    ) -> None:
        self._values = values
        self._defaults = defaults or {}
        self._path = path
        self.assumed: list[str] = []

    def value(self, name: str) -> Any:
        """The field as it is, its default, or None."""
        if name in self._values:
            return self._values[name]
        default = self._defaults.get(name)
        if default is not None:
            note = f"{self._path}{name} = {default}"
            if note not in self.assumed:
                self.assumed.append(note)
        return default

    def has(self, name: str) -> bool:
        """Whether the field has a value that is not null."""
        # Not by `value`: a question must not count as the use of a default.
        return self._values.get(name, self._defaults.get(name)) is not None

    def error(self, name: str, problem: str, value: object = None) -> ConfigError:
        """An error to raise about the field. `value` replaces the field's own value in the text."""
        shown = self._values.get(name) if value is None else value
        return ConfigError(self._path + name, shown, problem)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 to what models have. Raises ConfigError; null and missing are the
        same.
        """
        value = self.value(name)
        if value is None and default is not None:
            return default
        # To Python, true is the integer 1.
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "a whole number of at least 1 is needed")
        if value > (most := _MOST.get(name, _MOST_ELSEWHERE)):
            raise self.error(name, f"a number of at most {most} is needed")
        return value

    def integers(self, name: str, allowed: Mapping[int, object]) -> list[int]:
        """A list of the `allowed` whole numbers, each with its meaning. Raises ConfigError naming
        the first other one."""
        return [self._one_of(name, index, item, allowed) for index, item in self._items(name)]

    def strings(self, name: str, allowed: Mapping[str, object]) -> list[str]:
        """A list of the `allowed` words. Raises ConfigError naming the first other one."""
        return [self._one_of(name, index, item, allowed) for index, item in self._items(name)]

    def layer_numbers(self, name: str) -> set[int]:
        """A list of whole numbers from 1 on, as a set."""
        numbers = [item for _, item in self._items(name)]
        if not all(isinstance(item, int) and item >= 1 for item in numbers):
            raise self.error(name, "a list of layer numbers that start at 1 is needed")
        return set(numbers)

    def inner(self, name: str) -> "Fields":
        """A field that is itself an object. What it assumes is collected here too."""
        value = self.value(name)
        if not isinstance(value, Mapping):
            raise self.error(name, "an object is needed")
        fields = Fields(value, path=f"{self._path}{name}.")
        fields.assumed = self.assumed
        return fields

    def _items(self, name: str) -> list[tuple[int, Any]]:
        value = self.value(name)
        if not isinstance(value, list):
            raise self.error(name, "a list is needed")
        return list(enumerate(value))

    def _one_of(self, name: str, index: int, item: Any, allowed: Mapping[Any, object]) -> Any:
        # true and 1.0 equal 1, and a list or an object cannot be looked up.
        if isinstance(item, bool | float | list | dict) or item not in allowed:
            known = ", ".join(
                f"{word} ({meaning})" if meaning else str(word) for word, meaning in allowed.items()
            )
            raise self.error(f"{name}[{index}]", f"known here: {known}", value=item)
        return item


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
