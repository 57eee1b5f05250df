"""Serves a classifier with Triton: writes the model repository, runs the server, asks it.

A leaf: it needs neither torch nor transformers, and its client needs no ONNX Runtime either.

    write(ServedModel(name="sst2", ...), Path("model_repository"))
    with TritonServer(Path("model_repository")) as server, Client(server.grpc_url) as client:
        client.classify(["a gripping film"])
"""

from serving.client import Classification, Classifier, Client, FakeClient
from serving.errors import (
    DeadlineError,
    ModelError,
    RepositoryError,
    RequestError,
    ServingError,
    StartError,
    UnavailableError,
)
from serving.model import Queue, ServedModel
from serving.repository import read, rollback, write
from serving.runtime import TritonServer, free_port

__all__ = [
    "Classification",
    "Classifier",
    "Client",
    "DeadlineError",
    "FakeClient",
    "ModelError",
    "Queue",
    "RepositoryError",
    "RequestError",
    "ServedModel",
    "ServingError",
    "StartError",
    "TritonServer",
    "UnavailableError",
    "free_port",
    "read",
    "rollback",
    "write",
]
