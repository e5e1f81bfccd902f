"""Which CUDA programs can run: the table of ``data/validity-cuda``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cdmpp.errors import DatasetError

if TYPE_CHECKING:
    import pandas as pd

#: The table, and the compact ASTs of its programs.
TABLE_FILE, AST_FILE = "validity.parquet", "asts.parquet"


def load_verdicts(path: str | Path) -> pd.DataFrame:
    """The verdicts of a folder: a row a program and architecture (DatasetError if there is none, or it is damaged)."""
    import pandas as pd
    import pyarrow as pa

    file = Path(path) / TABLE_FILE
    try:
        return pd.read_parquet(file)
    except (OSError, pa.ArrowException, ValueError) as err:
        raise DatasetError(f"{path} holds no validity data: {err}") from err
