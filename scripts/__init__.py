# SPDX-License-Identifier: Apache-2.0
"""Commands: flags, files and summaries around the engine's Python API."""
