"""The notebooks run from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

#: What is printed where the main thing was done.
_PRINTED = {
    "profile_train_predict": ("labels in", "best"),
    "cost_model_in_metaschedule": ("cdmpp     best", "XGBModel  best", "of 64 measured"),
    "a_device_you_do_not_have": ("records of the EPYC learned",),
}
_FOLDER = Path(__file__).parents[2] / "notebooks"


@pytest.mark.check
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebook_executes(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1500, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert any(out.get("data", {}).get("image/png") for out in outputs), "the plot was drawn"
    text = "".join(out.get("text", "") for out in outputs)
    assert [line for line in _PRINTED[path.stem] if line not in text] == []
