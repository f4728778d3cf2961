"""A jailed Python for tool calls. It is light to import: it loads neither torch nor vllm."""

from sandbox.client.sandbox import Sandbox
from sandbox.client.session import Session
from sandbox.config import SandboxConfig, SandboxUnavailable, Stats
from sandbox.tiers import TIERS, Tier
from sandbox.wire import Limits, ToolResult

__all__ = [
    "TIERS",
    "Limits",
    "Sandbox",
    "SandboxConfig",
    "SandboxUnavailable",
    "Session",
    "Stats",
    "Tier",
    "ToolResult",
]
