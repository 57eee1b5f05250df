"""A small web page: type a text, see what teacher and student say, and where they disagree on the validation set.

The page is one file and loads nothing. It talks to this server only, and this server asks the models through
`serving.client`. It listens on loopback unless told otherwise, and answers only who calls it by an address or by its
own name: a foreign site that points its name here is refused.

Shape legend: N rows, C classes.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any, assert_never

import numpy as np

from compressor import page
from compressor.artifact import Artifact
from compressor.dataset import read_examples, task_of, texts_of
from compressor.errors import ArtifactError, CompressorError, ConfigError
from compressor.evaluate import Labels, Logits, answers, check_served, queries
from compressor.report_answers import disagreements
from compressor.statistics import mcnemar
from compressor.tasks import Task
from serving.client import Classifier
from serving.errors import DeadlineError, NotFoundError, RequestError, ServingError, UnavailableError
from serving.exchange import Answer, Classification, Regression
from serving.model import Text

TEACHER, STUDENT = "teacher", "student"
MOST_BYTES = 1_000_000  # of a request; the models refuse texts that are far shorter
MOST_SHOWN = 200  # disagreements in the table
CHUNK = 64  # validation texts that are asked at once; a typed text waits for no more
SLOW_CLIENT_S = 30.0  # an idle connection is closed
HOST = re.compile(r"(\[(?P<address>[^\[\]]+)\]|(?P<name>[^\[\]:@/]+))(:\d+)?")  # of a request, with or without port
STATUSES: Mapping[type[Exception], HTTPStatus] = {
    RequestError: HTTPStatus.BAD_REQUEST,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineError: HTTPStatus.GATEWAY_TIMEOUT,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the page takes from the run folder of a build."""

    task: Task
    size_bytes: Mapping[str, int]
    """Of the ONNX file of teacher and student."""
    texts: Sequence[tuple[str, ...]]
    """The validation texts."""
    label_N: Labels


def read_run(artifacts: Mapping[str, Artifact]) -> Run:
    """Sizes and validation texts of a finished build, from its artifacts. Raises ArtifactError if some are missing."""
    parts = {found.manifest["kind"]: found for found in artifacts.values()}
    corpus = next((found for found in artifacts.values() if found.manifest["kind"] == "examples"), None)
    if corpus is None or not {"onnx", "int8"} <= set(parts):
        raise ArtifactError("the run has no corpus, ONNX models or INT8 model; run `compressor build` to the end")
    rows = read_examples(corpus.path / "validation.arrow")
    return Run(
        task=task_of(corpus),
        size_bytes={
            TEACHER: parts["onnx"].metrics["teacher"]["size_bytes"],
            STUDENT: parts["int8"].metrics["size_bytes"],
        },
        texts=texts_of(rows),
        label_N=np.array(rows["label"]),
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Teacher and student, and what can be asked of the two; threads may share it."""

    name: str
    """Of the student's model, shown as the title."""
    clients: Mapping[str, Classifier]
    """The served TEACHER and STUDENT."""
    run: Run | None = None
    _turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while the models are asked: clients serve one thread at a time, and calls side by side slow each other."""
    _look: threading.Lock = field(default_factory=threading.Lock)
    """Held while the validation set is asked, so that it is asked once."""
    _seen: list[tuple[list[Answer], dict[str, Any]]] = field(default_factory=list)
    """The disagreements, once they have been asked for, with what the models said of the first text alone."""

    def __post_init__(self) -> None:
        """Raise an error if a model is not served, or if the two, or the run, do not fit together."""
        teacher, student = self.clients[TEACHER], self.clients[STUDENT]
        try:
            _ = teacher.labels, student.labels
        except (NotFoundError, RequestError) as error:
            raise ConfigError(
                f"teacher and student of {self.name} are not both served ({error}); publish with publish.teacher on, "
                "and give --model the name of the student"
            ) from error
        if (teacher.labels, teacher.is_pair) != (student.labels, student.is_pair):
            raise ConfigError(
                f"the teacher of {self.name} answers {list(teacher.labels)}, the student {list(student.labels)}; "
                "serve a teacher and a student of one task"
            )
        if self.run is not None:
            check_served(student, self.run.task)

    @property
    def is_pair(self) -> bool:
        """Whether the models read two texts."""
        return self.clients[STUDENT].is_pair

    def facts(self) -> dict[str, Any]:
        """What the page knows before anything is typed."""
        sizes = self.run.size_bytes if self.run else {}
        names = ["Text"] if not self.is_pair else ["First text", "Second text"]
        if self.run is not None and self.is_pair:
            names = [column[0].capitalize() for column in self.run.task.columns]
        rows = len(self.run.texts) if self.run else 0
        return {"name": self.name, "texts": names, "size_bytes": dict(sizes), "validation_rows": rows}

    def classify(self, texts: Sequence[str]) -> dict[str, Any]:
        """What each model says of a text, or a pair, with the time of its call in ms. Raises ServingError."""
        wanted = 2 if self.is_pair else 1
        if len(texts) != wanted:
            raise RequestError(
                f"the request has {len(texts)} texts and model {self.name} reads {wanted}; send {wanted}"
            )
        sent: Text = (texts[0], texts[1]) if self.is_pair else texts[0]
        found = {}
        with self._turn:
            for name, client in self.clients.items():
                started = time.perf_counter()
                (answer,) = client.classify([sent])
                found[name] = {**_facts(answer), "latency_ms": 1000 * (time.perf_counter() - started)}
        return found

    def disagreements(self) -> dict[str, Any]:
        """Validation texts to which the two say different things. Raises ServingError.

        They are asked of the server once, and again where another version of a model answers the first text.
        """
        run = self.run
        if run is None:
            raise RequestError("there is no validation set here; start the page with --run and the folder of a build")
        with self._look:
            with self._turn:
                first = [client.classify(queries(run.texts[:1]))[0] for client in self.clients.values()]
            if not self._seen or self._seen[0][0] != first:
                self._seen[:] = [(first, self._compared(run))]
            return self._seen[0][1]

    def _compared(self, run: Run) -> dict[str, Any]:
        log_NC = {name: self._asked(client, run) for name, client in self.clients.items()}
        texts = [" / ".join(text) for text in run.texts]
        both = {"teacher": log_NC[TEACHER], "int8": log_NC[STUDENT]}
        found = disagreements(run.task, texts, run.label_N, both, split="validation", most=MOST_SHOWN)
        if not run.task.is_regression:
            right = [answers(run.task, both[kind]) == run.label_N for kind in ("teacher", "int8")]
            found |= mcnemar(right[0], right[1])
        return found

    def _asked(self, client: Classifier, run: Run) -> Logits:
        """What a model answers to the validation texts (N, C): logarithms of probabilities, or values."""
        found = np.empty((len(run.texts), run.task.outputs), dtype=np.float32)
        texts = queries(run.texts)
        for start in range(0, len(texts), CHUNK):
            with self._turn:
                replies = client.classify(texts[start : start + CHUNK])
            for row, answer in enumerate(replies, start=start):
                match answer:
                    case Classification(probabilities=probabilities):
                        found[row] = [probabilities[label] for label in run.task.labels]
                    case Regression(value=value):
                        found[row] = value
                    case _:
                        assert_never(answer)
        return found if run.task.is_regression else np.log(np.maximum(found, np.finfo(np.float32).tiny))


def _facts(answer: Answer) -> dict[str, Any]:
    match answer:
        case Classification(label=label, probabilities=probabilities, is_truncated=is_cut):
            return {"label": label, "probabilities": probabilities, "is_truncated": is_cut}
        case Regression(value=value, is_truncated=is_cut):
            return {"value": value, "is_truncated": is_cut}
        case _:
            assert_never(answer)


class PageServer(ThreadingHTTPServer):
    """Serves the page of a comparison; `url` is where."""

    daemon_threads = True

    def __init__(self, comparison: Comparison, *, host: str, port: int) -> None:
        """Listen on `host` and `port`, 0 for any free one. Raises ConfigError if that cannot be had."""
        self.comparison = comparison
        self.names = {"localhost", host.casefold(), socket.gethostname().casefold()}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on port {port} of {host}: {error.strerror}; stop what holds it, or give another --port "
                "or --host"
            ) from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    @cached_property
    def full_name(self) -> str:
        """The name of this machine with its domain; who knows it may wait for a name server to say so."""
        return socket.getfqdn().casefold()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write a fault into the log; a browser that went away is none."""
        if not isinstance(sys.exception(), ConnectionError):
            log.exception("the page failed to answer a request")


class _Handler(BaseHTTPRequestHandler):
    """One connection of a browser."""

    server: PageServer
    server_version, sys_version = "compressor", ""
    protocol_version = "HTTP/1.1"
    timeout = SLOW_CLIENT_S

    def do_GET(self) -> None:
        """The page, or the disagreements."""
        if not self._is_for_us():
            return
        match self.path.partition("?")[0]:
            case "/":
                nonce = secrets.token_urlsafe(16)
                text = page.render("ui.html", form="html", facts=self.server.comparison.facts(), nonce=nonce)
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", text, script=f"'nonce-{nonce}'")
            case "/disagreements":
                self._answer(lambda: self.server.comparison.disagreements())
            case path:
                self._refuse(HTTPStatus.NOT_FOUND, f"there is no {path} here; the page is at {self.server.url}")

    def do_POST(self) -> None:
        """What the models say of a text: {"texts": [...]} -> facts by model."""
        if not self._is_for_us():
            return
        length, kind = self.headers.get("Content-Length", ""), self.headers.get_content_type()
        if self.path.partition("?")[0] != "/classify":
            self._refuse(HTTPStatus.NOT_FOUND, f"nothing can be sent to {self.path}; send texts to /classify")
        # A form of a foreign site cannot send this type without being asked first, which is refused.
        elif kind != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body is {kind}; send application/json")
        elif not length.isascii() or not length.isdigit():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request does not say how long it is; send Content-Length")
        elif int(length) > MOST_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the request has {int(length):,} bytes; at most {MOST_BYTES:,} are read; send a shorter text",
            )
        else:
            body = self.rfile.read(int(length))
            self._answer(lambda: self.server.comparison.classify(_texts(body)))

    def _is_for_us(self) -> bool:
        """Whether the browser means this server: an address, or a name of this machine. Refuses the request if not."""
        host = self.headers.get("Host", "")
        parts = HOST.fullmatch(host)
        name = (parts["address"] or parts["name"]).casefold() if parts else ""
        if name in self.server.names or _is_address(name) or name == self.server.full_name:
            return True
        self._refuse(
            HTTPStatus.FORBIDDEN, f"the request is for the host {host!r}, which is not this one; open {self.server.url}"
        )
        return False

    def _answer(self, ask: Callable[[], dict[str, Any]]) -> None:
        try:
            found = ask()
        except (ServingError, CompressorError) as error:
            self._refuse(STATUSES.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR), str(error), close=False)
        else:
            self._send(HTTPStatus.OK, "application/json", json.dumps(found))

    def _refuse(self, status: HTTPStatus, sentence: str, *, close: bool = True) -> None:
        """Answer with an error; `close` where the body of the request has not been read."""
        self.close_connection = self.close_connection or close
        self._send(status, "application/json", json.dumps({"error": sentence}))

    def _send(self, status: HTTPStatus, kind: str, text: str, *, script: str = "'none'") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header(
            "Content-Security-Policy",
            f"default-src 'none'; script-src {script}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *message: Any) -> None:
        """Requests are no news."""
        log.debug(*message)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _texts(body: bytes) -> list[str]:
    """The texts of a request. Raises RequestError if it is no list of them."""
    try:
        found = json.loads(body)["texts"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(f'the request cannot be read ({error!r}); send {{"texts": ["a text"]}}') from error
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise RequestError('the texts of the request are no list of strings; send {"texts": ["a text"]}')
    return found
