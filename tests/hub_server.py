"""A small hub: the few routes of the real one that loading and pushing a model ask for, over HTTP on this machine.

Run a Python script against it with `Hub.run`: the script sees the server as the hub and an empty cache of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories by id: a folder, or the error code that every request for them gets."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folders: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []
        self.token: str | None = None  # whose bearer may write
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_POST(self) -> None:
                hub.take(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        """From now on nobody answers."""
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        """One request, as the hub would answer it."""
        self.requests.append(request.path)
        path = request.path.partition("?")[0]
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        other = re.match(r"/api/models/([^/]+/[^/]+)/", path)
        found = info or file or other
        if found is None or found[1] not in self.folders:
            self._error(request, 401, "RepoNotFound")
            return
        folder = self.folders[found[1]]
        if found is other and path.startswith(f"/api/models/{found[1]}/tree/"):
            files = sorted(entry for entry in folder.rglob("*") if entry.is_file())
            tree = [
                {"type": "file", "path": f.relative_to(folder).as_posix(), "size": f.stat().st_size, "oid": "0" * 40}
                for f in files
            ]
            self._send(request, json.dumps(tree).encode(), body)
        elif found is other:
            self._error(request, 404, "EntryNotFound")
        elif found[2] not in (None, "main", SHA):
            self._error(request, 404, "RevisionNotFound")
        elif info is not None:
            files = [entry.relative_to(folder).as_posix() for entry in folder.rglob("*") if entry.is_file()]
            names = [{"rfilename": file} for file in files]
            self._send(request, json.dumps({"id": found[1], "sha": SHA, "siblings": names}).encode(), body)
        elif found[1] in self.gated:
            self._error(request, 403, "GatedRepo")
        elif not (folder / found[3]).is_file():
            self._error(request, 404, "EntryNotFound")
        else:
            self._send(request, (folder / found[3]).read_bytes(), body)

    def take(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """One request that writes: to make a repository, to say how files are sent (inside the commit), a commit."""
        self.requests.append(request.path)
        path = request.path.partition("?")[0]
        if self.token is None or request.headers.get("Authorization") != f"Bearer {self.token}":
            self._send(request, b'{"error": "Invalid credentials in Authorization header"}', True, 401)
            return
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            known = name in self.folders
            self.private.setdefault(name, asked.get("visibility") == "private")
            self.folders.setdefault(name, self.home / "repositories" / name)
            self.folders[name].mkdir(parents=True, exist_ok=True)
            self._send(request, json.dumps({"url": f"{self.address}/{name}"}).encode(), True, 409 if known else 200)
        elif path == "/api/validate-yaml":
            self._send(request, b'{"errors": [], "warnings": []}', True)
        elif kept := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path):
            folder = self.folders[kept[1]]
            if kept[2] == "preupload":
                how = {"uploadMode": "regular", "shouldIgnore": False}
                files = [{"path": file["path"], **how} for file in json.loads(body)["files"]]
                self._send(request, json.dumps({"files": files}).encode(), True)
                return
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.commits.append(line["value"]["summary"])
                elif line["key"] == "file":
                    (folder / line["value"]["path"]).write_bytes(base64.b64decode(line["value"]["content"]))
            made = {"success": True, "commitOid": SHA, "commitUrl": f"{self.address}/{kept[1]}/commit/{SHA}"}
            self._send(request, json.dumps(made).encode(), True)
        else:
            self._error(request, 404, "EntryNotFound")

    def _error(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _send(self, request: BaseHTTPRequestHandler, content: bytes, body: bool, status: int = 200) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(content)))
        request.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        request.send_header("X-Repo-Commit", SHA)
        request.end_headers()
        if body:
            request.wfile.write(content)

    def run(self, script: str, **environment: str) -> list[str]:
        """The lines that a Python script prints when this is its hub."""
        settings = {
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(self.home / "hf"),
            "INLAY_CACHE": str(self.home / "inlay"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
            # No package index: nothing leaves this machine.
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_NO_INDEX": "1",
        }
        result = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | settings | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()
