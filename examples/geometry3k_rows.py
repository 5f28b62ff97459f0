"""Write problems of Geometry3K, with their figures, as rows of the environment `math`.

    python -m examples.geometry3k_rows GEOMETRY3K examples/data/geometry3k/problems.parquet

GEOMETRY3K has a folder for each problem, as https://github.com/lupantech/InterGPS publishes them (`train`, `val`,
`test` of its data): data.json and img_diagram.png. The answer is the text of the right choice, without the choices.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

FIGURE = "img_diagram.png"


def row_of(folder: Path) -> dict[str, Any]:
    told = json.loads((folder / "data.json").read_text())
    answer = told["choices"]["ABCD".index(told["answer"])]
    return {
        "id": told["id"],
        "problem": told["annotat_text"],
        "answer": answer,
        "images": [(folder / FIGURE).read_bytes()],
    }


def write_rows(source: Path, path: Path) -> int:
    """Write a parquet file and return the number of its rows, in the order of their ids."""
    rows = sorted((row_of(found.parent) for found in source.glob("*/data.json")), key=lambda row: int(row["id"]))
    if not rows:
        raise FileNotFoundError(f"{source} has no folders with a data.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write problems of Geometry3K as rows of the environment `math`.")
    parser.add_argument("source", type=Path, metavar="GEOMETRY3K", help="a folder for each problem")
    parser.add_argument("path", type=Path, metavar="FILE.parquet")
    options = parser.parse_args()
    print(f"{write_rows(options.source, options.path)} problems in {options.path}")


if __name__ == "__main__":
    main()
