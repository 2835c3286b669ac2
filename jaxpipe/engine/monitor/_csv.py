"""`CSVMonitor`: a CSV file for each metric."""

import csv
import io
from collections.abc import Sequence
from typing import final

from jaxpipe._util.files import open_to_append
from jaxpipe.config import CSVMonitorSection

from ._event import Event
from ._folder import RunFolder


@final
class CSVMonitor:
    """Writes a file for each metric, with DeepSpeed's names of files and columns.

    `Train/Samples/lr` becomes `Train_Samples_lr.csv`, with the columns `step` (samples trained) and
    `lr`. A run that continues appends to its files.
    """

    def __init__(self, section: CSVMonitorSection) -> None:
        self._folder = RunFolder(section.output_path, section.job_name, goes_on=True)

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            path = self._folder.path / f"{event.name.replace('/', '_').replace(' ', '_')}.csv"
            with open_to_append(path) as file:
                rows = io.StringIO()
                writer = csv.writer(rows)
                if file.tell() == 0:
                    writer.writerow(["step", event.name.rpartition("/")[2]])
                writer.writerow([event.samples, event.value])
                file.write(rows.getvalue().encode())
        self._folder.upload_in_time()

    def flush(self) -> None:
        """Upload changed files, if the folder is on a store."""
        self._folder.upload()

    def close(self) -> None:
        """Upload changed files and remove their temporary copies."""
        self._folder.close()
