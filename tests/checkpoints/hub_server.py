# SPDX-License-Identifier: Apache-2.0
"""A server on this machine that poses as the Hugging Face Hub, with one repository."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(http.server.ThreadingHTTPServer):
    """Serves `files` {name: bytes} of `repository` at `revisions`; `sent` has names of files."""

    def __init__(self, repository, files, revisions):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository, self.files, self.revisions = repository, files, revisions
        self.sent = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        files = self.server.files
        path = urllib.parse.unquote(self.path.split("?")[0])
        api, resolve = (
            f"/api/models/{self.server.repository}/",
            f"/{self.server.repository}/resolve/",
        )
        if path.startswith(api + "tree/"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in files.items()]
            self.reply(200, json.dumps(tree).encode())
        elif path.startswith(api + "revision/"):
            if path.removeprefix(api + "revision/") not in (COMMIT, *self.server.revisions):
                self.reply(404, b"{}", error="RevisionNotFound")
                return
            siblings = [{"rfilename": name} for name in files]
            about = {"id": self.server.repository, "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(about).encode())
        elif path.startswith(resolve):
            name = path.removeprefix(resolve).split("/", 1)[1]
            if body:  # before the client may go on
                self.server.sent.append(name)
            self.reply(200, files[name], body)
        elif path.startswith("/api/models/org/gated/"):
            self.reply(403, b"{}", error="GatedRepo")
        else:
            self.reply(404, b"{}", error="RepoNotFound")

    def reply(self, status, data, body=True, error=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serve(repository, files, revisions=("main",)):
    """Runs a `HubServer` while the context lasts."""
    with HubServer(repository, files, revisions) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
