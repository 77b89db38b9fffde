# SPDX-License-Identifier: Apache-2.0
"""What the benchmark measures with: the machine, the workload, and the peer it is compared to."""
