"""How our tables look: no frames, titles at the left. For `rich.table.Table(**TABLE_STYLE)`."""

from typing import Any, Final

from rich.box import SIMPLE

TABLE_STYLE: Final[dict[str, Any]] = {
    "box": SIMPLE,
    "padding": (0, 1, 0, 0),
    "pad_edge": False,
    "title_justify": "left",
}
