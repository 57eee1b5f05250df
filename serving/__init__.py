"""Serves a classifier, or a regression, with Triton: writes the model repository, runs the server, asks it.

A leaf: it needs neither torch nor transformers, and its client needs no ONNX Runtime either.

    write(ServedModel(name="sst2", ...), Path("model_repository"))
    with TritonServer(Path("model_repository")) as server, Client(server.grpc_url) as client:
        client.classify(["a gripping film"])
"""

from serving.client import Classifier, Client, FakeClient
from serving.errors import (
    DeadlineError,
    ModelError,
    NotFoundError,
    RepositoryError,
    RequestError,
    ServingError,
    SmokeError,
    StartError,
    UnavailableError,
)
from serving.exchange import Answer, Classification, Regression
from serving.model import Queue, ServedModel, Text
from serving.repository import read, rollback, write
from serving.runtime import TritonServer, free_port

__all__ = [
    "Answer",
    "Classification",
    "Classifier",
    "Client",
    "DeadlineError",
    "FakeClient",
    "ModelError",
    "NotFoundError",
    "Queue",
    "Regression",
    "RepositoryError",
    "RequestError",
    "ServedModel",
    "ServingError",
    "SmokeError",
    "StartError",
    "Text",
    "TritonServer",
    "UnavailableError",
    "free_port",
    "read",
    "rollback",
    "write",
]
