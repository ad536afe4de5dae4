"""What the user wrote: YAML, DeepSpeed JSON, overrides, knobs, and the rules between them.

Nothing is re-exported here: a rank imports `overrides` from the user's own environment, which may have no pydantic.
"""
