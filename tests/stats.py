"""`make stats [STATS_ARGS=--json]`: lines of Python by area, files, classes, keys, commands."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from deploy.cli import app

ROOT = Path(__file__).resolve().parents[1]
# A file belongs to the first area that has a prefix of its path.
AREAS = (
    "tests/",
    "scheduler/ netmon/ deploy/gateway/scheduling/",
    "kvmanager/",
    "transport/",
    "deploy/gateway/ local_pd/ prfaas/",
    "deploy/",
    "docs/ requirements/",
)


def leaves(command: Any) -> list[Any]:
    """The commands below this one that have none below them, or itself."""
    below = getattr(command, "commands", {}).values()
    return [leaf for one in below for leaf in leaves(one)] or [command]


def main() -> None:
    paths = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    rows = dict.fromkeys([*AREAS, "all source: lines", "its files", "its classes"], 0)
    for path in paths:
        text = (ROOT / path).read_text()
        area = next(area for area in AREAS if path.startswith(tuple(area.split())))
        rows[area] += text.count("\n")
        if area != "tests/":
            rows["all source: lines"] += text.count("\n")
            rows["its files"] += 1
            rows["its classes"] += len(re.findall(r"(?m)^ *class \w", text))
    # A test holds this page to the schema of the file.
    page = (ROOT / "docs/configuration.md").read_text().partition("\n## region.yaml\n")[2]
    rows["keys of region.yaml"] = page.partition("\n## ")[0].count("\n| `")
    root: Any = get_command(app)
    context = root.context_class(root, info_name="prfaas")
    # The root itself has only the names of its commands, and imports one when it is asked for it.
    tops = [root.resolve_command(context, [name])[1] for name in root.commands]
    commands = [leaf for top in tops for leaf in leaves(top)]
    rows["commands"] = len(commands)
    options = [one for each in commands for one in each.params if one.param_type_name == "option"]
    rows["options"] = len(options)
    table = "\n".join(f"{value:>9,}  {name}" for name, value in rows.items())
    print(json.dumps(rows) if "--json" in sys.argv[1:] else table)


if __name__ == "__main__":
    main()
