"""Tests that need a GPU: `make test-gpu` runs them, and without one they fail. Elsewhere they are not collected."""

import os

collect_ignore_glob = [] if "KVPLAN_TEST_GPU" in os.environ else ["test_*.py"]
