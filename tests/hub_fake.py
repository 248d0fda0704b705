"""A Hub of one data set on this machine: the few endpoints that `datasets.load_dataset` asks, over real HTTP."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@contextlib.contextmanager
def serve(folder: Path, name: str, revisions: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Serve the files below `folder` as the data set `name`; yields the endpoint and the requests seen so far.

    revisions: branch or tag -> commit. A commit answers to its own name.
    """
    asked: list[str] = []
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    known = {**revisions, **{commit: commit for commit in revisions.values()}}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def refuse(self, code: str) -> None:
            self.answer(404, X_Error_Code=code)

        def entry(self, path: str) -> dict:
            return {"type": "file", "path": path, "size": len(files[path]), "oid": hashlib.sha1(files[path]).hexdigest()}

        def children(self, below: str, recursive: bool) -> list[dict]:
            inside = [file for file in files if file.startswith(f"{below}/" if below else "")]
            depth = len(Path(below).parts) + 1
            folders = sorted({"/".join(Path(file).parts[:depth]) for file in inside if len(Path(file).parts) > depth})
            shown = [{"type": "directory", "path": path, "size": 0, "oid": ""} for path in folders]
            return shown + [self.entry(file) for file in inside if recursive or len(Path(file).parts) == depth]

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlsplit(self.path).path)
            asked.append(f"{self.command} {path}")
            resolve, api = f"/datasets/{name}/resolve/", f"/api/datasets/{name}/"
            if path.startswith(resolve):
                revision, _, file = path.removeprefix(resolve).partition("/")
                if revision not in known:
                    return self.refuse("RevisionNotFound")
                if file not in files:
                    return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=known[revision])
                tag = hashlib.sha1(files[file]).hexdigest()
                return self.answer(200, files[file], ETag=f'"{tag}"', X_Repo_Commit=known[revision])
            if path.startswith(api):
                what, _, rest = path.removeprefix(api).partition("/")
                revision, _, below = rest.partition("/")
                if revision not in known:
                    return self.refuse("RevisionNotFound")
                if what == "revision":
                    siblings = [{"rfilename": file} for file in files]
                    found: object = {"id": name, "sha": known[revision], "siblings": siblings, "private": False, "tags": []}
                elif what == "tree":
                    found = self.children(below, "recursive=true" in self.path.lower())
                    if not found:
                        return self.refuse("EntryNotFound")
                elif what == "paths-info":
                    found = [self.entry(file) for file in json.loads(body)["paths"] if file in files]
                else:
                    return self.answer(404)
                return self.answer(200, json.dumps(found).encode(), Content_Type="application/json")
            return self.refuse("RepoNotFound")

        do_GET = do_HEAD = do_POST = handle_any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
