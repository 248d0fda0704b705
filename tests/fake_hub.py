"""A Hub in a thread: an HTTP server that keeps repositories in memory and speaks the part of the Hub's protocol that cdlm uses.

    create        POST /api/repos/create
    card check    POST /api/validate-yaml
    what is LFS   POST /api/models/{id}/preupload/{rev}
    LFS           POST /{id}.git/info/lfs/objects/batch, then PUT /lfs/{oid}
    commit        POST /api/models/{id}/commit/{rev}   (ndjson: header, file, lfsFile)
    what is there GET  /api/models/{id}[/revision/{rev}], GET /api/models/{id}/tree/{rev}
    download      HEAD and GET /{id}/resolve/{rev}/{path}

Every write needs the token. `faults` makes requests fail: (method, text in the path) -> a status, "reset" (the connection is cut
before an answer) or "cut" (it is cut in the middle of the body). `requests` is everything that was asked, in order.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_onlyForTheTestsOfThisRepository"


@dataclass
class Repository:
    """Files by path, as the last commit left them. lfs: the paths that the commit gave as LFS pointers."""

    visibility: str = "public"
    gated: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    lfs: set[str] = field(default_factory=set)
    commits: list[str] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)

    @property
    def sha(self) -> str:
        """A commit hash that changes with the content."""
        return hashlib.sha1(repr(sorted((name, hashlib.sha1(data).hexdigest()) for name, data in self.files.items())).encode()).hexdigest()


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class FakeHub:
    """`with FakeHub() as hub:` serves at hub.url until the block ends."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: dict[tuple[str, str], int | str] = {}
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def asked(self, method: str, part: str) -> list[str]:
        return [path for m, path in self.requests if m == method and part in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_) -> None:
        pass

    # ---- answers ----

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: object, status: int = 200, **headers: str) -> None:
        self._answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def _refuse(self, status: int, message: str, code: str = "") -> None:
        self._json({"error": message}, status, **({"X_Error_Code": code} if code else {}), X_Error_Message=message)

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.close()

    # ---- requests ----

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        fault = next((f for (method, part), f in self.hub.faults.items() if method == self.command and part in path), None)
        length = int(self.headers.get("Content-Length") or 0)
        if fault == "cut":
            self.rfile.read(length // 2)
            return self._cut()
        body = self._body(length)
        if fault == "reset":
            return self._cut()
        if isinstance(fault, int):
            return self._refuse(fault, f"the test asked for {fault}")
        if self.command in ("POST", "PUT") and not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "Invalid username or password.")
        for method, pattern, answer in _ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                return answer(self, body, **match.groupdict())
        return self._refuse(404, f"no such page: {path}")

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _body(self, length: int) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(length)
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _repository(self, repo: str) -> Repository | None:
        """The repository if the one who asks may see it; else the answer that the Hub gives is sent, and None returned."""
        found, known = self.hub.repositories.get(repo), self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if found is None or (found.visibility == "private" and not known):
            self._refuse(404 if known else 401, "Repository Not Found", "RepoNotFound")
            return None
        return found

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.hub.repositories:
            return self._json({"error": "You already created this model repo", "url": f"{self.hub.url}/{repo}"}, 409)
        self.hub.repositories[repo] = Repository(asked.get("visibility", "public"))
        self._json({"url": f"{self.hub.url}/{repo}"})

    def validate(self, body: bytes) -> None:
        card = json.loads(body)["content"]
        good = card.startswith("---\n") and card.count("---\n") >= 2
        self._json({"errors": [] if good else [{"message": "no metadata"}], "warnings": []}, 200 if good else 400)

    def preupload(self, body: bytes, repo: str) -> None:
        if (there := self._repository(repo)) is None:
            return
        files = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            is_lfs = path.endswith((".safetensors", ".png")) or file["size"] > 10 * 2**20
            content = there.files.get(path)
            oid = None if content is None else hashlib.sha256(content).hexdigest() if path in there.lfs else git_oid(content)
            mode = "lfs" if is_lfs else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": path in there.ignored, "oid": oid})
        self._json({"files": files})

    def batch(self, body: bytes, repo: str) -> None:
        if self._repository(repo) is None:
            return
        objects = []
        for wanted in json.loads(body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._refuse(400, "the content is not what its oid says")
        self.hub.objects[oid] = body
        self._answer(200)

    def commit(self, body: bytes, repo: str) -> None:
        if (there := self._repository(repo)) is None:
            return
        files, lfs, summary = dict(there.files), set(there.lfs), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                summary = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile" and value["oid"] in self.hub.objects:
                files[value["path"]] = self.hub.objects[value["oid"]]
                lfs.add(value["path"])
            else:
                return self._refuse(400, f"can't commit {line.decode()}")
        there.files, there.lfs = files, lfs
        there.commits.append(summary)
        self._json({"commitUrl": f"{self.hub.url}/{repo}/commit/{there.sha}", "commitOid": there.sha})

    def info(self, body: bytes, repo: str, rev: str | None = None) -> None:
        if (there := self._repository(repo)) is not None:
            siblings = [{"rfilename": name} for name in there.files]
            self._json({"id": repo, "modelId": repo, "sha": there.sha, "private": there.visibility == "private", "siblings": siblings})

    def tree(self, body: bytes, repo: str, rev: str, under: str | None = None) -> None:
        if (there := self._repository(repo)) is None:
            return
        names = [name for name in there.files if under is None or name.startswith(f"{under}/")]
        if under is not None and not names:
            return self._refuse(404, f"{under} does not exist", "EntryNotFound")
        rows = []
        for name in names:
            row = {"type": "file", "path": name, "size": len(there.files[name]), "oid": git_oid(there.files[name])}
            if name in there.lfs:
                row["lfs"] = {"oid": hashlib.sha256(there.files[name]).hexdigest(), "size": row["size"], "pointerSize": 134}
            rows.append(row)
        self._json(rows)

    def resolve(self, body: bytes, repo: str, rev: str, path: str) -> None:
        if (there := self._repository(repo)) is None:
            return
        if there.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "Access to this model is restricted", "GatedRepo")
        if path not in there.files:
            return self._json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=there.sha)
        content = there.files[path]
        headers = {"X_Repo_Commit": there.sha, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if self.command == "HEAD":
            return self._answer(200, content, **headers)
        start, status = 0, 200
        if ranged := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, status = int(ranged[1]), 206
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._answer(status, content[start:], **headers)


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_ROUTES = [
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("POST", rf"/api/models/{_REPO}/preupload/main", _Handler.preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.put),
    ("POST", rf"/api/models/{_REPO}/commit/main", _Handler.commit),
    ("GET", rf"/api/models/{_REPO}(/revision/(?P<rev>[^/]+))?", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/tree/(?P<rev>[^/]+)(/(?P<under>.+))?", _Handler.tree),
    ("HEAD", rf"/{_REPO}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", _Handler.resolve),
    ("GET", rf"/{_REPO}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
