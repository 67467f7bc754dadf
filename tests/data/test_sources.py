"""Where Fashion-MNIST comes from: the order of sources, interrupted downloads, Debian's package."""

import contextlib
import errno
import gzip
import io
import os
import pwd
import shutil
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer

import numpy as np
import pytest

from lockstep.core.errors import DataError
from lockstep.data import sources
from lockstep.data.fashion_mnist import FILES, read_folder, read_mini
from lockstep.data.sources import alone_in, cache_folder, find_or_fetch, from_debian, from_mirror, locate, no_progress

NAMES = [f"{file.name}.gz" for file in FILES]
FIRST = NAMES[0]
REAL_PATH = os.environ.get("PATH", "")


def fill(folder, contents):
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def names_in(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, an empty system folder, an empty folder for temporary files; no proxy, no apt-get."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.setattr(sources, "TIMEOUT_SECONDS", 5.0)
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "bin").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "cache" / "lockstep" / "fashion-mnist"


# --- a mirror on this machine


class Mirror:
    """An HTTP server with some files. `answer` may be replaced by another response."""

    def __init__(self, contents):
        self.contents = contents
        self.seen = []  # (name of the file, Range header) of each request
        self.answer = send
        self.url = ""

    @property
    def names_seen(self):
        return [name for name, _ in self.seen]


def send(handler, content, status=None, num_bytes=None):
    """The whole content, or from where the Range header says; the connection is cut after `num_bytes`."""
    start = int((handler.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
    if start >= len(content):
        handler.send_error(416)
        return
    handler.send_response(status or (206 if "Range" in handler.headers else 200))
    if "Range" in handler.headers:
        handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    handler.send_header("Content-Length", str(len(content) - start))
    handler.end_headers()
    handler.wfile.write(content[start:][:num_bytes])


def send_whole_always(handler, content):
    """The response of a server without support for Range."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


@pytest.fixture
def serve():
    """Starts mirrors on the loopback, and closes them at the end."""
    with contextlib.ExitStack() as running:

        def start(contents):
            mirror = Mirror(contents)

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self):
                    name = self.path.removeprefix("/data/")
                    mirror.seen.append((name, self.headers["Range"]))
                    if name in mirror.contents:
                        mirror.answer(self, mirror.contents[name])
                    else:
                        self.send_error(404)

                def log_message(self, *args):
                    pass

            server = running.enter_context(TCPServer(("127.0.0.1", 0), Handler))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            running.callback(thread.join)
            running.callback(server.shutdown)
            mirror.url = f"http://127.0.0.1:{server.server_address[1]}/data"
            return mirror

        yield start


@pytest.fixture
def mirror(serve, tiny_fashion):
    return serve(tiny_fashion)


def fetch(*mirrors):
    return find_or_fetch(mirrors=tuple(mirror.url for mirror in mirrors))


def refusal(*mirrors):
    with pytest.raises(DataError) as refused:
        fetch(*mirrors)
    return str(refused.value)


def assert_whole(folder, tiny_fashion):
    assert names_in(folder) == sorted(NAMES)
    for name, content in tiny_fashion.items():
        assert (folder / name).read_bytes() == content


# --- the order


def test_the_cache_is_where_the_xdg_convention_has_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert cache_folder() == Path("/some/where/lockstep/fashion-mnist")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / ".cache" / "lockstep" / "fashion-mnist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "lockstep" / "fashion-mnist"


def test_a_folder_that_the_user_names_comes_first(tmp_path, cache, mirror, tiny_fashion):
    fill(cache, tiny_fashion)
    mine = fill(tmp_path / "mine", tiny_fashion)
    assert locate(mine) == mine
    assert find_or_fetch(mine, mirrors=(mirror.url,)) == mine


def test_nothing_else_is_tried_when_the_user_names_a_folder(tmp_path, cache, mirror, tiny_fashion):
    fill(cache, tiny_fashion)
    mine = fill(tmp_path / "mine", {FIRST: tiny_fashion[FIRST]})
    assert locate(mine) is None
    with pytest.raises(DataError) as refused:
        find_or_fetch(mine, mirrors=(mirror.url,))
    assert str(refused.value) == (
        f"{mine} does not have Fashion-MNIST. Put these files there, packed or not: {', '.join(NAMES[1:])}."
    )
    assert mirror.seen == []


def named_refusal(folder):
    with pytest.raises(DataError) as refused:
        find_or_fetch(folder, mirrors=())
    return str(refused.value)


def test_the_missing_files_are_named_whether_the_others_are_packed_or_not(tmp_path, tiny_fashion):
    mine = fill(tmp_path / "mine", {})
    assert named_refusal(mine).endswith(f": {', '.join(NAMES)}.")
    (mine / NAMES[1].removesuffix(".gz")).write_bytes(gzip.decompress(tiny_fashion[NAMES[1]]))
    (mine / NAMES[2]).write_bytes(tiny_fashion[NAMES[2]])
    assert named_refusal(mine).endswith(f": {NAMES[0]}, {NAMES[3]}.")


def test_a_named_folder_that_is_not_there_is_refused(tmp_path):
    assert named_refusal(tmp_path / "mine") == (
        f"There is no folder {tmp_path / 'mine'}. Name the one that has Fashion-MNIST's files, or leave --data-dir out."
    )


def test_a_file_in_place_of_the_named_folder_is_refused(tmp_path):
    (tmp_path / "mine").write_bytes(b"")
    assert named_refusal(tmp_path / "mine") == (
        f"{tmp_path / 'mine'} cannot be read: Not a directory. Name a folder that has Fashion-MNIST's files."
    )


def test_a_named_folder_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    assert named_refusal(tmp_path) == (
        f"{tmp_path} cannot be read: Permission denied. Name a folder that has Fashion-MNIST's files."
    )


@pytest.fixture
def no_home(monkeypatch):
    """A user without a home folder, as in a container with an unknown user id."""

    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize("ask", [cache_folder, locate, find_or_fetch])
def test_without_a_home_folder_the_error_says_what_to_set(no_home, ask):
    with pytest.raises(DataError) as refused:
        ask()
    assert str(refused.value) == (
        "There is no home folder to keep data in. Set XDG_CACHE_HOME, or name the data's folder with --data-dir."
    )


def test_without_a_home_folder_both_remedies_work(no_home, monkeypatch, tmp_path, tiny_fashion):
    mine = fill(tmp_path / "mine", tiny_fashion)
    assert find_or_fetch(mine) == mine
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lockstep" / "fashion-mnist"


def test_the_cache_comes_before_the_system(cache, mirror, tiny_fashion):
    fill(sources.SYSTEM_FOLDER, tiny_fashion)
    assert fetch(mirror) == locate() == sources.SYSTEM_FOLDER
    fill(cache, tiny_fashion)
    assert fetch(mirror) == locate() == cache
    assert mirror.seen == []


def test_a_folder_with_three_of_four_files_does_not_count(cache, tiny_fashion):
    fill(cache, {name: tiny_fashion[name] for name in NAMES[:3]})
    assert locate() is None


def test_the_first_mirror_that_has_all_wins(serve, cache, tiny_fashion):
    empty, good, unneeded = serve({}), serve(tiny_fashion), serve(tiny_fashion)
    assert fetch(empty, good, unneeded) == cache
    assert empty.names_seen == [FIRST]
    assert good.names_seen == NAMES
    assert unneeded.seen == []
    assert_whole(cache, tiny_fashion)


def test_debian_comes_after_the_mirrors(serve, cache, tiny_fashion, fake_debian):
    empty = serve({})
    assert fetch(empty) == cache
    assert empty.names_seen == [FIRST]
    assert fake_debian.commands() == ["download dataset-fashion-mnist"]
    assert_whole(cache, tiny_fashion)


def test_debian_is_not_asked_when_a_mirror_has_all(mirror, fake_debian):
    fetch(mirror)
    assert fake_debian.commands() == []


def test_when_everything_fails_the_error_lists_all_that_was_tried_and_what_to_do(serve, cache, tiny_fashion):
    first, second = serve({}), serve({FIRST: b"no such thing"})
    lines = refusal(first, second).splitlines()
    assert lines[0] == "Fashion-MNIST could not be found or fetched. Tried:"
    assert lines[1:4] == [
        f"  - {cache}: not there",
        f"  - {sources.SYSTEM_FOLDER}: not there",
        f"  - {first.url}: Not Found",
    ]
    assert lines[4].startswith(f"  - {second.url}: ")
    assert lines[5] == "  - Debian's dataset-fashion-mnist: no apt-get on this machine"
    assert f"--data-dir: {', '.join(NAMES)}." in lines[6]
    assert "--data fashion-mnist-mini" in lines[6]


def test_the_mirrors_that_are_asked_by_default_are_secure():
    assert len(sources.MIRRORS) == 2
    assert all(url.startswith("https://") for url in sources.MIRRORS)


# --- downloads


def test_a_download_is_complete_and_reports_its_progress(mirror, cache, tiny_fashion):
    reported = []
    from_mirror(mirror.url, cache, lambda *progress: reported.append(progress))
    assert_whole(cache, tiny_fashion)
    assert mirror.seen == [(name, None) for name in NAMES]
    assert reported == [(name, len(tiny_fashion[name]), len(tiny_fashion[name])) for name in NAMES]
    assert read_folder(cache).X_train.shape == (12, 1, 8, 9)


def test_files_that_are_there_are_not_fetched_again(mirror, cache, tiny_fashion):
    fill(cache, {name: tiny_fashion[name] for name in NAMES[:2]})
    fetch(mirror)
    assert mirror.names_seen == NAMES[2:]
    assert_whole(cache, tiny_fashion)


def test_an_interrupted_download_is_resumed(mirror, cache, tiny_fashion):
    fill(cache, {f"{FIRST}.part": tiny_fashion[FIRST][:100]})
    reported = []
    from_mirror(mirror.url, cache, lambda *progress: reported.append(progress))
    assert mirror.seen[:2] == [(FIRST, "bytes=100-"), (NAMES[1], None)]
    assert reported[0] == (FIRST, len(tiny_fashion[FIRST]), len(tiny_fashion[FIRST]))
    assert_whole(cache, tiny_fashion)


def test_a_server_without_ranges_sends_the_whole_file_again(mirror, cache, tiny_fashion):
    fill(cache, {f"{FIRST}.part": tiny_fashion[FIRST][:100]})
    mirror.answer = send_whole_always
    fetch(mirror)
    assert mirror.seen[0] == (FIRST, "bytes=100-")
    assert mirror.names_seen == NAMES
    assert_whole(cache, tiny_fashion)


def test_a_part_that_is_complete_is_accepted(mirror, cache, tiny_fashion):
    fill(cache, {f"{FIRST}.part": tiny_fashion[FIRST]})
    fetch(mirror)
    assert mirror.seen[0] == (FIRST, f"bytes={len(tiny_fashion[FIRST])}-")
    assert_whole(cache, tiny_fashion)


def test_a_part_of_another_file_is_fetched_again_the_next_time_at_the_latest(mirror, cache, tiny_fashion):
    fill(cache, {f"{FIRST}.part": tiny_fashion[FIRST] + b"garbage"})
    with contextlib.suppress(DataError):
        fetch(mirror)
    fetch(mirror)
    assert_whole(cache, tiny_fashion)


def test_a_file_that_the_server_does_not_have_leaves_no_part(serve, cache, tiny_fashion):
    two_of_four = serve({name: tiny_fashion[name] for name in NAMES[:2]})
    assert f"{two_of_four.url}: Not Found" in refusal(two_of_four)
    assert names_in(cache) == sorted(NAMES[:2])


def test_an_interrupted_connection_keeps_the_part_and_the_next_try_resumes(mirror, cache, tiny_fashion):
    mirror.answer = lambda handler, content: send(handler, content, num_bytes=70)
    size = len(tiny_fashion[FIRST])
    assert f"the connection ended after 70 of {size} bytes" in refusal(mirror)
    assert names_in(cache) == [f"{FIRST}.part"]
    assert "the connection ended after 140 of" in refusal(mirror)
    mirror.answer = send
    fetch(mirror)
    assert mirror.seen[:3] == [(FIRST, None), (FIRST, "bytes=70-"), (FIRST, "bytes=140-")]
    assert_whole(cache, tiny_fashion)


def test_the_next_mirror_resumes_where_the_first_was_interrupted(serve, cache, tiny_fashion):
    cut, good = serve(tiny_fashion), serve(tiny_fashion)
    cut.answer = lambda handler, content: send(handler, content, num_bytes=70)
    fetch(cut, good)
    assert good.seen[0] == (FIRST, "bytes=70-")
    assert_whole(cache, tiny_fashion)


def with_its_name(name, packed):
    """The same content, packed by a program that keeps the file's name."""
    file = io.BytesIO()
    with gzip.GzipFile(name, "wb", fileobj=file) as out:
        out.write(gzip.decompress(packed))
    return file.getvalue()


def test_a_mirror_with_other_gz_files_is_not_mixed_with_the_first(serve, cache, tiny_fashion):
    cut, other = serve(tiny_fashion), serve({name: with_its_name(name, c) for name, c in tiny_fashion.items()})
    cut.answer = lambda handler, content: send(handler, content, num_bytes=70)
    assert fetch(cut, other) == cache
    assert read_folder(cache).X_train.shape == (12, 1, 8, 9)


def test_wrong_content_is_refused_and_removed(serve, cache, tiny_fashion, idx_bytes):
    wrong = serve({**tiny_fashion, FIRST: gzip.compress(idx_bytes(np.zeros((12, 8, 9))))})
    assert "is not Fashion-MNIST's train-images-idx3-ubyte" in refusal(wrong)
    assert names_in(cache) == []


def test_a_page_in_place_of_the_file_is_refused_and_removed(serve, cache, tiny_fashion):
    portal = serve(dict.fromkeys(NAMES, b"<html>Please log in</html>"))
    assert "It is another kind of file." in refusal(portal)
    assert names_in(cache) == []


def test_a_later_wrong_file_leaves_the_good_ones(serve, cache, tiny_fashion):
    wrong = serve({**tiny_fashion, NAMES[3]: tiny_fashion[NAMES[1]]})
    refusal(wrong)
    assert names_in(cache) == sorted(NAMES[:3])


def test_a_server_that_is_not_there_is_reported(serve, cache, tiny_fashion):
    with TCPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        url = f"http://127.0.0.1:{closed.server_address[1]}"
    with pytest.raises(DataError, match="refused"):
        from_mirror(url, cache)


@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_server_that_fails_is_reported(mirror, status):
    mirror.answer = lambda handler, content: handler.send_error(status, "Out of order")
    assert f"{mirror.url}: Out of order" in refusal(mirror)


def test_a_server_that_answers_416_from_the_start_is_reported(mirror):
    mirror.answer = lambda handler, content: handler.send_error(416)
    assert f"{mirror.url}: " in refusal(mirror)


def garbage(handler, content):
    handler.wfile.write(b"garbage\r\n\r\n")


def length_in_words(handler, content):
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: ten\r\n\r\n" + content)


def cut_chunk(handler, content):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n" + content[:20])


@pytest.mark.parametrize("answer", [garbage, length_in_words, cut_chunk])
def test_a_server_that_does_not_speak_http_is_reported(mirror, answer):
    mirror.answer = answer
    assert f"{mirror.url}: " in refusal(mirror)


def test_a_cache_that_cannot_be_created_is_reported(mirror, cache, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert f"the cache {cache} cannot be created (" in refusal(mirror)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="There is no /dev/full on this machine.")
def test_a_full_disk_is_reported(mirror, cache):
    fill(cache, {})
    (cache / f"{FIRST}.part").symlink_to("/dev/full")
    assert "No space left on device" in refusal(mirror)


# --- Debian's package


class FakeDebian:
    """`apt-get` and `dpkg-deb` as shell scripts; the arguments of apt-get are logged."""

    def __init__(self, folder, contents):
        self.bin, self.log = folder / "bin", folder / "commands"
        self.package = fill(folder / "package" / sources.SYSTEM_FOLDER.relative_to("/"), contents)
        self.script("dpkg-deb", f'[ "$1" = -x ] && [ -f "$2" ] && mkdir -p "$3" && cp -R "{folder}/package/." "$3"')
        self.apt("touch dataset-fashion-mnist_1_all.deb")

    def script(self, name, body):
        (self.bin / name).write_text(f'#!/bin/sh\nPATH="{REAL_PATH}"\n{body}\n')
        (self.bin / name).chmod(0o755)

    def apt(self, body):
        self.script("apt-get", f'echo "$@" >> "{self.log}"\n{body}')

    def commands(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def fake_debian(tmp_path, cache, tiny_fashion):
    return FakeDebian(tmp_path, tiny_fashion)


def debian_refusal(cache):
    with pytest.raises(DataError) as refused:
        from_debian(cache)
    return str(refused.value)


def test_the_package_is_unpacked_into_the_cache_and_then_removed(fake_debian, cache, tiny_fashion, tmp_path):
    reported = []
    from_debian(cache, lambda *progress: reported.append(progress))
    assert_whole(cache, tiny_fashion)
    assert reported == [("Debian's dataset-fashion-mnist", 0, 0)]
    assert names_in(tmp_path / "temporary") == []


def test_a_package_with_unpacked_files_is_accepted_too(fake_debian, cache, tiny_fashion):
    for name, content in tiny_fashion.items():
        (fake_debian.package / name).unlink()
        (fake_debian.package / name).with_suffix("").write_bytes(gzip.decompress(content))
    from_debian(cache)
    assert names_in(cache) == sorted(name.removesuffix(".gz") for name in NAMES)
    assert read_folder(cache).y_test.tolist() == list(range(6))


def test_without_package_lists_it_makes_lists_of_its_own(fake_debian, cache, tiny_fashion, tmp_path):
    fake_debian.apt(
        """case "$*" in
        "download "*) echo "E: Unable to locate package" >&2; exit 100;;
        *" update") [ -d lists/partial ] && [ -d cache/archives/partial ] && touch lists/made;;
        *" download "*) [ -f lists/made ] && touch dataset-fashion-mnist_1_all.deb;;
        esac"""
    )
    from_debian(cache)
    first, update, download = fake_debian.commands()
    assert first == "download dataset-fashion-mnist"
    assert update.endswith("-o APT::Sandbox::User= update")
    assert download == update.removesuffix("update") + "download dataset-fashion-mnist"
    for option in ("Dir::State::lists", "Dir::Cache"):
        assert f"-o {option}={tmp_path / 'temporary'}" in update
    assert_whole(cache, tiny_fashion)
    assert names_in(tmp_path / "temporary") == []


def test_the_error_of_apt_is_reported_and_temporary_files_are_removed(fake_debian, cache, tmp_path):
    fake_debian.apt('echo "W: a warning" >&2; echo "E: Temporary failure resolving" >&2; exit 100')
    assert debian_refusal(cache) == "apt-get failed: E: Temporary failure resolving"
    assert len(fake_debian.commands()) == 2
    assert names_in(cache) == []
    assert names_in(tmp_path / "temporary") == []


def test_apt_without_a_message_is_reported_with_its_exit_status(fake_debian, cache):
    fake_debian.apt("exit 3")
    assert debian_refusal(cache) == "apt-get failed: exit status 3"


def test_an_error_of_apt_in_another_encoding_is_reported(fake_debian, cache):
    fake_debian.apt(r'printf "E: Unm\366glich\n" >&2; exit 100')
    assert debian_refusal(cache).startswith("apt-get failed: E: Unm")


def test_apt_that_takes_too_long_is_stopped(fake_debian, cache, monkeypatch):
    monkeypatch.setattr(sources, "APT_TIMEOUT_SECONDS", 0.1)
    fake_debian.apt("exec sleep 20")
    assert "timed out after 0.1 seconds" in debian_refusal(cache)


def test_apt_that_downloads_nothing_is_reported(fake_debian, cache):
    fake_debian.apt("true")
    assert debian_refusal(cache) == "apt-get downloaded no package"


def test_a_package_without_the_file_is_refused(fake_debian, cache):
    (fake_debian.package / NAMES[2]).unlink()
    assert debian_refusal(cache) == "the package has no t10k-images-idx3-ubyte"


def test_a_package_that_cannot_be_unpacked_is_refused(fake_debian, cache):
    fake_debian.script("dpkg-deb", "echo 'dpkg-deb: error: not a Debian format archive' >&2; exit 2")
    assert debian_refusal(cache) == "dpkg-deb failed: dpkg-deb: error: not a Debian format archive"


def test_a_package_with_other_content_is_refused_and_removed(fake_debian, cache, tiny_fashion):
    (fake_debian.package / FIRST).write_bytes(tiny_fashion[NAMES[2]])
    assert "is not Fashion-MNIST's train-images-idx3-ubyte" in debian_refusal(cache)
    assert names_in(cache) == []


@pytest.mark.parametrize("missing", ["apt-get", "dpkg-deb"])
def test_a_system_without_apt_is_reported(fake_debian, cache, missing):
    (fake_debian.bin / missing).unlink()
    assert debian_refusal(cache) == f"no {missing} on this machine"
    assert fake_debian.commands() == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="There is no /dev/full on this machine.")
def test_a_disk_too_full_for_the_package_is_reported(fake_debian, cache):
    fill(cache, {})
    (cache / f"{FIRST}.part").symlink_to("/dev/full")
    assert "No space left on device" in refusal()


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="There is no apt-get on this machine.")
def test_the_real_package_has_all_of_fashion_mnist(cache, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(sources, "APT_TIMEOUT_SECONDS", 30.0)
    try:
        from_debian(cache)
    except DataError as problem:
        if str(problem).startswith("apt-get failed") or "timed out" in str(problem):
            pytest.skip(f"apt-get could not fetch the package: {problem}")
        raise
    data, mini = read_folder(cache), read_mini()
    assert (data.X_train.shape, data.X_test.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert np.bincount(data.y_train).tolist() == [6000] * 10
    for X, y, X_mini, y_mini, num_each in (
        (data.X_train, data.y_train, mini.X_train, mini.y_train, 200),
        (data.X_test, data.y_test, mini.X_test, mini.y_test, 50),
    ):
        first = np.sort(np.concatenate([np.flatnonzero(y == label)[:num_each] for label in range(10)]))
        np.testing.assert_array_equal(X_mini, X[first])
        np.testing.assert_array_equal(y_mini, y[first])


# --- several processes at once, and mirrors that send too much


def test_ranks_that_start_together_fetch_every_file_once(mirror, cache, tiny_fashion):
    """Each waits for the one that fetches, and then finds the files. `flock` knows no threads: these have forked."""

    def slow(handler, content):
        time.sleep(0.05)
        send(handler, content)

    mirror.answer = slow
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                status = 0 if fetch(mirror) == cache else 1
            os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert mirror.names_seen == NAMES
    assert_whole(cache, tiny_fashion)


def test_a_process_that_waits_says_so_and_looks_again(mirror, cache, tiny_fashion):
    reported = []
    with alone_in(cache, no_progress):
        waiting = threading.Thread(
            target=find_or_fetch, args=(None, lambda *progress: reported.append(progress), (mirror.url,))
        )
        waiting.start()
        while not reported:
            time.sleep(0.01)
        for name, content in tiny_fashion.items():
            (cache / name).write_bytes(content)
    waiting.join()
    assert reported == [("Fashion-MNIST, in another process", 0, 0)]
    assert mirror.seen == []


def test_a_mirror_that_sends_without_end_does_not_fill_the_disk(serve, cache, tiny_fashion, monkeypatch):
    monkeypatch.setattr(sources, "MAX_BYTES", 1 << 17)
    mirror, sent = serve(tiny_fashion), []

    def endless(handler, content):
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(ConnectionError):
            while len(sent) < 10_000:
                sent.append(handler.wfile.write(bytes(1 << 14)))

    mirror.answer = endless
    assert f"it sends more than {1 << 17:,} bytes for {FIRST}" in refusal(mirror)
    assert names_in(cache) == []
    assert len(sent) < 10_000
