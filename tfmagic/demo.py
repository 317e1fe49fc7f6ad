"""`tfmagic demo`: execute the quickstart notebook and show in the terminal what each cell said and measured."""

from __future__ import annotations

import os
from pathlib import Path

QUICKSTART = Path(__file__).parent / "notebooks" / "01_quickstart.ipynb"


def main() -> int:
    """Run the quickstart; leave the executed notebook and its HTML beside it (in the current folder if installed).

    Returns the exit code: 0, or 1 when a cell failed.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from rich.console import Console

    console = Console(highlight=False)
    folder = _output_folder()
    notebook = nbformat.read(QUICKSTART, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
        on_cell_executed=lambda cell, **_: _show(console, cell),
    )
    # Text view: no widget in a headless run, so that the saved notebook holds plain results only.
    os.environ["TFMAGIC_VIEW"] = "text"
    try:
        client.execute()
        failed = False
    except CellExecutionError as error:
        console.print(f"A cell failed: {error.ename}: {error.evalue}", style="red", markup=False)
        failed = True
    executed = folder / "01_quickstart.executed.ipynb"
    nbformat.write(notebook, executed)
    executed.with_suffix(".html").write_text(_html(notebook))
    console.print(f"Executed notebook: {executed}\nIts HTML:          {executed.with_suffix('.html')}", markup=False)
    console.print("The engine stays resident; `tfmagic status` shows it, `tfmagic stop` ends it.", markup=False)
    return int(failed)


def _output_folder() -> Path:
    """Beside the notebook in a source checkout, else the current folder: an installed package is not written to."""
    source = QUICKSTART.resolve().parent
    return source if (source.parent / "pyproject.toml").exists() else Path.cwd()


def _show(console, cell) -> None:
    """Print one executed cell: its source, quiet, and the plain text of what it showed."""
    if cell.cell_type != "code":
        return
    console.rule(style="dim")
    console.print(cell.source, style="dim", markup=False)
    for output in cell.outputs:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        console.print(text.rstrip(), markup=False)


def _html(notebook) -> str:
    """The notebook as one self-contained page: no script or font from elsewhere."""
    from nbconvert import HTMLExporter

    names = ("require_js", "mathjax", "jquery", "mermaid_js", "mermaid_layout_elk_js", "jupyter_widgets_base")
    exporter = HTMLExporter(**{f"{name}_url": "" for name in names})
    return exporter.from_notebook_node(notebook)[0]
