"""Restricts the gRPC port of the replicas of Ray Serve to the loopback interface."""

from __future__ import annotations

from ray.serve._private import replica

_add_port = replica.add_port_to_grpc_server


def bind_to_loopback() -> None:
    """Binds the gRPC server of the replica in this process to the loopback interface.

    The server listens on all interfaces without authentication and unpickles what it receives, so
    any client that reaches the port can execute code. Maxray does not use it. Ray has no setting
    for the address, so this function patches the function that adds the port, and deployments call
    it in their constructor, before the port is opened.
    """
    replica.add_port_to_grpc_server = lambda server, address: _add_port(
        server, address.replace("[::]", "127.0.0.1")
    )
