"""`python -m kvmanager.agent`: the node agent without the rest of the command line."""

import typer

from kvmanager.agent.cli import agent_command

if __name__ == "__main__":
    typer.run(agent_command)
