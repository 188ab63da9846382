import gzip
import hashlib
import re
import runpy
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from tests.conftest import free_port
from tests.forked import ended_ranks, python_script, run_forked

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[3] / "examples" / "mnist.py"


def _run(*arguments: str) -> str:
    run = run_forked(python_script, SCRIPT, *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_classic_script_learns_drawn_digits_on_two_processes():
    printed = _run("--num-proc", "2", "--drawn", "800", "--epochs", "3", "--batch-size", "16", "--lr", "0.03")
    ends = re.findall(r"epoch \d: ([\d.]+) ms per step on 2 process\(es\), .* accuracy ([\d.]+)%", printed)
    assert len(ends) == 3 and float(ends[-1][0]) > 0
    assert float(ends[-1][1]) > 60  # guessing gives 10


def _idx_files() -> dict[str, bytes]:
    """The four files of a small MNIST, not packed."""
    files = {}
    for name, count in (("train", 60), ("t10k", 20)):
        images = torch.randint(256, (count, 28, 28), dtype=torch.uint8)
        head = b"\x00\x00\x08\x03" + struct.pack(">3i", count, 28, 28)
        files[f"{name}-images-idx3-ubyte"] = head + images.numpy().tobytes()
        labels = b"\x00\x00\x08\x01" + struct.pack(">i", count) + bytes(range(10)) * (count // 10)
        files[f"{name}-labels-idx1-ubyte"] = labels
    return files


def test_it_reads_idx_files(tmp_path):
    for name, data in _idx_files().items():
        if "images" in name:
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (tmp_path / name).write_bytes(data)
    labels = (tmp_path / "t10k-labels-idx1-ubyte").read_bytes()
    assert "on 1 process(es)" in _run("--data-dir", str(tmp_path), "--epochs", "1")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(labels[:-1])
    wrong = run_forked(python_script, SCRIPT, "--data-dir", str(tmp_path))
    assert wrong.returncode == 1 and "says (20,), 28 bytes, but has 27" in wrong.stderr


@pytest.mark.parametrize(
    "options",
    [pytest.param(["--use-adasum"], marks=pytest.mark.soak), ["--compression", "fp8"]],
    ids=["adasum", "8 bits"],
)
def test_its_options_run_under_a_launcher(options):
    for run in ended_ranks(2, python_script, SCRIPT, "--drawn", "200", "--epochs", "1", *options):
        assert run.returncode == 0, run.stderr


@contextmanager
def _mirror(files: dict[str, bytes], *, promised_bytes: int | None = None) -> Iterator[tuple[str, list[str]]]:
    """(URL of a web server with these files, names asked for); it may promise more bytes than it sends."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            asked.append(name)
            if name not in files:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(promised_bytes or len(files[name])))
            self.end_headers()
            self.wfile.write(files[name])

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/mnist", asked
    finally:
        server.shutdown()
        server.server_close()


def test_it_downloads_what_is_missing_and_trains_on_it(tmp_path):
    files = {f"{name}.gz": gzip.compress(data) for name, data in _idx_files().items()}
    checksums = {name: hashlib.md5(data).hexdigest() for name, data in files.items()}
    script = runpy.run_path(str(SCRIPT))
    with _mirror(files) as (url, asked):
        script["download"](tmp_path, url, checksums)
        assert asked == list(script["FILES"])
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
        (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
        script["download"](tmp_path, url, checksums)
        assert asked[4:] == ["t10k-labels-idx1-ubyte.gz"]
        (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"something else")
        with pytest.raises(SystemExit, match="remove it, or leave out --download"):
            script["download"](tmp_path, url, checksums)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(files["t10k-labels-idx1-ubyte.gz"])
    assert "on 1 process(es)" in _run("--data-dir", str(tmp_path), "--epochs", "1")


@pytest.mark.parametrize(
    ("files", "promised", "expected"),
    [
        ({"train-images-idx3-ubyte.gz": b"not MNIST"}, None, "not f68b3c2dcbeaaa9fbdd348bbdeb94873: nothing was kept"),
        ({"train-images-idx3-ubyte.gz": b"the first half"}, 28, "IncompleteRead(14 bytes read, 14 more expected)"),
        pytest.param({}, None, "HTTP Error 404: Not Found", marks=pytest.mark.soak),
    ],
    ids=["another file", "a truncated file", "no file"],
)
def test_a_download_that_goes_wrong_ends_all_processes_and_leaves_nothing(tmp_path, files, promised, expected):
    with _mirror(files, promised_bytes=promised) as (url, _):
        arguments = ["--data-dir", str(tmp_path), "--download", "--mirror", url]
        first, second = ended_ranks(2, python_script, SCRIPT, *arguments)
    assert first.returncode == 1 and expected in first.stderr and f"{url}/train-images-idx3-ubyte.gz" in first.stderr
    assert "Traceback" not in first.stderr
    # The other one waited for it; it does not wait for ever.
    assert second.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_that_is_not_there_is_named(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    run = run_forked(python_script, SCRIPT, "--data-dir", str(tmp_path), "--download", "--mirror", url)
    assert run.returncode == 1 and f"Cannot download {url}/train-images-idx3-ubyte.gz" in run.stderr
