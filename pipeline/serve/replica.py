"""Restricts the gRPC port of the replicas of Ray Serve to the loopback interface."""

from __future__ import annotations

from ray.serve._private import replica

_add_port = replica.add_port_to_grpc_server


def bind_to_loopback() -> None:
    """Binds the gRPC server of the replica in this process to the loopback interface.

    Ray Serve starts a gRPC server in each replica. It listens on all interfaces without
    authentication and unpickles the data that it receives, so any client that can reach the port
    can execute code. Deployments use this server only if `RAY_SERVE_USE_GRPC_BY_DEFAULT=1` is set,
    which Maxray does not do. Since Ray has no setting for the address, this function patches the
    function that adds the port. Deployments must call it in their constructor, which runs before
    the port is opened.
    """
    replica.add_port_to_grpc_server = lambda server, address: _add_port(
        server, address.replace("[::]", "127.0.0.1")
    )
