"""`python -m kvmanager.agent`: the node agent without the rest of the command line."""

import typer

from kvmanager.agent.cli import agent_command

if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(agent_command)
    app()
