"""What Prefect's artifacts say of MLflow's pages."""

import pytest

from zerotune.tasks import telling
from zerotune.tasks.telling import in_words, link_to_mlflow
from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.tracking.tracking_uri import trials_page, ways_to

[PAGE] = ways_to("http://host:5000", trials_page("1", "my-model-1"))
LOCAL = ways_to("sqlite:////w/mlflow.db", trials_page("1", "my-model-1"))


def test_what_has_to_be_typed_is_marked_as_code() -> None:
    assert in_words((PAGE,)) == f"[{PAGE.partition('?')[0]}]({PAGE})"
    assert in_words(LOCAL) == f"`{LOCAL[0]}`, then [{LOCAL[1].partition('?')[0]}]({LOCAL[1]})"
    assert in_words(("databricks",)) == "databricks"


def test_no_part_of_a_page_s_address_is_taken_for_a_secret() -> None:
    body = {"data": f"- in MLflow: {in_words(LOCAL)}\n- answer: {in_words((PAGE,))}\n[The trials]({PAGE})"}
    assert KnownSecrets(()).hide_in(body) == body


@pytest.mark.parametrize(("ways", "made"), [((PAGE,), [PAGE]), (LOCAL, []), (("databricks",), [])])
def test_a_link_leads_to_a_server_that_runs(
    ways: tuple[str, ...], made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[str] = []
    monkeypatch.setattr(telling, "create_link_artifact", lambda link, **_: links.append(link))
    link_to_mlflow(ways, "mlflow", "The trials")
    assert links == made
