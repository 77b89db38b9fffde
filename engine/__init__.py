# SPDX-License-Identifier: Apache-2.0
"""The engine: requests, scheduler, step programs, models, sampling, KV memory and the API."""

from engine.api import LLM
from engine.params import SamplingParams
from engine.request import RequestOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
