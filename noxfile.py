"""One environment for each framework, made here and nowhere else: `nox -s torch`, `nox -s jax`, ...

`make test` runs them one after the other. The torch environment has all tools and runs all tests; the others have their
framework only, and run the conformance tests, which are the same for all. The session `long` runs the tests that are
marked as long, `kernels` those of kernels for GPUs.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import nox

nox.options.envdir = ".venv"  # .venv/torch, .venv/jax, ...
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"
nox.options.stop_on_first_error = True

HAS_MXNET = sys.version_info < (3, 12)
NO_MXNET = (
    "MXNet 1.9.1 needs numpy 1.23.5, which Python 3.12 and newer cannot install. "
    "With Python 3.11: make clean, then make test PYTHON=python3.11."
)
PARALLEL = ("-n", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal")  # a process for each core


def install(session: nox.Session, extras: str) -> None:
    """Installs Lockstep with `extras`, unless that was done already."""
    constraints = Path("constraints-mxnet.txt" if session.name == "mxnet" else "constraints.txt")
    wanted = hashlib.sha256(Path("pyproject.toml").read_bytes() + constraints.read_bytes()).hexdigest()
    done = Path(session.virtualenv.location) / "installed"
    if done.exists() and done.read_text() == wanted:
        done.touch()  # make compares times
    else:
        session.log(f"Setting up {session.virtualenv.location} (once; about a minute)")
        session.install("--quiet", "-c", str(constraints), "-e", f".[{extras}]")
        done.write_text(wanted)


def install_chromium(session: nox.Session) -> None:
    """The browser that looks at reports, where it can be installed; its tests are skipped where it cannot."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        if os.geteuid() == 0 and shutil.which("apt-get"):
            apt = ("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "chromium")
            session.run(*apt, external=True, silent=True, success_codes=range(256))
        else:
            session.warn("Chromium is not installed: the tests of reports in a browser are skipped.")


@nox.session
def torch(session: nox.Session) -> None:
    """Format, lint, types, import directions, and all tests but the long ones, with coverage."""
    install(session, "torch,dev")
    install_chromium(session)
    session.run("ruff", "format", "--check", "--quiet", ".")
    session.run("ruff", "check", "--quiet", ".")
    session.run("mypy")
    session.run("lint-imports", "--no-logo")
    backends = {"LOCKSTEP_BACKENDS": "torch,numpy"}
    session.run("pytest", "-q", "-m", "not long", *PARALLEL, "--cov", "--cov-report=term:skip-covered", env=backends)
    if not HAS_MXNET:
        session.warn(f"MXNet is skipped. {NO_MXNET}")


@nox.session
def paddle(session: nox.Session) -> None:
    """The conformance tests with Paddle."""
    conformance(session)


@nox.session(default=HAS_MXNET)
def mxnet(session: nox.Session) -> None:
    """The conformance tests with MXNet."""
    if not HAS_MXNET:
        session.error(NO_MXNET)
    conformance(session)


@nox.session
def jax(session: nox.Session) -> None:
    """The conformance tests with JAX."""
    conformance(session)


@nox.session(default=False)
def numpy(session: nox.Session) -> None:
    """The conformance tests with numpy and no framework at all."""
    conformance(session)


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """Models of transformers, from configurations: nothing is downloaded but the library.

    Those of torchvision and timm are tested where a torchvision is there that was built for the same PyTorch.
    """
    install(session, "torch,dev")
    session.install("--quiet", "-c", "constraints.txt", "transformers")
    session.run("pytest", "-q", *PARALLEL, "tests/training/test_models_of_others.py", "tests/test_examples.py")


@nox.session(default=False)
def ray(session: nox.Session) -> None:
    """`lockstep.train` in the workers of Ray Train, on a local Ray with 1, 2 and 3 of them."""
    install(session, "torch,test")
    session.install("--quiet", "-c", "constraints.txt", "ray[train]")
    session.run("pytest", "-q", "tests/test_examples.py", "-k", "ray")


@nox.session(default=False)
def kernels(session: nox.Session) -> None:
    """Our Triton kernels in Triton's interpreter, which needs no GPU. PyTorch for CPUs comes without Triton."""
    install(session, "torch,test")
    session.install("--quiet", "-c", "constraints.txt", "triton")
    session.run("pytest", "-q", *PARALLEL, "tests/backends/torch/kernels/test_triton.py", env={"TRITON_INTERPRET": "1"})


@nox.session(default=False, venv_backend="none")
def long(session: nox.Session) -> None:
    """Crash loops, thousands of damaged files, compilers, two hosts, the benchmark: all that `torch` leaves out."""
    for name in ("torch", "paddle", "mxnet", "jax"):
        python = Path(".venv", name, "bin", "python")
        if python.exists():
            tests = ("-m", "pytest", "-q", "-m", "long", *PARALLEL, "tests" if name == "torch" else "tests/backends")
            backends = "torch,numpy" if name == "torch" else name
            session.run(str(python), *tests, env={"LOCKSTEP_BACKENDS": backends}, external=True)


def conformance(session: nox.Session) -> None:
    install(session, "test" if session.name == "numpy" else f"{session.name},test")
    session.run("pytest", "-q", "-m", "not long", *PARALLEL, "tests/backends", env={"LOCKSTEP_BACKENDS": session.name})
