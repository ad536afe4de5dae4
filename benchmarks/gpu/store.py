"""Copies wheels without compressing what is in them, for all of them to be compressed together.

python store.py FOLDER WHEEL...
"""

import sys
import zipfile
from pathlib import Path


def main(folder: str, *wheels: str) -> None:
    for wheel in map(Path, wheels):
        with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(Path(folder) / wheel.name, "w") as stored:
            for file in packed.infolist():
                stored.writestr(file, packed.read(file), zipfile.ZIP_STORED)


main(*sys.argv[1:])
