"""`prfaas health` without a process that answers."""

from typer.testing import CliRunner

from deploy.cli import app


def test_no_answer_is_said_with_the_reason() -> None:
    # Nothing listens on port 1, and what is no URL is not asked.
    for url, reason in (
        ("http://127.0.0.1:1/livez", "[Errno 111] Connection refused"),
        ("9100", "unknown url type: '9100'"),
    ):
        done = CliRunner().invoke(app, ["health", url])
        assert done.exit_code == 1
        assert done.stderr == f"{url} does not answer: {reason}\n"
