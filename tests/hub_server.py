"""A stand-in for the hub, on this machine: the addresses that huggingface_hub calls to make a repository and commit."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_of_the_tests"


class Hub:
    """The hub's state; it answers while the context lasts.

    Attributes:
        url: its address.
        repositories: name -> branch -> path -> content.
        private: names of the repositories that were made private.
        messages: of the commits, in order.
        requests: method and path of every request, in order.
        refuses: part of a path -> status that such requests get.
    """

    def __init__(self):
        self.repositories, self.private, self.messages, self.requests, self.refuses = {}, set(), [], [], {}
        self._uploaded = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def download(self, name, folder, branch="main"):
        """Writes what a branch holds into a new folder."""
        for path, content in self.repositories[name][branch].items():
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / path).write_bytes(content)
        return Path(folder)

    def answer(self, method, path, body, token):
        """(status, JSON) for a request."""
        self.requests.append(f"{method} {path}")
        if path.startswith("/lfs/"):
            self._uploaded[path.removeprefix("/lfs/")] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if status := next((status for part, status in self.refuses.items() if part in path), None):
            return status, {"error": "Forbidden" if status == 403 else "broken"}
        if path == "/api/whoami-v2":
            return 200, {"name": "me"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            front = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            return (200, {}) if isinstance(front, dict) else (400, {"errors": [{"message": "no metadata"}]})
        if path.endswith(".git/info/lfs/objects/batch"):
            entries = json.loads(body)["objects"]
            actions = lambda oid: {"upload": {"href": f"{self.url}/lfs/{oid}"}}
            found = [{**entry, "actions": actions(entry["oid"])} for entry in entries]
            return 200, {"transfer": "basic", "objects": found}
        owner, name, verb, branch = (unquote(part) for part in path.removeprefix("/api/models/").split("/"))
        return self._branch(f"{owner}/{name}", verb, branch, body)

    def _create(self, asked):
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repositories:
            return 409, {"error": "exists", "url": f"{self.url}/{name}"}
        self.repositories[name] = {"main": {".gitattributes": b""}}
        if asked.get("visibility") == "private" or asked.get("private"):
            self.private.add(name)
        return 200, {"url": f"{self.url}/{name}"}

    def _branch(self, name, verb, branch, body):
        branches = self.repositories[name]
        if verb == "branch":
            if branch in branches:
                return 409, {"error": "exists"}
            branches[branch] = dict(branches["main"])
            return 200, {}
        files = branches[branch]
        if verb == "tree":
            return 200, [{"type": "file", "path": path, "size": len(x), "oid": "0"} for path, x in files.items()]
        if verb == "preupload":
            mode = lambda path: "lfs" if path.endswith(".safetensors") else "regular"
            paths = [entry["path"] for entry in json.loads(body)["files"]]
            return 200, {"files": [{"path": p, "uploadMode": mode(p), "shouldIgnore": False} for p in paths]}
        assert verb == "commit"
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self._uploaded[value["oid"]]
                assert len(files[value["path"]]) == value["size"]
            else:
                del files[value["path"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        status, value = self.hub.answer(self.command, path, body, self.headers.get("Authorization"))
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _answer

    def log_message(self, *_):
        pass
