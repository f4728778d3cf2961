"""One data set on a Hugging Face hub of this machine: as much of the hub's API as `datasets` asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "a" * 40


@contextmanager
def fake_hub(data_set: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serves the files of a data set, ID as org/name, and yields the value for HF_ENDPOINT."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            about, tree = f"/api/datasets/{data_set}", f"/api/datasets/{data_set}/tree/{REVISION}/"
            if path.startswith(tree):
                self.answer(json.dumps([entry(name) for name in files if name.startswith(path.removeprefix(tree))]))
            elif path in (about, f"{about}/revision/main", f"{about}/revision/{REVISION}"):
                siblings = [{"rfilename": name} for name in files]
                self.answer(json.dumps({"id": data_set, "sha": REVISION, "tags": [], "siblings": siblings}))
            elif (name := self.file_of(path)) in files:
                self.answer(files[name], {"ETag": f'"{digest(name)}"', "X-Repo-Commit": REVISION})
            else:
                there = path.startswith((about, f"/datasets/{data_set}/"))
                self.answer(b"", {"X-Error-Code": "EntryNotFound" if there else "RepoNotFound"}, status=404)

        do_HEAD = do_GET

        def file_of(self, path: str) -> str:
            """Returns the name of the file that a path resolves to."""
            for revision in ("main", REVISION):
                if path.startswith(prefix := f"/datasets/{data_set}/resolve/{revision}/"):
                    return path.removeprefix(prefix)
            return ""

        def answer(self, content: str | bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> None:
            content = content.encode() if isinstance(content, str) else content
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    def digest(name: str) -> str:
        return hashlib.sha1(files[name]).hexdigest()

    def entry(name: str) -> dict[str, object]:
        return {"type": "file", "oid": digest(name), "size": len(files[name]), "path": name}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, name="fake-hub")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
