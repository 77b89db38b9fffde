# SPDX-License-Identifier: Apache-2.0
"""`scripts.launch`, whose engines compile what they use and nothing else."""

from engine import programs
from scripts import launch
from tests.engine.conftest import OnDemand

if __name__ == "__main__":
    programs.Executables = OnDemand
    launch.run()
