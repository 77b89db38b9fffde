# SPDX-License-Identifier: Apache-2.0
"""The benchmark's suites, and what they measure with: rounds, the machine, peers, the report."""
