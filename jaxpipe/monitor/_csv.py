"""`CSVMonitor`: files of numbers."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import final

from jaxpipe.config import CSVMonitorSection

from ._event import Event


@final
class CSVMonitor:
    """Writes a file for each name, with DeepSpeed's names of files and columns.

    `Train/Samples/lr` becomes `Train_Samples_lr.csv`, with the columns `step`, samples trained, and `lr`. A run that
    goes on appends.

    Args:
        section: The configuration.
    """

    def __init__(self, section: CSVMonitorSection) -> None:
        self._folder = Path(section.output_path) / section.job_name
        self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            path = self._folder / f"{event.name.replace('/', '_').replace(' ', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if is_new:
                    writer.writerow(["step", event.name.rpartition("/")[2]])
                writer.writerow([event.samples, event.value])
