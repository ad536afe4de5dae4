"""What a program saves in a trial never reaches a hub, however its class and its version of transformers upload."""

from types import ModuleType
from typing import Any

import pytest

from zerotune.trial_lib.rank import huggingface


class Hub:
    """A hub, and what reached it."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.saved: list[tuple[Any, ...]] = []

    def module(self, is_older: bool) -> Any:
        """Returns a module with a mixin as transformers 5 has it, or 4."""
        reached = self.reached

        class PushToHubMixin:
            def _upload_modified_files(self, *args: Any, **kwargs: Any) -> None:
                reached.append("files")

            def push_to_hub(self, repo_id: str) -> None:
                reached.append(repo_id)

        def _create_repo(self: Any, repo_id: str, **kwargs: Any) -> str:
            reached.append(repo_id)
            return repo_id

        if is_older:
            PushToHubMixin._create_repo = _create_repo  # type: ignore[attr-defined]
        module: Any = ModuleType("hub")
        module.PushToHubMixin = PushToHubMixin
        return module

    def models(self, module: Any) -> tuple[Any, Any]:
        """Returns an object that has a copy of `push_to_hub`, and one that saves in a way of its own."""
        hub = self

        class Model(module.PushToHubMixin):  # type: ignore[misc]
            def save_pretrained(self, folder: str, main: bool = True, push_to_hub: bool = False, **kwargs: Any) -> str:
                hub.saved.append((folder, main, kwargs))
                if push_to_hub:
                    hub.reached.append("repository")
                    self._upload_modified_files(folder)
                return folder

            def push_to_hub(self, repo_id: str) -> None:
                hub.reached.append(repo_id)

        class Own(Model):
            def save_pretrained(self, folder: str, **kwargs: Any) -> str:  # type: ignore[override]
                if kwargs.get("push_to_hub"):
                    hub.reached.append("own")
                return super().save_pretrained(folder, **kwargs)

        return Model(), Own()


@pytest.mark.parametrize("is_imported", [True, False], ids=["classes from before", "classes from after"])
@pytest.mark.parametrize("is_older", [True, False])
def test_nothing_is_uploaded(is_older: bool, is_imported: bool) -> None:
    hub = Hub()
    module = hub.module(is_older)
    if is_imported:
        model, own = hub.models(module)
        huggingface._upload_nothing(module)
    else:
        huggingface._upload_nothing(module)
        model, own = hub.models(module)
    assert model.save_pretrained("out", push_to_hub=True, repo_id="me/model") == "out"
    assert model.save_pretrained("out", False, True) == "out"
    assert own.save_pretrained("out", push_to_hub=True) == "out"
    for each in (model, own):
        each.push_to_hub("me/model")
        each._upload_modified_files("out")
    if is_older:
        assert model._create_repo("me/model", private=True) == "me/model"
    assert hub.reached == []
    assert hub.saved == [("out", True, {"repo_id": "me/model"}), ("out", False, {}), ("out", True, {})]
