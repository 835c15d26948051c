"""`mmtrain export --push` against a hub of this machine."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mmtrain.commands.cli import main
from tests.reference import model_config
from tests.stored_runs import save_run


class Hub(BaseHTTPRequestHandler):
    """A hub that takes what clients of `huggingface_hub` upload, and remembers it."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub = self.server
        hub.tokens.add(self.headers.get("Authorization"))
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            hub.created.append(wanted)
            self._answer({"url": f"{hub.address}/me/{wanted['name']}"}, 403 if wanted["name"] == "theirs" else 200)
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    hub.messages.append(line["value"]["summary"])
                else:
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer({"commitUrl": f"{hub.address}/me/model/commit/12", "commitOid": "12" * 20, "success": True})
        else:
            self._answer({"error": f"no {self.path} here"}, 404)

    def _answer(self, values: dict, status: int = 200) -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Nothing is written."""


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    server.created, server.files, server.messages, server.tokens = [], {}, [], set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def test_the_hub_gets_the_files_of_the_folder(tmp_path, hub, capsys):
    save_run(tmp_path / "run", model_config(None, "llama"))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--push", "me/model"]) == 0
    assert f"me/model: {hub.address}/me/model/commit/12" in capsys.readouterr().out
    (wanted,) = hub.created
    assert (wanted["organization"], wanted["name"], wanted.get("private") or wanted.get("visibility")) in [
        ("me", "model", True),
        ("me", "model", "private"),
    ]
    files = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert hub.files.keys() == files.keys()
    assert all(hub.files[name] == path.read_bytes() for name, path in files.items())
    assert hub.messages == ["Step 4"]
    assert hub.tokens == {"Bearer hf_of_a_test"}


def test_what_the_hub_refuses_leaves_the_folder(tmp_path, hub, capsys):
    save_run(tmp_path / "run", model_config(None, "llama"))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--push", "me/theirs"]) == 2
    message = capsys.readouterr().err
    assert "--push me/theirs: " in message and "403" in message and "is complete, upload it again with" in message
    assert (tmp_path / "out/README.md").exists() and not hub.files


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [("a/b/c", "hf_x", "write it as owner/name"), ("me/model", "", "no token of the hub; set HF_TOKEN")],
)
def test_what_cannot_succeed_is_refused_before_the_export(tmp_path, hub, monkeypatch, capsys, name, token, message):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("mmtrain.export.push.get_token", lambda: token or None)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--push", name]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
