"""A stand-in for the Hub's HTTP API on this machine, with repositories as dictionaries in memory.

It supports uploading and downloading of small files, but no LFS, branches or rate limits. Like the
Hub, it refuses a card whose license is not in LICENSES.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LICENSES = ("mit", "apache-2.0", "llama3", "other")


class Handler(BaseHTTPRequestHandler):
    """Answers one request; `server.repos` holds the repositories."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, value, code: int = 200, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        for name, text in (
            {
                "Content_Type": "application/json",
                "Content_Length": str(len(data)),
            }
            | headers
        ).items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def absent(self, what: str = "RepoNotFound", **headers: str) -> None:
        self.answer({"error": what}, 404, X_Error_Code=what, **headers)

    def received(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        data = self.received()
        repos = self.server.repos
        if path == "/api/repos/create":
            request = json.loads(data)
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            found = name in repos
            repos.setdefault(name, {"sha": "0" * 40, "files": {}})
            self.answer(
                {
                    "url": f"{self.server.url}/{name}",
                    "id": name,
                    "name": name,
                },
                409 if found else 200,
            )
        elif path == "/api/validate-yaml":
            license = re.search(
                r"^license: (.*)$",
                json.loads(data)["content"],
                re.MULTILINE,
            )
            if license and license[1] not in LICENSES:
                errors = [{"message": f"license {license[1]} is unknown"}]
            else:
                errors = []
            self.answer(
                {"errors": errors, "warnings": []},
                400 if errors else 200,
            )
        elif found := re.fullmatch(r"/api/models/(.+?)/preupload/.+", path):
            names = [file["path"] for file in json.loads(data)["files"]]
            self.answer(
                {
                    "files": [
                        {
                            "path": name,
                            "uploadMode": "regular",
                            "shouldIgnore": False,
                        }
                        for name in names
                    ]
                }
            )
        elif found := re.fullmatch(r"/api/models/(.+?)/commit/.+", path):
            if found[1].startswith("locked/"):
                return self.answer({"error": "You may not write here"}, 403)
            repo = repos[found[1]]
            for line in map(json.loads, data.splitlines()):
                if line["key"] == "file":
                    repo["files"][line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"]
                    )
            repo["sha"] = hashlib.sha1(data).hexdigest()
            url = f"{self.server.url}/{found[1]}/commit/{repo['sha']}"
            self.answer(
                {
                    "success": True,
                    "commitUrl": url,
                    "commitOid": repo["sha"],
                    "hookOutput": "",
                }
            )
        else:
            self.absent()
        return None

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        repos = self.server.repos
        if path == "/api/whoami-v2":
            return self.answer(
                {
                    "name": "me",
                    "type": "user",
                    "orgs": [],
                    "auth": {"type": "access_token"},
                }
            )
        found = re.fullmatch(
            r"/(?:api/models/)?([^/]+/[^/]+)(?:/(revision|tree|resolve)/([^/]+)/?(.*))?", path
        )
        repo = repos.get(found[1]) if found else None
        if repo is None:
            return self.absent()
        files = repo["files"]
        what = found[2]
        name = found[4]
        if what == "resolve":
            if name not in files:
                return self.absent("EntryNotFound", X_Repo_Commit=repo["sha"])
            tag = hashlib.sha1(files[name]).hexdigest()
            return self.answer(
                files[name],
                ETag=f'"{tag}"',
                X_Repo_Commit=repo["sha"],
                Content_Type="application/octet-stream",
            )
        if what == "tree":
            return self.answer(
                [
                    {
                        "type": "file",
                        "path": n,
                        "size": len(b),
                        "oid": "0" * 40,
                    }
                    for n, b in sorted(files.items())
                ]
            )
        return self.answer(
            {
                "_id": "0",
                "id": found[1],
                "modelId": found[1],
                "sha": repo["sha"],
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            | {
                "likes": 0,
                "siblings": [{"rfilename": n} for n in sorted(files)],
            }
        )

    do_HEAD = do_GET


def start() -> ThreadingHTTPServer:
    """Start it in a thread; `.url` is its address, `.repos` its repositories."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.repos = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def environment(server: ThreadingHTTPServer, home) -> dict[str, str]:
    """Return the variables that make a new process use `server` as the Hub."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": "hf_stand_in",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
