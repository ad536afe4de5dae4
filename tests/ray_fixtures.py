"""A Ray cluster of several nodes on this machine: what the tests of studies over a cluster share."""

import contextlib
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
from ray._private.node import Node
from ray.cluster_utils import Cluster


class LocalCluster:
    """A head without slots, and nodes that stand for hosts, each with processors of its own.

    Attributes:
        address: that `--ray` takes.
        nodes: the hosts.
    """

    def __init__(self, hosts: int) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.address = str(self._cluster.address)
        self.nodes = [self.add_host() for _ in range(hosts)]

    def add_host(self) -> Node:
        """Adds a host with one slot."""
        return self._cluster.add_node(num_cpus=1)

    def processes_of(self, node: Node) -> list[psutil.Process]:
        """Returns all that a host runs: Ray's own, the study's actor, its fork server, and the ranks."""
        (raylet,) = node.all_processes["raylet"]
        above = psutil.Process(raylet.process.pid)
        return [above, *above.children(recursive=True)]

    def close(self) -> None:
        """Ends all nodes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._cluster.shutdown()


@contextlib.contextmanager
def local_cluster(hosts: int) -> Iterator[LocalCluster]:
    """Yields a cluster, and ends it."""
    cluster = LocalCluster(hosts)
    try:
        yield cluster
    finally:
        cluster.close()
