"""Data at an address: fetched once from a real web server that fails in the ways that servers fail, and then read locally."""

import contextlib
import http.server
import io
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megaclass.data.sources import remote
from megaclass.data.sources.open_source import data_folders, format_of, open_source, verification_files
from megaclass.errors import DataError

pytest.importorskip("fsspec", reason="needs fsspec: pip install 'megaclass[remote]'")
pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'megaclass[remote]'")


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder, with ranges or without, and fails as often as told."""

    def __init__(self, folder, has_ranges=True):
        self.folder, self.has_ranges = folder, has_ranges
        self.faults = []  # names of faults for the next requests with a body
        self.asked = []  # (path, range) of every request with a body
        self.seconds_per_range = 0.0
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def __init__(self, request, client, server):
        super().__init__(request, client, server, directory=str(server.folder))

    def log_message(self, *words):
        pass

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            return super().do_GET()
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "503":
            return self.send_error(503)
        if not path.is_file():
            return self.send_error(404)
        content = path.read_bytes()
        start, stop = 0, len(content)
        if self.server.has_ranges and wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else stop, stop)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        else:
            self.send_response(200)
        if stop - start > 1:
            threading.Event().wait(self.server.seconds_per_range)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{hash(content)}"')
        self.end_headers()
        body = content[start:stop]
        if fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        if fault == "silence":
            self.wfile.write(body[:1])
            self.wfile.flush()
            threading.Event().wait(3)
            self.close_connection = True
            return None
        with contextlib.suppress(BrokenPipeError):  # the reader was killed
            self.wfile.write(body)
        return None

    def do_HEAD(self):
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(path.stat().st_size))
        if self.server.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        return None


@pytest.fixture
def serve(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_wait_s", lambda attempt: 0.0)
    with contextlib.ExitStack() as stack:

        def start(has_ranges=True):
            (tmp_path / "served").mkdir(exist_ok=True)
            server = Server(tmp_path / "served", has_ranges)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return server

        yield start


def draw(folder, num_identities=3, num_images=2):
    for label in range(num_identities):
        (folder / f"person {label}").mkdir(parents=True)
        for number in range(num_images):
            pixels = np.random.default_rng([label, number]).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"person {label}" / f"{number}.png")


def contents(source):
    return [(source.read(index), int(source.labels[index])) for index in range(source.num_images)]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_folder_is_copied_once_and_read_as_if_it_were_here(serve, tmp_path, has_ranges):
    server = serve(has_ranges)
    draw(tmp_path / "served/faces")
    (tmp_path / "served/faces/lfw.bin").write_bytes(b"pairs")
    address = f"{server.address}/faces"
    assert contents(open_source(address)) == contents(open_source(tmp_path / "served/faces"))
    num_asked = len(server.asked)
    assert format_of(address).class_names() == [b"person 0", b"person 1", b"person 2"]
    assert [file.read_bytes() for file in verification_files(address)] == [b"pairs"]
    assert len(server.asked) == num_asked, "a complete copy is used without asking the server"
    assert data_folders(f"{tmp_path},{address}")[1].is_relative_to(tmp_path / "cache")


def test_shards_and_patterns_and_single_files(serve, tmp_path):
    from tests.commands import ended_in_this_process

    server = serve()
    draw(tmp_path / "own")
    made = ["data", "pack", str(tmp_path / "own"), "--format", "tar", "--shard-images", "2"]
    ended = ended_in_this_process([*made, "--out", str(tmp_path / "served/shards")])
    assert ended.returncode == 0, ended.stderr
    for cache in (tmp_path / "served/shards").glob("*.cache"):
        cache.unlink()
    whole = sorted(contents(open_source(tmp_path / "served/shards")))
    assert sorted(contents(open_source(f"{server.address}/shards/"))) == whole
    assert sorted(contents(open_source(f"{server.address}/shards/shard-*.tar"))) == whole
    assert open_source(f"{server.address}/shards/shard-000001.tar").num_images == 2


@pytest.mark.parametrize("has_ranges", [True, False])
def test_faults_are_survived_without_fetching_anything_twice(serve, tmp_path, monkeypatch, has_ranges):
    monkeypatch.setattr(remote, "_RANGE_BYTES", 1000)
    server = serve(has_ranges)
    (tmp_path / "served").mkdir(exist_ok=True)
    content = np.random.default_rng(0).bytes(10_500)
    (tmp_path / "served/shard.tar").write_bytes(content)
    # The first answer shows whether the server gives ranges; then they follow, or the whole.
    monkeypatch.setattr(remote, "_SILENCE_S", 1.0)
    server.faults = ["", "503", "cut", "silence", "503"]
    assert remote.fetch(f"{server.address}/shard.tar").read_bytes() == content
    ranges = [wanted for _, wanted in server.asked if wanted and wanted != "bytes=1-1"]
    assert not server.faults
    if has_ranges:
        assert sorted({*ranges}) == sorted(
            f"bytes={start}-{min(start + 999, 10_499)}" for start in range(0, 10_500, 1000)
        )
        assert len(ranges) <= 11 + 5


def test_a_server_that_stays_broken_is_named_and_what_came_is_kept(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_RANGE_BYTES", 1000)
    server = serve()
    content = np.random.default_rng(0).bytes(4500)
    (tmp_path / "served/shard.tar").write_bytes(content)
    address = f"{server.address}/shard.tar"
    server.faults = ["", "", "", *["503"] * 100]
    with pytest.raises(DataError, match=r"shard\.tar: 503.*\(attempt 6\)\. What has been fetched is kept"):
        remote.fetch(address)
    server.faults = []
    server.asked.clear()
    assert remote.fetch(address).read_bytes() == content
    assert not any(wanted == "bytes=0-999" for _, wanted in server.asked), "the first range was fetched before"


def killed_download(address: str, answered: list) -> list[str]:
    """Downloads in ranges of 1,000 bytes in a process that is killed after ten requests; returns its command."""
    code = (
        "import sys; from megaclass.data.sources import remote; remote._RANGE_BYTES = 1000\n"
        "print(remote.fetch(sys.argv[1]), flush=True)"
    )
    command = [sys.executable, "-c", code, address]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for _ in range(2000):
        if len(answered) < 10:
            threading.Event().wait(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    return command


@pytest.mark.ranks
def test_a_killed_download_continues_in_the_next_process(serve, tmp_path):
    server = serve()
    content = np.random.default_rng(0).bytes(40_000)
    (tmp_path / "served/shard.tar").write_bytes(content)
    server.seconds_per_range = 0.1
    command = killed_download(f"{server.address}/shard.tar", server.asked)
    assert len(server.asked) >= 10
    server.seconds_per_range = 0
    before = {wanted for _, wanted in server.asked[:-2]} - {"bytes=1-1", None}
    server.asked.clear()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert Path(ended.stdout.strip()).read_bytes() == content
    assert before and not before & {wanted for _, wanted in server.asked}


def test_a_changed_original_is_not_mixed_with_the_old_part(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_RANGE_BYTES", 1000)
    server = serve()
    file = tmp_path / "served/shard.tar"
    file.write_bytes(b"a" * 4500)
    server.faults = ["", "", "", *["503"] * 100]
    with pytest.raises(DataError):
        remote.fetch(f"{server.address}/shard.tar")
    server.faults = []
    file.write_bytes(b"b" * 4700)
    assert remote.fetch(f"{server.address}/shard.tar").read_bytes() == b"b" * 4700


def test_what_is_not_there_and_what_cannot_be_read_is_named(serve, tmp_path):
    server = serve()
    with pytest.raises(DataError, match="there is no such file or folder"):
        open_source(f"{server.address}/nothing.tar")
    with pytest.raises(DataError, match=r"Cannot read nosuch://bucket/data"):
        open_source("nosuch://bucket/data")


def test_fsspec_reads_other_places_in_the_same_way(serve, tmp_path):
    """Memory stands for buckets: a file system of fsspec that is not HTTP."""
    import fsspec

    serve()
    draw(tmp_path / "own")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "own"), "/bucket/faces", recursive=True)
    assert contents(open_source("memory://bucket/faces")) == contents(open_source(tmp_path / "own"))
    copied = json.loads((remote.cache_folder("remote", "memory://bucket/faces") / ".copy.json").read_text())
    assert copied["files"] == 6


def test_a_signature_behind_a_web_address_is_no_part_of_the_name(serve, tmp_path):
    server = serve()
    np.save(tmp_path / "served/X.npy", np.ones((4, 3), dtype=np.float32))
    place = remote.fetch(f"{server.address}/X.npy?X-Amz-Signature={'0a' * 200}&Expires=1/2")
    assert place.name == "X.npy" and place.read_bytes() == (tmp_path / "served/X.npy").read_bytes()


def test_a_file_whose_size_is_not_known_is_read_to_its_end(tmp_path):
    class Files:
        """A file system without sizes that is not the web."""

        def info(self, path):
            return {"size": None}

        def open(self, path, mode, block_size):
            return io.BytesIO(b"content")

    remote._fetch_file(Files(), {"path": "other/file"}, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_file_of_any_name_is_copied_and_parts_of_earlier_versions_are_removed(serve, tmp_path):
    server = serve()
    draw(tmp_path / "served/faces", num_images=1)
    (tmp_path / "served/faces/copy.json").write_text("{}")
    folder = remote.cache_folder("remote", f"{server.address}/faces")
    folder.mkdir(parents=True)
    (folder / ".copy.json.0123456789abcdef.part").write_text("an earlier version")
    assert open_source(f"{server.address}/faces").num_images == 3
    assert (folder / "copy.json").read_text() == "{}" and not list(folder.rglob("*.part"))


def test_an_address_that_was_a_path_is_one_still(serve, tmp_path):
    server = serve()
    draw(tmp_path / "served/faces")
    address = f"{server.address}/faces"
    assert contents(open_source(Path(address))) == contents(open_source(address))
