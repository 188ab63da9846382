"""Loader processes: the same batches as threads, and what happens when one of them, or their rank, dies."""

import faulthandler
import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import megaclass
from megaclass.data import loader as loader_module
from megaclass.data.loader import Batch, BatchLoader
from megaclass.data.loading import choose, pool
from megaclass.data.loading.choose import LoaderSettings, available_cores, choose_processes, cores_of_rank
from megaclass.data.sources.open_source import FORMATS, open_source
from megaclass.data.sources.source import SourceFormat
from megaclass.data.tools.synthesize import synthesize
from megaclass.errors import DataError
from megaclass_launch.errors import ConfigError
from megaclass_launch.hang.stacks import WatchedRank, collect, file_wait, state_of
from megaclass_launch.hang.verdict import find_verdict
from megaclass_launch.rank_status import STACKS_SIGNAL, OwnStatus, StatusPage

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "set"
    synthesize(folder, num_identities=10, images_per_identity=7, image_size=24, num_pairs=2, num_processes=1)
    return folder


@pytest.fixture
def new_fork_server(monkeypatch):
    """Workers are forked from a server with the environment of this test; the function starts another one."""
    servers = []

    def start() -> None:
        servers.append(forkserver.ForkServer())
        servers[-1].set_forkserver_preload([pool.__name__])
        monkeypatch.setattr(pool, "_server", servers[-1])

    start()
    yield start
    for server in servers:
        server._stop()  # "used by unit tests to stop the server", as Python's source says


def in_processes(path: Path | str, num_processes: int, **arguments) -> BatchLoader:
    settings = LoaderSettings(path=str(path), num_processes=num_processes)
    return BatchLoader(open_source(path), processes=settings, **arguments)


def assert_equal(batches: list[Batch], expected: list[Batch]) -> None:
    assert len(batches) == len(expected)
    for batch, truth in zip(batches, expected, strict=True):
        assert (batch.epoch, batch.step, batch.treatment) == (truth.epoch, truth.step, truth.treatment)
        assert np.array_equal(batch.indices, truth.indices) and torch.equal(batch.labels, truth.labels)
        assert torch.equal(batch.images, truth.images)
        assert torch.equal(batch.indices_on(CPU), torch.from_numpy(truth.indices))
        assert batch.images.is_contiguous(memory_format=torch.channels_last)


def write_folder(folder: Path, num_images: int = 40) -> Path:
    for number in range(num_images):
        path = folder / f"{number % 4}" / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = 24 if number % 5 == 0 else 16
        Image.new("RGB", (size, size), (5 * number, 200, 100)).save(path)
    return folder


@pytest.mark.ranks
def test_every_mode_yields_the_same_bytes_from_any_step_on(folder, tmp_path):
    options = {"global_batch": 33, "seed": 3, "keep_last": True, "rank": 1, "world_size": 2}
    source = open_source(folder)
    truth = list(BatchLoader(source, **options).batches(num_steps=9))
    assert_equal(list(in_processes(folder, 1, **options).batches(num_steps=9)), truth)
    # The caller keeps all batches, more than the ring has slots, and drops none: their bytes must stay.
    assert_equal(list(in_processes(folder, 2, **options).batches(epoch=1, step=2, num_steps=4)), truth[5:])
    by_class = {"global_batch": 32, "order": "classes", "images_per_class": 4}
    assert_equal(list(in_processes(folder, 2, **by_class).batches()), list(BatchLoader(source, **by_class).batches()))
    noise = {"global_batch": 32, "image_size": (16, 24)}
    path = "synthetic:50x200@16"
    assert_equal(
        list(in_processes(path, 1, **noise).batches(num_steps=3)),
        list(BatchLoader(open_source(path), **noise).batches(num_steps=3)),
    )
    # Damaged images are replaced by the same ones and reported once, and images of another size are counted.
    files = write_folder(tmp_path / "files")
    for name in ("1/05.jpg", "3/07.jpg"):
        (files / name).write_bytes(b"damaged")
    bad = {"global_batch": 20, "max_bad_fraction": 1.0, "image_size": (16, 16)}
    alone, beside = BatchLoader(open_source(files), **bad), in_processes(files, 2, **bad)
    assert_equal(list(beside.batches(num_steps=6)), list(alone.batches(num_steps=6)))
    assert beside.bad_images.indices == alone.bad_images.indices and len(alone.bad_images.indices) == 2
    assert beside.bad_images.num_bad == alone.bad_images.num_bad and beside.num_resized == alone.num_resized > 0
    assert beside.bad_images.num_read == 120 and "of 120 images had another size" in beside.describe_resized()


@pytest.mark.ranks
def test_batches_that_are_held_keep_their_bytes(folder):
    options = {"global_batch": 16, "mirror": False}
    truth = list(BatchLoader(open_source(folder), **options).batches(num_steps=40))
    held: list[tuple[int, torch.Tensor]] = []
    for number, batch in enumerate(in_processes(folder, 2, **options).batches(num_steps=40)):
        if number % 7 == 0:
            held.append((number, batch.images[3:5, 1]))
        del batch
    for number, part in held:
        assert torch.equal(part, truth[number].images[3:5, 1])


@pytest.mark.ranks
def test_killed_loader_processes_are_replaced_and_no_batch_changes(folder, caplog):
    options = {"global_batch": 32, "seed": 1}
    truth = list(BatchLoader(open_source(folder), **options).batches(num_steps=60))
    batches = in_processes(folder, 2, **options).batches(num_steps=60)
    received, killed = [], set()
    for number in range(60):
        received.append(next(batches))
        # At the start, in the middle, perhaps before the first one is missed, and both at once.
        if number in (0, 20, 21, 40):
            pids = loader_children()
            for pid in pids if number == 40 else pids[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
    batches.close()
    assert_equal(received, truth)
    assert len(killed) >= 3 and "ended by SIGKILL" in caplog.text
    assert loader_children() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_batches_on_a_gpu_have_the_same_bytes_however_far_the_host_runs_ahead(folder):
    options = {"global_batch": 32, "mirror": False}
    truth = list(BatchLoader(open_source(folder), **options).batches(num_steps=80))
    busy = torch.zeros(4096, 4096, device=GPU)
    kept = []
    for batch in in_processes(folder, 2, device=GPU, **options).batches(num_steps=80):
        # The GPU falls behind: slots must wait for their copies, and copies for the steps that use them.
        busy = busy @ busy
        kept.append((batch, batch.images.float() + busy[0, 0]))
    for (batch, images), expected in zip(kept, truth, strict=True):
        assert batch.images.is_cuda and torch.equal(batch.labels.cpu(), expected.labels)
        assert torch.equal(batch.indices_on(GPU).cpu(), torch.from_numpy(expected.indices))
        assert torch.equal(images.cpu(), expected.images.float())


def loader_children(parent: int | str = "self") -> list[int]:
    """Live loader processes of a rank."""
    return sorted(filter(is_loader, descendants(parent)))


def is_loader(pid: int) -> bool:
    try:
        return "/memfd:megaclass-batches" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


# As a defect of a decoder would: the process ends in the middle of an image. Loaded by every Python that has it on its path.
CRASHING_DECODER = """
import ctypes, os, signal, sys, time
CRASHES = {
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGABRT": os.abort,
    "SIGKILL": lambda: (os.kill(os.getpid(), signal.SIGKILL), time.sleep(60)),
}
if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    import simplejpeg
    as_ever = simplejpeg.decode_jpeg
    def decode_jpeg(encoded, *arguments, **options):
        if b"CRASH HERE" in encoded:
            CRASHES[os.environ["TEST_CRASHES_BY"]]()
        return as_ever(encoded, *arguments, **options)
    simplejpeg.decode_jpeg = decode_jpeg
"""


def hostile_folder(folder: Path) -> Path:
    """40 images; two of them end the decoder, and have the size of the others."""
    write_folder(folder)
    for name in ("0/08.jpg", "2/22.jpg"):
        stream = io.BytesIO()
        Image.new("RGB", (16, 16)).save(stream, "JPEG", comment=b"CRASH HERE")
        (folder / name).write_bytes(stream.getvalue())
    (folder.parent / "site").mkdir()
    (folder.parent / "site" / "sitecustomize.py").write_text(CRASHING_DECODER)
    return folder


@pytest.mark.ranks
def test_an_image_on_which_the_decoder_crashes_is_named_and_replaced_in_all_epochs(
    tmp_path, monkeypatch, caplog, new_fork_server
):
    folder = hostile_folder(tmp_path / "files")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("TEST_CRASHES_BY", "SIGSEGV")
    options = {"global_batch": 20, "image_size": (16, 16), "max_bad_fraction": 0.06, "seed": 5}
    loader = in_processes(folder, 2, **options)
    batches = list(loader.batches(num_steps=10))
    named = {Path(loader.source.name_of(index)).name for index in loader.bad_images.indices}
    assert named == {"08.jpg", "22.jpg"}
    for name in ("08.jpg", "22.jpg"):
        assert f"{name}: the decoder crashed on it (SIGSEGV)" in caplog.text
    # As if both were merely unreadable.
    for index in loader.bad_images.indices:
        Path(loader.source.name_of(index)).write_bytes(b"damaged")
    assert_equal(batches, list(BatchLoader(open_source(folder), **options).batches(num_steps=10)))


@pytest.mark.ranks
def test_a_process_that_keeps_dying_ends_the_run_with_the_reason(tmp_path, monkeypatch, new_fork_server):
    folder = hostile_folder(tmp_path / "files")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("TEST_CRASHES_BY", "SIGKILL")
    message = r"Loader process 0 ended by SIGKILL, 3 times in a row .* it was decoding .*(08|22)\.jpg.*lack of memory"
    with pytest.raises(DataError, match=message):
        list(in_processes(folder, 1, global_batch=40, image_size=(16, 16)).batches())
    too_many = r"more than data\.max_bad_fraction = 0\.001 allows.*(08|22)\.jpg: the decoder crashed on it \(SIGABRT\)"
    monkeypatch.setenv("TEST_CRASHES_BY", "SIGABRT")
    new_fork_server()
    with pytest.raises(DataError, match=too_many):
        list(in_processes(folder, 1, global_batch=40, image_size=(16, 16)).batches())
    loader = in_processes(folder, 1, global_batch=40, image_size=(16, 16))
    for file in folder.glob("*/*"):
        file.unlink()
    with pytest.raises(DataError, match=r"Cannot open the data|could not be read"):
        list(loader.batches())
    assert loader_children() == []


# As a disk that does not answer: the first image waits in a read until something is written into the pipe.
WAITING_DECODER = """
import os, sys
if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    import simplejpeg
    as_ever = simplejpeg.decode_jpeg
    def decode_jpeg(*arguments, **options):
        os.read(os.open(os.environ["TEST_PIPE"], os.O_RDWR), 1)
        return as_ever(*arguments, **options)
    simplejpeg.decode_jpeg = decode_jpeg
"""


@pytest.mark.ranks
def test_a_hanging_rank_is_named_with_the_file_or_signal_that_its_loader_processes_wait_for(
    folder, tmp_path, monkeypatch, new_fork_server
):
    (tmp_path / "sitecustomize.py").write_text(WAITING_DECODER)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TEST_PIPE", str(pipe))
    page = StatusPage()
    OwnStatus(page.fileno()).give_stacks(str(Path(megaclass.__file__).parent))
    verdicts = []

    def watch() -> None:
        """Does what the agent does, while the main thread waits for its first batch."""
        deadline = time.monotonic() + 60
        while str(pipe) not in file_wait(os.getpid()) and time.monotonic() < deadline:
            time.sleep(0.02)
        [loader] = loader_children()
        with pipe.open("r+b", buffering=0) as file:
            try:
                for number in (signal.SIGCONT, signal.SIGSTOP):
                    os.kill(loader, number)
                    while number == signal.SIGSTOP and state_of(loader) != "T":
                        time.sleep(0.02)
                    [report] = collect([WatchedRank(0, os.getpid(), page)], "here", answer_s=30.0)
                    verdicts.append(find_verdict([report]).text)
            finally:
                os.kill(loader, signal.SIGCONT)
                file.write(b"x" * 32)
                over.wait(60)

    over = threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        batches = in_processes(folder, 1, global_batch=32).batches(num_steps=1)
        assert len(next(batches).images) == 32
    finally:
        over.set()
        thread.join()
        faulthandler.unregister(STACKS_SIGNAL)
        page.close()
    batches.close()
    reading, stopped = verdicts
    assert re.search(rf", waiting in read of {re.escape(str(pipe))} in process \d+$", reading), reading
    assert re.search(r", waiting for process \d+, stopped by SIGSTOP; SIGCONT continues it$", stopped), stopped


# Without `if __name__ == "__main__"`, as people write scripts.
LOAD = """
import os, sys, time
from megaclass.data.loader import BatchLoader
from megaclass.data.loading.choose import LoaderSettings
from megaclass.data.sources.open_source import open_source
path, num_steps, action = sys.argv[1], int(sys.argv[2]), sys.argv[3]
batches = BatchLoader(
    open_source(path), global_batch=32, processes=LoaderSettings(path=path, num_processes=2)
).batches(num_steps=10**9)
for _ in range(num_steps):
    print(next(batches).step, flush=True)
    if action == "fork" and os.fork() == 0:
        time.sleep(60)
"""


@pytest.mark.ranks
def test_loader_processes_ignore_signals_to_the_job_and_are_gone_a_second_after_their_rank_was_killed(folder, tmp_path):
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    # A process that the rank has forked holds its ends of all pipes; it is in the same session.
    command = [sys.executable, str(script), str(folder), "1000000", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as rank:
        assert rank.stdout.readline()
        pids, all_of_rank = loader_children(rank.pid), descendants(rank.pid)
        assert len(pids) == 2 and set(pids) < set(all_of_rank)
        for pid in all_of_rank:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
        for _ in range(50):
            assert rank.stdout.readline()
        assert loader_children(rank.pid) == pids
        # One of them cannot notice anything while it is stopped.
        os.kill(pids[0], signal.SIGSTOP)
        rank.kill()
        os.kill(pids[0], signal.SIGCONT)
        assert still_alive(pids, after_s=1) == []
        # The fork server and the tracker of semaphores end after them, by their own accounts of their clients.
        assert still_alive(all_of_rank, after_s=10) == []


@pytest.mark.ranks
def test_loader_processes_end_although_a_process_that_their_rank_has_forked_lives_on(folder, tmp_path):
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    command = [sys.executable, str(script), str(folder), "1000000", "fork"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as rank:
        assert rank.stdout.readline() and rank.stdout.readline()
        # The forked process maps the same memory.
        own = Path(f"/proc/{rank.pid}/cmdline").read_bytes()
        pids = [pid for pid in loader_children(rank.pid) if Path(f"/proc/{pid}/cmdline").read_bytes() != own]
        try:
            assert len(pids) == 2
            rank.kill()
            assert still_alive(pids, after_s=1) == []
        finally:
            os.killpg(rank.pid, signal.SIGKILL)


@pytest.mark.ranks
def test_a_script_without_a_guard_that_leaves_its_batches_open_ends_and_files_of_its_folder_are_not_imported(
    folder, tmp_path
):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "load.py").write_text(LOAD)
    for name in ("queue", "random", "selectors", "signal", "simplejpeg", "socket", "tempfile", "torch", "PIL"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    command = [sys.executable, "scripts/load.py", str(folder), "3", "none"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["0", "1", "0"], "")


def descendants(pid: int | str) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


def still_alive(pids: list[int], after_s: float) -> list[int]:
    deadline = time.monotonic() + after_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_rank_starts_as_many_processes_as_its_share_of_the_cores_feeds(monkeypatch, tmp_path):
    def chosen(device, *, cores=16, workers="auto", ranks=1):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        found = choose_processes("synthetic:10", workers=workers, device=device, num_local_ranks=ranks)
        return None if found is None else found.num_processes

    monkeypatch.setattr(choose, "_CGROUPS", tmp_path)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert chosen(CPU) is None and chosen(CPU, workers=2) == 2 and chosen(GPU, workers=0) is None
    assert chosen(GPU) == 8 and chosen(GPU, cores=6) == 4
    assert chosen(GPU, ranks=4) == 2 and chosen(GPU, cores=1) == 1
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert chosen(GPU, ranks=4) == 4
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    assert available_cores() == cores_of_rank(4) == 4
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores() == 16


@pytest.mark.ranks
def test_processes_that_a_user_starts_do_not_come_from_the_server_of_loader_processes(tmp_path):
    """Otherwise signals would be blocked in them, and multiprocessing.Pool could not end its workers."""
    script = tmp_path / "script.py"
    script.write_text(
        """
if __name__ == "__main__":
    import multiprocessing, os, signal, sys
    from megaclass.data.loading.pool import start_fork_server
    start_fork_server()
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        print(pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, ())), pool.apply(os.getenv, ("OMP_NUM_THREADS",)))
"""
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "set() None", "")


def test_a_daemonic_process_reads_by_threads(monkeypatch):
    monkeypatch.setattr(type(multiprocessing.current_process()), "daemon", True)
    assert choose_processes("synthetic:10", workers="auto", device=GPU, num_local_ranks=1) is None
    with pytest.raises(ConfigError, match=r"data\.workers is 2, but this is a daemonic process"):
        choose_processes("synthetic:10", workers=2, device=GPU, num_local_ranks=1)


def test_a_format_of_the_users_own_is_read_by_threads(monkeypatch):
    class OwnFormat(SourceFormat):
        @classmethod
        def matches(cls, path):
            return path.startswith("own:")

        def open(self):
            return open_source("synthetic:10")

    monkeypatch.setattr("megaclass.data.sources.open_source.FORMATS", [OwnFormat, *FORMATS])
    common = {"device": GPU, "num_local_ranks": 1}
    assert choose_processes("own:x", workers="auto", **common) is None
    assert choose_processes("own:x", workers=0, **common) is None
    with pytest.raises(ConfigError, match=r"data\.workers is 2, but the data at own:x is read by .*OwnFormat"):
        choose_processes("own:x", workers=2, **common)


def test_memory_that_cannot_be_had_is_an_error_before_the_first_batch(folder, monkeypatch):
    def refuse(handle, offset, length):
        raise OSError(12, "Cannot allocate memory")

    loader = in_processes(folder, 2, global_batch=16)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(pool, "start_fork_server", None)
    with pytest.raises(DataError, match=r"no memory for \d+ batches of 16 images.*data\.workers"):
        next(loader.batches())


@pytest.mark.ranks
def test_images_kept_on_the_device_make_the_same_batches(tmp_path, monkeypatch):
    files = write_folder(tmp_path / "files")
    (files / "1" / "05.jpg").write_bytes(b"damaged")
    options = {
        "global_batch": 14,
        "max_bad_fraction": 1.0,
        "image_size": (16, 16),
        "seed": 2,
        "rank": 1,
        "world_size": 2,
    }
    monkeypatch.setattr(loader_module, "_BLOCK_IMAGES", 16)
    truth = list(BatchLoader(open_source(files), **options).batches(num_steps=7))
    by_threads = BatchLoader(open_source(files), is_resident=True, num_workers=2, **options)
    assert_equal(list(by_threads.batches(num_steps=7)), truth)
    assert_equal(list(by_threads.batches(epoch=1, step=1, num_steps=2)), truth[3:5])
    by_processes = in_processes(files, 1, is_resident=True, **options)
    assert_equal(list(by_processes.batches(num_steps=7)), truth)
    for loader in (by_threads, by_processes):
        # Each image was read once, whatever the number of epochs.
        assert loader.bad_images.num_read == 40 and loader.bad_images.num_bad == 1 and loader.num_resized == 7
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    with pytest.raises(DataError, match=r"need 1\.0 GiB of GPU memory, more than 70% of the 1\.0 GiB that are free"):
        loader_module._require_room(2**30, GPU)


WITHOUT_PIDFD = """
import os, sys, threading
from multiprocessing import Pipe
from megaclass.data.loading import pool
def refuse(pid):
    raise OSError(38, "Function not implemented")
os.pidfd_open = refuse
if sys.argv[1] == "python":
    del os.pidfd_open
theirs, ours = Pipe(duplex=False)
threading.Timer(0.5, ours.close).start()
pool._run_worker(theirs, os.getppid(), os.write, (1, b"the loop runs"))
"""


@pytest.mark.ranks
@pytest.mark.parametrize("of", ["kernel", "python"])
def test_a_worker_runs_without_the_pidfd_of_the_kernel_or_of_python_and_ends_with_its_pipe(of):
    assert subprocess.check_output([sys.executable, "-c", WITHOUT_PIDFD, of], timeout=60) == b"the loop runs"
