"""Optuna's proxy in front of a database, as a process that can be killed: `python -m tests.helpers.proxy_server URL PORT`."""

from __future__ import annotations

import sys

from optuna.storages import get_storage, run_grpc_proxy_server

if __name__ == "__main__":
    run_grpc_proxy_server(get_storage(sys.argv[1]), host="localhost", port=int(sys.argv[2]))
