"""Restriction of the gRPC port of Ray Serve's replicas to the loopback interface."""

from __future__ import annotations

from ray.serve._private import replica

_add_port = replica.add_port_to_grpc_server


def bind_to_loopback() -> None:
    """Binds the gRPC server of the replica in this process to the loopback interface.

    Ray Serve starts this server in each replica, on all interfaces and without authentication, and
    unpickles what it receives: any client that can reach the port can execute code. Calls between
    deployments use it only with `RAY_SERVE_USE_GRPC_BY_DEFAULT=1`, which Maxray does not set. Ray
    has no setting for the address, so this function patches the one that adds the port. Deployments
    call it in their constructor, which runs before the port is opened.
    """
    replica.add_port_to_grpc_server = lambda server, address: _add_port(
        server, address.replace("[::]", "127.0.0.1")
    )
