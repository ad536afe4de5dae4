"""Ways to MLflow's pages, as Prefect's artifacts show them."""

from collections.abc import Sequence

from prefect.artifacts import create_link_artifact


def in_words(ways: Sequence[str]) -> str:
    """Returns the ways of a tracker as Markdown."""
    *commands, place = ways
    return ", then ".join([*(f"`{command}`" for command in commands), place])


def link_to_mlflow(ways: Sequence[str], key: str, text: str) -> None:
    """Creates a link artifact, unless a command has to be typed first: the link would lead nowhere."""
    if len(ways) == 1 and ways[0].startswith("http"):
        create_link_artifact(ways[0], key=key, link_text=text)
