"""Moved."""

from demo.vllm_server import *  # noqa: F403
