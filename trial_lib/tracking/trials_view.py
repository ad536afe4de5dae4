"""The view in which MLflow's pages show a study's trials: which runs, in what order, with which columns and charts.

By default MLflow opens an experiment at its traces, folds trials under their study and shows no metric. A saved view is
a tag of the experiment, in the form of MLflow's "Views" menu. The menu offers the view, and a link with its key opens
it.
"""

import json
from collections.abc import Sequence
from typing import Any

from trial_lib.command.switches import path_of
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.records.study_folder import StudyRecord
from trial_lib.tracking.run_content import (
    ACCUMULATION_PARAM,
    MICRO_BATCH_PARAM,
    PURPOSE,
    STAGE_PARAM,
    STUDY_ID,
    legal_name,
)

_TAG = "mlflow.sharedViewState."
_KNOBS = (STAGE_PARAM, MICRO_BATCH_PARAM, ACCUMULATION_PARAM)
# MLflow puts a chart of each metric into the section of this name. Without the section it shows none of them.
_MLFLOWS_SECTION = "Model metrics"


def view_key(study_id: str) -> str:
    """Returns the key of a study's view in a link."""
    return study_id


def trials_view(record: StudyRecord) -> tuple[str, str]:
    """Returns a study's view as an experiment's tag: its name and its value. The same record gives the same view."""
    metric = SEARCH_METRICS[record.metric]
    value = f"metrics.`{metric.name}`"
    knobs = [*_KNOBS, *(legal_name(path_of(place)) for place in record.switches)]
    params = [f"params.`{name}`" for name in knobs]
    columns = [value, *params, "tags.`outcome`", "attributes.`Description`"]
    state = {
        # Only the trials. The study's own run would count as one of them.
        "searchFilter": f"tags.{STUDY_ID} = '{record.study_id}' AND tags.{PURPOSE} LIKE '%'",
        "orderByKey": value,
        "orderByAsc": metric.smaller_is_better,
        "selectedColumns": columns,
        "columnOrder": columns,
        "runsHiddenMode": "SHOW_ALL",
        **_charts(metric.name, knobs),
    }
    created_at = int(record.started_at * 1000)
    view = {
        "name": f"Trials of {record.study_id}",
        "createdAt": created_at,
        "updatedAt": created_at,
        "state": json.dumps(state),
    }
    return f"{_TAG}{view_key(record.study_id)}", json.dumps(view)


def _charts(metric: str, knobs: Sequence[str]) -> dict[str, Any]:
    """Returns the charts above MLflow's own: the metric by trial, by micro-batch size, and by knob."""
    cards = [
        {"type": "BAR", "metricKey": metric, "displayName": metric, "runsCountToCompare": 100},
        {
            "type": "SCATTER",
            "xaxis": {"key": MICRO_BATCH_PARAM, "type": "PARAM"},
            "yaxis": {"key": metric, "type": "METRIC"},
            "runsCountToCompare": 100,
        },
        {
            "type": "PARALLEL",
            "selectedParams": list(knobs),
            "selectedMetrics": [metric],
            "showAllRuns": True,
            "runsCountToCompare": 100,
        },
    ]
    sections = ["The search", _MLFLOWS_SECTION]
    everywhere = {"metricSectionId": sections[0], "deleted": False, "isGenerated": False}
    return {
        "compareRunCharts": [{"uuid": f"chart-{place}", **everywhere, **card} for place, card in enumerate(cards)],
        "compareRunSections": [
            {"uuid": name, "name": name, "display": True, "isReordered": False} for name in sections
        ],
    }
