"""ZeroTune's own Prefect server, as a process: `python prefect_app.py --host HOST --port PORT`.

`python -m uvicorn` would search the user's folder for modules first. A file there may have the name of a module of
Prefect's.
"""

import argparse
import gc
import sys

_KEEP_ALIVE_S = 5


def main(host: str, port: int) -> None:
    """Serves until it is killed. The garbage collector is off during the imports, which saves a fifth of their time."""
    gc.disable()
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app()
    gc.freeze()
    gc.enable()
    uvicorn.run(app, host=host, port=port, timeout_keep_alive=_KEEP_ALIVE_S, log_level="warning")


if __name__ == "__main__":
    # Python put this folder first on the path, unless it runs with -P. Its modules must only be found as `flows.*`.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    main(**vars(parser.parse_args()))
