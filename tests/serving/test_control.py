"""Who may control a server: whoever has its key, which its user alone can read."""

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from serving import (
    DeadlineError,
    RepositoryError,
    StartError,
    control,
)
from serving.control import Control, find_control
from serving.operations import deploy
from tests.serving.conftest import Served

pytestmark = pytest.mark.triton


def test_control_needs_the_key(served: Served) -> None:
    import tritonclient.grpc as library

    server, _, _ = served
    for path in ("repository/index", "repository/models/sst2/unload", "systemsharedmemory/region/a/register"):
        request = urllib.request.Request(f"http://{server.http_url}/v2/{path}", data=b"{}")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        caught.value.close()
        assert caught.value.code == 403
    client = library.InferenceServerClient(server.grpc_url)
    try:
        with pytest.raises(library.InferenceServerException, match="UNAVAILABLE"):
            client.unload_model("sst2")
    finally:
        client.close()
    wrong = Control(grpc_url=server.grpc_url, key="guess", repository="", staging="")
    with pytest.raises(Exception, match="This protocol is restricted"):
        wrong.states()


def test_the_file_of_the_key_is_readable_by_its_user_alone(served: Served) -> None:
    server, _, _ = served
    (file,) = Path(server.control.staging).parent.glob("control.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.parent.stat().st_mode & 0o777 == 0o700


def test_only_servers_of_ours_can_be_controlled(served: Served) -> None:
    with pytest.raises(StartError, match=r"no server of yours .* listens at 127.0.0.1:1; these do"):
        find_control("127.0.0.1:1")
    server, _, _ = served
    with pytest.raises(RepositoryError, match="holds no model 'sst2_student' that takes texts"):
        deploy(server.control, "sst2_student")
    assert re.match(r"[\w-]{32}", server.control.key)


def test_a_load_that_is_late_names_a_remedy_that_its_caller_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        late = Control(grpc_url=url, key="", repository="", staging="")
        with pytest.raises(DeadlineError, match=r"gave no answer within 0\.2 s; look into its log, and whether it is"):
            late.load("sst2")
