"""ZeroTune's own Prefect server, a process of its own: `python prefect_app.py --host HOST --port PORT`.

Not by `python -m uvicorn`, which looks for modules in the user's folder first, where one may be called as one of ours
or of Prefect's.
"""

import argparse
import gc
import sys

_KEEP_ALIVE_S = 5


def main(host: str, port: int) -> None:
    """Serves until it is killed; its imports are spared the garbage collector's passes, a fifth of their time."""
    gc.disable()
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app()
    gc.freeze()
    gc.enable()
    uvicorn.run(app, host=host, port=port, timeout_keep_alive=_KEEP_ALIVE_S, log_level="warning")


if __name__ == "__main__":
    # Python looks for modules in this folder first, whose are found as `flows.*` alone; not where it is told not to.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    main(**vars(parser.parse_args()))
