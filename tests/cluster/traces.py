"""What a cluster leaves on the machine while it runs, and must not leave afterwards."""

import json
import os
import subprocess
from pathlib import Path

MARK = "CLUSTER_TEST_MARK"
"""An environment variable, by whose value a test knows its processes."""


def marked(mark):
    """Return the processes of this machine that carry the mark, nested namespaces included."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def network_namespaces(processes):
    return {os.readlink(f"/proc/{process}/ns/net") for process in processes}


def names_on_the_machine():
    """Return what a cluster could leave behind under a name."""
    links = subprocess.run(["ip", "-json", "link"], capture_output=True, check=True).stdout
    spaces = Path("/run/netns")
    return (
        sorted(link["ifname"] for link in json.loads(links)),
        sorted(spaces.iterdir()) if spaces.exists() else [],
        Path("/proc/self/mounts").read_text(),
        Path("/etc/hosts").read_text(),
        os.uname().nodename,
    )
