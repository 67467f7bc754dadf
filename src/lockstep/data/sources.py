"""Where Fashion-MNIST comes from. Sources are tried in this order; the first that has all four files wins.

    1. --data-dir            the user's own folder; nothing else is tried then
    2. the user's cache      $XDG_CACHE_HOME/lockstep/fashion-mnist
    3. the system's folder   where Debian's package dataset-fashion-mnist installs it
    4. public mirrors        over HTTPS, into the cache; an interrupted download is resumed
    5. Debian's package      fetched and unpacked into the cache, without installing it

Whatever the source, a file enters the cache only after its unpacked bytes have been verified. One process at a time
fetches; the others wait for it, and find what it has fetched.
"""

import fcntl
import http.client
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lockstep.core.errors import DataError
from lockstep.data.fashion_mnist import FILES, IdxFile, find_in, read_verified

SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DEBIAN_PACKAGE = "dataset-fashion-mnist"
FROM_DEBIAN = f"Debian's {DEBIAN_PACKAGE}"
MIRRORS = (
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
)
TIMEOUT_SECONDS = 10.0  # to connect, and between two pieces of a response
MAX_BYTES = 1 << 26  # of a download: the largest of the four files has 26 MB, and a wrong mirror could fill the disk
APT_TIMEOUT_SECONDS = 300.0

Progress = Callable[[str, int, int], None]  # (what is fetched, bytes so far, bytes in total or 0 if unknown)


def no_progress(what: str, num_bytes: int, num_bytes_total: int) -> None:
    """Shows nothing."""


def cache_folder() -> Path:
    """The folder of this user's fetched data."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "lockstep" / "fashion-mnist"
    except RuntimeError:
        raise DataError(
            "There is no home folder to keep data in. Set XDG_CACHE_HOME, or name the data's folder with --data-dir."
        ) from None


def locate(data_dir: Path | None = None) -> Path | None:
    """The folder that has Fashion-MNIST already, without fetching anything; None if there is none."""
    folders = [data_dir] if data_dir is not None else [cache_folder(), SYSTEM_FOLDER]
    return next((folder for folder in folders if all(find_in(folder, file) for file in FILES)), None)


def find_or_fetch(
    data_dir: Path | None = None, progress: Progress = no_progress, mirrors: tuple[str, ...] = MIRRORS
) -> Path:
    """The folder that has Fashion-MNIST, after fetching it if need be; the error lists all that was tried."""
    found = locate(data_dir)
    if found is not None:
        return found
    if data_dir is not None:
        raise DataError(_what_is_wrong_with(data_dir))
    cache = cache_folder()
    with alone_in(cache, progress):
        found = locate()  # another process may have fetched it in the meantime
        return _fetch(cache, progress, mirrors) if found is None else found


@contextmanager
def alone_in(cache: Path, progress: Progress) -> Iterator[None]:
    """Waits until no other process fetches into `cache`: ranks start together, and would write into the same file."""
    try:
        folder = os.open(_writable(cache), os.O_RDONLY)
    except (DataError, OSError):
        yield  # there is nothing to write to: whoever tries says so
        return
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Fashion-MNIST, in another process", 0, 0)
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError:
            pass  # some network file systems have no locks
        yield
    finally:
        os.close(folder)  # and with it the lock


def _fetch(cache: Path, progress: Progress, mirrors: tuple[str, ...]) -> Path:
    tried = [f"{cache}: not there", f"{SYSTEM_FOLDER}: not there"]
    for name, fetch in [(url, partial(from_mirror, url)) for url in mirrors] + [(FROM_DEBIAN, from_debian)]:
        try:
            fetch(cache, progress)
            return cache
        except (DataError, OSError) as problem:
            tried.append(f"{name}: {problem}")
    names = ", ".join(f"{file.name}.gz" for file in FILES)
    raise DataError(
        "Fashion-MNIST could not be found or fetched. Tried:\n"
        + "".join(f"  - {line}\n" for line in tried)
        + f"Put these files into a folder and name it with --data-dir: {names}. "
        + "Or start with the small sample that ships with Lockstep: --data fashion-mnist-mini."
    )


def _what_is_wrong_with(data_dir: Path) -> str:
    try:
        there = {path.name for path in data_dir.iterdir()}
    except FileNotFoundError:
        return f"There is no folder {data_dir}. Name the one that has Fashion-MNIST's files, or leave --data-dir out."
    except OSError as problem:
        return f"{data_dir} cannot be read: {problem.strerror}. Name a folder that has Fashion-MNIST's files."
    missing = [f"{file.name}.gz" for file in FILES if not {file.name, f"{file.name}.gz"} & there]
    if not missing:
        return f"The files in {data_dir} cannot be read. Check their permissions, or name another folder."
    return f"{data_dir} does not have Fashion-MNIST. Put these files there, packed or not: {', '.join(missing)}."


def from_mirror(url: str, cache: Path, progress: Progress = no_progress) -> None:
    """Downloads the files that `cache` lacks from the folder at `url`."""
    for file in FILES:
        if find_in(cache, file) is None:
            part = _writable(cache) / f"{file.name}.gz.part"
            is_resumed = part.exists()
            try:
                _download_and_accept(url, file, part, cache, progress)
            except DataError:
                if not is_resumed or part.exists():
                    raise
                _download_and_accept(url, file, part, cache, progress)  # the part was of another .gz, and is removed


def _download_and_accept(url: str, file: IdxFile, part: Path, cache: Path, progress: Progress) -> None:
    try:
        download(f"{url}/{file.name}.gz", part, progress)
    except (OSError, http.client.HTTPException, ValueError) as problem:
        raise DataError(_reason(problem)) from problem
    _accept(part, file, cache)


def download(url: str, part: Path, progress: Progress = no_progress) -> None:
    """The file at `url` into `part`, which may hold its first bytes already."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as refused:
        refused.close()
        if refused.code == 416:  # nothing is left to send: the part is whole, or is not a part of this file
            return
        raise
    with response:
        is_resumed = response.status == 206
        start = start if is_resumed else 0
        total = start + int(response.headers.get("Content-Length") or 0)
        with part.open("ab" if is_resumed else "wb") as out:
            while piece := response.read(1 << 16):
                if out.tell() + len(piece) > MAX_BYTES:
                    part.unlink()
                    raise DataError(f"it sends more than {MAX_BYTES:,} bytes for {url.rpartition('/')[2]}")
                out.write(piece)
                progress(url.rpartition("/")[2], out.tell(), total)
        if total > start and part.stat().st_size < total:
            raise ConnectionError(f"the connection ended after {part.stat().st_size} of {total} bytes")


def from_debian(cache: Path, progress: Progress = no_progress) -> None:
    """Fetches Debian's package and unpacks the files. Nothing is installed, and no permissions are needed."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise DataError(f"no {program} on this machine")
    progress(FROM_DEBIAN, 0, 0)
    with tempfile.TemporaryDirectory(prefix="lockstep-apt-") as name:
        work = Path(name)
        try:
            _run(["apt-get", "download", DEBIAN_PACKAGE], work)
        except DataError:  # the system's package lists are missing or old: make our own, in the work folder
            (work / "lists" / "partial").mkdir(parents=True)
            (work / "cache" / "archives" / "partial").mkdir(parents=True)
            own = ["-o", f"Dir::State::lists={work}/lists", "-o", f"Dir::Cache={work}/cache"]
            own += ["-o", "APT::Sandbox::User="]  # apt's own user could not write to a private folder
            _run(["apt-get", *own, "update"], work)
            _run(["apt-get", *own, "download", DEBIAN_PACKAGE], work)
        packages = sorted(work.glob("*.deb"))
        if not packages:
            raise DataError("apt-get downloaded no package")
        _run(["dpkg-deb", "-x", str(packages[0]), str(work / "unpacked")], work)
        unpacked = work / "unpacked" / SYSTEM_FOLDER.relative_to("/")
        for file in FILES:
            source = find_in(unpacked, file)
            if source is None:
                raise DataError(f"the package has no {file.name}")
            part = _writable(cache) / f"{source.name}.part"
            shutil.copyfile(source, part)
            _accept(part, file, cache)


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, input="", capture_output=True, errors="replace", timeout=APT_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise DataError(f"{' '.join(command[:2])}: {_reason(problem)}") from problem
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        raise DataError(f"{command[0]} failed: {next((line for line in lines if line.startswith('E:')), lines[0])}")


def _accept(part: Path, file: IdxFile, cache: Path) -> None:
    """Renames a verified file to its final name; a wrong one is removed."""
    try:
        read_verified(part, file)
    except DataError:
        part.unlink(missing_ok=True)
        raise
    part.replace(cache / part.name.removesuffix(".part"))


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise DataError(f"the cache {folder} cannot be created ({problem.strerror})") from problem
    return folder


def _reason(problem: Exception) -> str:
    return str(getattr(problem, "reason", None) or problem)
