"""Imports do not use up the caller's random numbers."""

import subprocess
import sys

import pytest

IMPORTS_RICH = "lockstep.report.console", "lockstep.analysis.plan_table", "lockstep.bench.tables"


@pytest.mark.parametrize("module", IMPORTS_RICH)
def test_the_import_of_a_library_that_draws_a_number_leaves_them_as_they_are(module):
    program = f"import random; before = random.getstate(); import {module}; assert random.getstate() == before"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
