"""A server of ZeroTune's own, as a process, for its owner alone: `python own_server.py prefect ...`.

`python -m uvicorn` would search the user's folder for modules first. A file there may have the name of a module of
Prefect's.
"""

import argparse
import gc
import os
import sys
from typing import Any

_KEEP_ALIVE_S = 5


def main(kind: str, port: int, listener: int) -> None:
    """Serves until it is killed. The garbage collector is off during the imports, which saves a fifth of their time.

    Args:
        kind: `prefect` or `mlflow`.
        port: its port, for people who list processes.
        listener: the descriptor of the port's socket.
    """
    from flows.owners_only import CREDENTIAL, OwnersOnly
    from flows.prefect_server import LOOPBACK, HandedSocket

    credential = os.environ.pop(CREDENTIAL)
    gc.disable()
    import uvicorn

    app = OwnersOnly(_prefect() if kind == "prefect" else _mlflow(), credential)
    gc.freeze()
    gc.enable()
    # Another loop might not call the socket's own `listen`.
    config = uvicorn.Config(app, LOOPBACK, port, loop="asyncio", timeout_keep_alive=_KEEP_ALIVE_S, log_level="warning")
    uvicorn.Server(config).run([HandedSocket(fileno=listener)])


def _prefect() -> Any:
    from prefect.server.api.server import create_app

    return create_app()


def _mlflow() -> Any:
    # MLflow's application over the store of `MLFLOW_BACKEND_STORE_URI`, as `mlflow server` makes it.
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR

    store, artifacts = os.environ["MLFLOW_BACKEND_STORE_URI"], os.environ["MLFLOW_DEFAULT_ARTIFACT_ROOT"]
    os.environ.update({BACKEND_STORE_URI_ENV_VAR: store, ARTIFACT_ROOT_ENV_VAR: artifacts})
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(store, store, artifacts)
    from mlflow.server.fastapi_app import app

    return app


if __name__ == "__main__":
    # Python put this folder first on the path, unless it runs with -P. Its modules must only be found as `flows.*`.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["prefect", "mlflow"])
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--listener", required=True, type=int)
    main(**vars(parser.parse_args()))
