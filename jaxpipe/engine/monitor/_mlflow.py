"""`MLflowMonitor`: a run in MLflow."""

import importlib
import time
from collections.abc import Sequence
from typing import Any, final

from jaxpipe.config import MLflowSection

from ._event import Event


@final
class MLflowMonitor:
    """Logs to the program's active MLflow run, or to a new run if there is none."""

    def __init__(self, section: MLflowSection) -> None:
        # An optional library, which type checkers need not find.
        mlflow: Any = importlib.import_module("mlflow")
        active = mlflow.active_run()
        self._is_own = active is None
        self._metric: Any = mlflow.entities.Metric
        # A client has no thread-local state, unlike the functions of the module.
        self._client: Any = mlflow.MlflowClient(section.tracking_uri if self._is_own else None)
        self._run_id: str = self._begun(section) if active is None else active.info.run_id

    def __call__(self, events: Sequence[Event]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(event.name, event.value, now_ms, event.samples) for event in events]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """End the run, if it was started here."""
        if self._is_own:
            self._client.set_terminated(self._run_id)

    def _begun(self, section: MLflowSection) -> str:
        found = self._client.get_experiment_by_name(section.experiment_name)
        experiment_id = (
            self._client.create_experiment(section.experiment_name)
            if found is None
            else found.experiment_id
        )
        return self._client.create_run(experiment_id, run_name=section.run_name).info.run_id
