"""Data in S3 buckets and in repositories of the Hugging Face Hub, by their own clients, from servers here that fail on the way.

S3 is moto's server. The Hub is a server with the three answers that huggingface_hub asks for to read a data set; the real one
was not asked.
"""

import contextlib
import hashlib
import http.server
import json
import subprocess
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from tests.megaclass.data.test_remote import contents, draw, killed_download

from megaclass.data.sources import remote
from megaclass.data.sources.open_source import format_of, open_source
from megaclass.errors import DataError

s3fs = pytest.importorskip("s3fs", reason="needs moto and s3fs: pip install 'moto[s3]' flask flask-cors s3fs")
pytest.importorskip("moto.moto_server", reason="needs moto and s3fs: pip install 'moto[s3]' flask flask-cors s3fs")


class Bucket:
    """moto's server behind a layer that answers some requests for content with a fault."""

    def __init__(self):
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):
            def log_request(self, *words):
                pass

        self.faults, self.requests, self.ranges, self.seconds_per_range = [], [], [], 0.0
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def _answer(self, environ, start_response):
        self.requests.append(environ["PATH_INFO"])
        wanted = environ.get("HTTP_RANGE")
        if environ["REQUEST_METHOD"] != "GET" or not wanted:
            return self._moto(environ, start_response)
        self.ranges.append(wanted)
        threading.Event().wait(self.seconds_per_range)
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "503":
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"]
        body = b"".join(self._moto(environ, start_response))
        # Shorter than the length that the header has announced.
        return [body[: len(body) // 2] if fault == "cut" else body]


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    given = Bucket()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_wait_s", lambda attempt: 0.0)
    monkeypatch.setattr(remote, "_RANGE_BYTES", 1000)
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    for name, value in zip(names, (given.address, "key", "secret", "us-east-1"), strict=True):
        monkeypatch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    given.files = s3fs.S3FileSystem()
    with contextlib.suppress(FileExistsError):  # moto keeps its buckets for the life of the process
        given.files.mkdir("megaclass-test")
    yield given
    given.files.rm("megaclass-test", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()
    given.server.shutdown()
    given.server.server_close()


def test_photos_shards_and_parquet_come_from_a_bucket(bucket, tmp_path):
    from tests.commands import ended_in_this_process

    draw(tmp_path / "own")
    own = sorted(contents(open_source(tmp_path / "own")))
    ended = ended_in_this_process(
        [
            "data",
            "pack",
            str(tmp_path / "own"),
            "--format",
            "tar",
            "--shard-images",
            "2",
            "--out",
            str(tmp_path / "tar"),
        ]
    )
    assert ended.returncode == 0, ended.stderr
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"image": {"bytes": content, "path": None}, "label": label} for content, label in own]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train-00000.parquet")
    bucket.files.put(str(tmp_path / "own"), "megaclass-test/faces", recursive=True)
    bucket.files.put(str(tmp_path / "tar"), "megaclass-test/tar", recursive=True)
    bucket.files.put(str(tmp_path / "train-00000.parquet"), "megaclass-test/data/train-00000.parquet")
    for address in ("faces", "tar", "tar/shard-*.tar", "data/train-*.parquet", "data/train-00000.parquet"):
        assert sorted(contents(open_source(f"s3://megaclass-test/{address}"))) == own, address
    assert format_of("s3://megaclass-test/faces").class_names() == [b"person 0", b"person 1", b"person 2"]
    bucket.requests.clear()
    assert sorted(contents(open_source("s3://megaclass-test/tar"))) == own and not bucket.requests


def test_faults_of_a_bucket_are_survived_range_by_range(bucket):
    content = np.random.default_rng(0).bytes(4500)
    bucket.files.pipe("megaclass-test/shard.tar", content)
    bucket.faults = ["503", "", "cut", "503", "cut"]
    assert remote.fetch("s3://megaclass-test/shard.tar").read_bytes() == content
    ranges = [f"bytes={start}-{min(start + 999, 4499)}" for start in range(0, 4500, 1000)]
    assert sorted({*bucket.ranges}) == ranges and len(bucket.ranges) == 5 + 4


@pytest.mark.ranks
def test_a_killed_download_from_a_bucket_continues_in_the_next_process(bucket, tmp_path):
    content = np.random.default_rng(0).bytes(40_000)
    bucket.files.pipe("megaclass-test/shard.tar", content)
    bucket.seconds_per_range = 0.1
    command = killed_download("s3://megaclass-test/shard.tar", bucket.ranges)
    assert len(bucket.ranges) >= 10
    before, bucket.seconds_per_range = set(bucket.ranges[:-2]), 0.0
    bucket.ranges.clear()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert Path(ended.stdout.strip()).read_bytes() == content
    assert before and not before & set(bucket.ranges)


def test_what_a_bucket_refuses_is_said_at_once(bucket, monkeypatch):
    monkeypatch.setattr(remote, "_wait_s", lambda attempt: pytest.fail("it tries again"))
    with pytest.raises(DataError, match=r"There is no file at s3://megaclass-test/none\.tar"):
        open_source("s3://megaclass-test/none.tar")
    with pytest.raises(DataError, match=r"s3://other-bucket/faces: there is no such file or folder"):
        open_source("s3://other-bucket/faces")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(
        DataError, match=r"locate credentials\. Set AWS_ACCESS_KEY_ID .* FSSPEC_S3='\{\"anon\": true\}'"
    ):
        open_source("s3://megaclass-test/faces")


class Hub(http.server.ThreadingHTTPServer):
    """A repository `user/faces` with the files of a folder."""

    def __init__(self, folder):
        self.folder, self.faults, self.ranges = folder, [], []
        super().__init__(("127.0.0.1", 0), HubHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *words):
        pass

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        api, files = "/api/datasets/user/faces", "/datasets/user/faces/resolve/main/"
        if path in (api, f"{api}/revision/main"):
            return self._send(json.dumps({"id": "user/faces", "sha": "0" * 40}).encode())
        if path.startswith(f"{api}/tree/main"):
            below = self.server.folder / path.removeprefix(f"{api}/tree/main").strip("/")
            found = sorted(below.rglob("*") if "recursive=true" in self.path.lower() else below.glob("*"))
            return self._send(json.dumps([self._entry(one) for one in found]).encode())
        file = self.server.folder / path.removeprefix(files)
        if not path.startswith(files) or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if "user/faces" not in path else "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        self.server.ranges.append(self.headers["Range"])
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault.isdigit():
            return self.send_error(int(fault))
        return self._send(file.read_bytes()[int(first) : int(last) + 1], 206, is_cut=fault == "cut")

    def _entry(self, path):
        name = str(path.relative_to(self.server.folder))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40}
        content = path.read_bytes()
        return {"type": "file", "path": name, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}

    def _send(self, content, status=200, is_cut=False):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if is_cut else content)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from fsspec.config import conf

    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_wait_s", lambda attempt: 0.0)
    monkeypatch.setattr(remote, "_RANGE_BYTES", 1000)
    (tmp_path / "served").mkdir()
    given = Hub(tmp_path / "served")
    monkeypatch.setitem(conf, "hf", {"endpoint": given.address, "token": False})
    huggingface_hub.HfFileSystem.clear_instance_cache()
    yield given
    given.shutdown()
    given.server_close()


def test_photos_and_parquet_come_from_a_hub(hub, tmp_path):
    draw(tmp_path / "served/faces")
    own = sorted(contents(open_source(tmp_path / "served/faces")))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"image": {"bytes": content, "path": None}, "label": label} for content, label in own]
    (tmp_path / "served/data").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "served/data/train-00000.parquet")
    hub.faults = ["", "cut", "500"]
    for address in ("faces", "data/train-*.parquet"):
        assert sorted(contents(open_source(f"hf://datasets/user/faces/{address}"))) == own, address
    assert not hub.faults
    with pytest.raises(DataError, match=r"hf://datasets/user/nothing"):
        open_source("hf://datasets/user/nothing")


def test_a_hub_sends_each_byte_once_and_a_changed_file_begins_again(hub, tmp_path):
    file, address = tmp_path / "served/shard.tar", "hf://datasets/user/faces/shard.tar"
    file.write_bytes(b"a" * 4500)
    # Its client repeats other faults by itself, with pauses that add up to 23 seconds.
    hub.faults = ["", "", "403"]
    with pytest.raises(DataError, match=r"shard\.tar: (.|\n)*\(attempt 1\)"):
        remote.fetch(address)
    sizes = [int(last) - int(first) + 1 for first, _, last in (one[6:].partition("-") for one in hub.ranges)]
    assert max(sizes) == 1000, "nothing is read ahead"
    hub.faults = []
    file.write_bytes(b"b" * 4500)
    pytest.importorskip("huggingface_hub").HfFileSystem.clear_instance_cache()  # as in a new process
    assert remote.fetch(address).read_bytes() == b"b" * 4500
