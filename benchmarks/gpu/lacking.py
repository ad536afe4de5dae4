"""Prints what pip would install, as `name==version` lines, less the packages that a machine has already.

python lacking.py REPORT ALREADY_THERE
"""

import json
import re
import sys
from pathlib import Path


def normal(name: str) -> str:
    """Returns a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(report: str, already_there: str) -> None:
    lines = Path(already_there).read_text().splitlines()
    there = {normal(line) for line in lines if line and not line.startswith("#")}
    for package in json.loads(Path(report).read_text())["install"]:
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        if normal(name) not in there:
            print(f"{normal(name)}=={version}")


main(*sys.argv[1:])
