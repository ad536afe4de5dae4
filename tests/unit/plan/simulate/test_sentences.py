"""The sentence of an error that has ended a foreseen run."""

from zerotune.trial_lib.plan.simulate.logs import sentence_of


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as found:  # noqa: BLE001
        return found


def test_an_error_that_a_library_has_raised_from_others_names_the_first() -> None:
    """As transformers does: its own words leave open what could not be imported, and why."""
    first = raised(OSError("no libcuda.so\nlook further"))
    second = RuntimeError("Failed to import modeling_bloom (look up to see its traceback):")
    error = ModuleNotFoundError("Could not import module 'Bloom'. Is it there?")
    second.__cause__, error.__cause__ = first, second
    said = sentence_of(error)
    assert said.startswith(
        "ModuleNotFoundError: Could not import module 'Bloom'. Is it there?, because of OSError: no libcuda.so"
    )
    assert "Failed to import" not in said
    # Another exception that was being handled is no cause.
    alone = ValueError("wrong")
    alone.__context__ = first
    assert "because" not in sentence_of(alone)
