"""Which frameworks are asked for: LOCKSTEP_BACKENDS=jax,numpy, or without it every one that is installed."""

import os
from contextlib import suppress

import pytest

from lockstep.backends import BACKENDS, is_installed, load_backend
from lockstep.core.errors import BackendError


def asked_for() -> list[str]:
    named = os.environ.get("LOCKSTEP_BACKENDS")
    return named.split(",") if named else [name for name in BACKENDS if is_installed(name)]


for name in asked_for():  # before the tests import it: what it warns about when it is imported is not their subject
    with suppress(BackendError):
        load_backend(name)

# The files of tests for one framework import it.
collect_ignore_glob = [f"test_{name}*.py" for name in BACKENDS if name not in asked_for()]


def pytest_generate_tests(metafunc):
    """A test that takes `name` runs once for each framework that is asked for, one with `any_name` for all."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", asked_for(), scope="module")
    if "any_name" in metafunc.fixturenames:
        metafunc.parametrize("any_name", BACKENDS)


@pytest.fixture(scope="module")
def backend(name):
    return load_backend(name)


@pytest.fixture
def must_load(any_name):
    """Skips, with a sentence, what was not asked for; what was asked for has to be there."""
    if any_name not in asked_for():
        pytest.skip(f"{any_name} was not asked for; its tests run in an environment of its own: nox -s {any_name}")
    return any_name
