# SPDX-License-Identifier: Apache-2.0
"""The start of a process that is one of several: it joins the others, and their devices."""

import socket
import time

import jax

from sharding.processes import LostProcess

_RETRY_S = 0.2
HEARTBEAT_S = 30  # without a sign of life, after which a process counts as lost
START_S = 300  # to wait for the others at the start
_SHUTDOWN_S = 20


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    heartbeat_timeout_s: int = HEARTBEAT_S,
    start_timeout_s: int = START_S,
) -> None:
    """Makes this the `process`-th of so many, before anything looks for devices.

    `coordinator`: host:port of process 0. What is not given is told by the cluster: Slurm, Open
    MPI, Kubernetes with indexed jobs, Cloud TPU and GKE, as `jax.distributed.initialize` knows
    them. When a process is lost the others end within `heartbeat_timeout_s`. Raises ValueError
    where nothing tells it, LostProcess if process 0 is not there in time. Where others do not come,
    jax ends this process and says so.
    """
    given = {"coordinator": coordinator, "num_processes": processes, "process_id": process}
    missing = ", ".join(f"--{name}" for name, value in given.items() if value is None)
    if coordinator is not None:
        host, port = address_of(coordinator)
        if process:
            wait_for(host, port, start_timeout_s)
    # Or a process that is asked to end (SIGTERM) would note it and go on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            # Who says all has all devices of this machine; a cluster may give each process one.
            cluster_detection_method=None if missing else "deactivate",
            initialization_timeout=start_timeout_s,
            heartbeat_timeout_seconds=heartbeat_timeout_s,
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    except ValueError as error:
        remedy = f"no cluster that tells {missing}; give them" if missing else "correct the flags"
        raise ValueError(f"{error} {remedy}") from error


def address_of(coordinator: str) -> tuple[str, int]:
    """Returns host and port of "host:port"; ValueError for what is not so."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"coordinator {coordinator!r} must be host:port, such as 10.0.0.1:55527")
    return host.strip("[]"), int(port)


def wait_for(host: str, port: int, timeout_s: float) -> None:
    """Returns when somebody listens at host:port; LostProcess if that is not in time.

    jax would abort this process, with the stack of its threads.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LostProcess(
                    f"process 0 is not at {host}:{port} after {timeout_s} s ({error}); start it, "
                    "or correct --coordinator"
                ) from None
        time.sleep(_RETRY_S)
