"""What Prefect's artifacts say of MLflow's pages."""

import pytest

from tasks import mlflow_links
from tasks.mlflow_links import in_words, link_to_mlflow

PAGE = "http://host:5000/#/experiments/1/runs"
LOCAL = ("mlflow ui --backend-store-uri sqlite:////w/mlflow.db", "http://127.0.0.1:5000/#/experiments/1/runs")


def test_what_has_to_be_typed_is_marked_as_code() -> None:
    assert in_words((PAGE,)) == PAGE
    assert in_words(LOCAL) == f"`{LOCAL[0]}`, then {LOCAL[1]}"


@pytest.mark.parametrize(("ways", "made"), [((PAGE,), [PAGE]), (LOCAL, []), (("databricks",), [])])
def test_a_link_leads_to_a_server_that_runs(
    ways: tuple[str, ...], made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[str] = []
    monkeypatch.setattr(mlflow_links, "create_link_artifact", lambda link, **_: links.append(link))
    link_to_mlflow(ways, "mlflow", "The trials")
    assert links == made
