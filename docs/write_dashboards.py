"""Writes Grafana's dashboards as JSON into deploy/observability/dashboards.

`make docs` runs it, and a test compares its texts with the files. What the panels show is in
`dashboard_panels`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dashboard_panels import BOARDS, Board, Panel
from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

FOLDER: Final = Path(__file__).resolve().parents[1] / "deploy/observability/dashboards"
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH, _HEIGHT = 12, 8
"""Of a panel; a row of Grafana's grid has 24."""


def files() -> dict[Path, str]:
    """The text of each dashboard, by its path."""
    return {FOLDER / f"prfaas-{board.name}.json": text_of(board) for board in BOARDS}


def text_of(board: Board) -> str:
    """The JSON of a dashboard."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(f"prfaas-{board.name}")
        .description(board.text)
        .tags(["prfaas"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .editable()
        .link(
            # From each dashboard to the others, which keep the time.
            dashboard.DashboardLink("PrfaaS")
            .type("dashboards")
            .tags(["prfaas"])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("region")
            .query("label_values(up, region)")
            .datasource(_SOURCE)
            .refresh(VariableRefresh.ON_DASHBOARD_LOAD)
        )
    )
    for panel in board.panels:
        made = made.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def _panel(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .min(0)
        .span(_WIDTH)
        .height(_HEIGHT)
        .legend(common.VizLegendOptions().show_legend(True))
    )
    if panel.is_stacked:
        made = made.fill_opacity(40).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for number, query in enumerate(panel.queries):
        made = made.with_target(
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + number))
        )
    return made


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
