"""A small Hugging Face Hub: the requests that huggingface_hub makes to publish a folder and to fetch it again."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, dict[str, bytes]]
    requests: list[str]

    def log_message(self, *arguments):
        pass

    def answer(self, content=b"", status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length) if length else self.read_chunks()
        self.requests.append(f"POST {self.path}")
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            said = json.loads(body)
            name = f"{said['organization']}/{said['name']}" if said.get("organization") else said["name"]
            self.files.setdefault(name, {})
            return self.answer({"url": f"http://{self.headers['Host']}/{name}", "name": name})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", self.path):
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self.answer({"files": modes})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[found[1]][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            address = f"http://{self.headers['Host']}/{found[1]}/commit/{COMMIT}"
            return self.answer({"success": True, "commitOid": COMMIT, "commitUrl": address})
        return self.answer({"error": "not found"}, 404)

    def read_chunks(self):
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.requests.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/\w+)?", path):
            if found[1] in self.files:
                siblings = [{"rfilename": name} for name in self.files[found[1]]]
                return self.answer({"id": found[1], "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        elif (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/\w+", path)) and found[1] in self.files:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files[found[1]].items()
            ]
            return self.answer(tree)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path):
            content = self.files.get(found[1], {}).get(found[2])
            if content is not None:
                digest = hashlib.sha1(content).hexdigest()
                return self.answer(content, ETag=f'"{digest}"', X_Repo_Commit=COMMIT, Content_Length=str(len(content)))
        return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@contextmanager
def hub_server():
    """Yields the address, the files by repository, and the list of requests."""

    class Handler(_Handler):
        files, requests = {}, []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", Handler.files, Handler.requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
