"""Results as markdown tables: printed line by line, and read back."""

from collections.abc import Sequence


def print_head(*columns: str) -> None:
    """Begin a table."""
    print_row(*columns)
    print("|---" * len(columns) + "|", flush=True)


def print_row(*cells: object) -> None:
    """Print one line of a table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def read_tables(text: str) -> list[list[dict[str, str]]]:
    """Find the tables in a text.

    Args:
        text: What benchmarks printed.

    Returns:
        Per table its rows, each a dictionary of cells by the column's name.
    """
    tables: list[list[dict[str, str]]] = []
    columns: Sequence[str] = ()
    for line in text.splitlines():
        if not line.startswith("|"):
            columns = ()
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not columns:
            columns = cells
            tables.append([])
        elif set("".join(cells)) - set("-:"):
            tables[-1].append(dict(zip(columns, cells, strict=False)))
    return tables
