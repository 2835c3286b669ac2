"""`CSVMonitor`: files of numbers."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import final

from jaxpipe._files import open_to_append
from jaxpipe.config import CSVMonitorSection

from ._event import Event


@final
class CSVMonitor:
    """Writes a file for each name, with DeepSpeed's names of files and columns.

    `Train/Samples/lr` becomes `Train_Samples_lr.csv`, with the columns `step`, samples trained, and
    `lr`. A run that goes on appends.
    """

    def __init__(self, section: CSVMonitorSection) -> None:
        self._folder = Path(section.output_path) / section.job_name
        self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            path = self._folder / f"{event.name.replace('/', '_').replace(' ', '_')}.csv"
            with open_to_append(path) as file:
                rows = io.StringIO()
                writer = csv.writer(rows)
                if file.tell() == 0:
                    writer.writerow(["step", event.name.rpartition("/")[2]])
                writer.writerow([event.samples, event.value])
                file.write(rows.getvalue().encode())
