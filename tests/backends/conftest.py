"""The frameworks under test: LOCKSTEP_BACKENDS=jax,numpy, or by default every one that is installed."""

import os
from contextlib import suppress

import pytest

from lockstep.backends import BACKENDS, is_installed, load_backend
from lockstep.core.errors import BackendError


def asked_for() -> list[str]:
    named = os.environ.get("LOCKSTEP_BACKENDS")
    return named.split(",") if named else [name for name in BACKENDS if is_installed(name)]


for name in asked_for():  # before the tests import it: its own warnings at import would be errors
    with suppress(BackendError):
        load_backend(name)

# Tests of one framework import it.
collect_ignore = [file for name in BACKENDS if name not in asked_for() for file in (f"test_{name}.py", name)]


def pytest_generate_tests(metafunc):
    """A test with `name` runs once for each framework under test, one with `any_name` for every framework."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", asked_for(), scope="module")
    if "any_name" in metafunc.fixturenames:
        metafunc.parametrize("any_name", BACKENDS)


@pytest.fixture(scope="module")
def backend(name):
    return load_backend(name)


@pytest.fixture
def must_load(any_name):
    """Skips a framework that is not under test; one that is under test must be installed."""
    if any_name not in asked_for():
        pytest.skip(f"{any_name} is not under test here; it has an environment of its own: nox -s {any_name}")
    return any_name
