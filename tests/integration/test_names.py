"""Hosts whose names have several addresses, over real sockets: `stories_of_names` tells them, in a
mount namespace with an /etc/hosts of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import stories_of_names
from agent_process import CHILD_ENV


def test_hosts_with_several_addresses(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(stories_of_names.HOSTS)
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    own = ["unshare", *as_root, "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']
    child = [sys.executable, stories_of_names.__file__]
    done = subprocess.run(
        [*own, str(hosts), *child],
        env=CHILD_ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
